"""Arguments in, calls out. This room wires the others together and holds no logic of its own."""
