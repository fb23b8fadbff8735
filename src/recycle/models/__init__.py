"""What is trained out of the box: a small GPT that can be cut into any number of stages, and text that is on every machine."""
