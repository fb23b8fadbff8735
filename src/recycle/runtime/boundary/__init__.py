"""What passes between stages: nests of tensors, their spec, and their bytes as one message.

Imports core and torch. A nest is a tensor, or tuples, lists and dicts of nests.
"""
