"""Process groups of one epoch behind one protocol: gloo, NCCL, CUDA IPC; their rendezvous, and the transfer of a stage's state.

Imports core, runtime.compute, runtime.checkpoint and the row program of runtime.execute.
"""
