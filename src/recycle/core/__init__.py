"""The nouns of ReCycle and the rules of plans. Standard library only; every other package imports from here."""
