"""The transports of GPUs: CUDA IPC within one GPU, NCCL between GPUs."""
