"""How samples become micro-batches, ahead of the ops that need them: orders, padding, streams, loader processes.

It may import what passes between stages, and the computing room.
"""
