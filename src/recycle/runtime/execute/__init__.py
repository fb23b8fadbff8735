"""One worker plays its row of a plan: the row as instructions, the executor, the trainer, the state of its stage.

Imports core, control, runtime.compute and runtime.transport.
"""
