"""The worker process: what it is started with, how it sets up an epoch, its main loop, and faults injected into it.

Imports core, host, control and the runtime rooms below it: compute, execute, transport, checkpoint.
"""
