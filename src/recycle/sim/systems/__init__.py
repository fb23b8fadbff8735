"""The training systems that are compared under failures: one policy a file, their constants, and the registry of their names."""
