"""The nouns of ReCycle. Standard library only; every other room imports from here."""
