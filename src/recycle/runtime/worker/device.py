"""The device of a worker: which one it is, and what is done on it before the worker says that it is ready."""

import os
import warnings

import torch

from recycle.runtime.options import AUTO, NCCL, TrainOptions
from recycle.runtime.worker.local_stage import CannotLoad


def may_use_nccl(options: TrainOptions, shares_gpus: bool) -> bool:
    """Whether NCCL may connect a worker, by all that it knows before it has a place."""
    return options.device == "cuda" and (options.transport == NCCL or (options.transport == AUTO and not shares_gpus))


def select_device(options: TrainOptions, number: int) -> torch.device:
    """Select a device in the calling thread, and return it; workers without an agent share the GPUs that they see, by number."""
    if options.device != "cuda":
        return torch.device(options.device)
    if options.is_exact:  # a sum is exact only if every kernel is deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # autograd's own thread has no context at first, makes one, and warns about it.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise RuntimeError("torch finds no GPU here")
    device = torch.device("cuda", number % num_gpus)
    torch.cuda.set_device(device)
    return device


def warm_up(options: TrainOptions, number: int) -> None:
    """Run a first forward and backward pass on a GPU. It takes seconds: later, all workers of an epoch would wait for this one.

    Raises:
        CannotLoad: The GPU cannot be used.
    """
    if options.device != "cuda":
        return
    try:
        device = select_device(options, number)
        given = torch.ones(8, 8, device=device, requires_grad=True)
        (given @ given).sum().backward()  # type: ignore[no-untyped-call]
        float(given.grad.sum())  # type: ignore[union-attr]
    except RuntimeError as problem:  # the others go on without this worker
        raise CannotLoad(f"its GPU cannot be used: {str(problem).strip().partition(chr(10))[0]}") from None
