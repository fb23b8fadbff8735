"""The transport of one epoch behind one protocol: gloo, NCCL or CUDA IPC; the rendezvous of its workers; state transfer.

Imports core, host, control, runtime.compute and runtime.checkpoint. Order of the sub-packages: compute, checkpoint, transport,
execute, worker.
"""
