"""CUDA streams by purpose: work of one thread on a GPU does not wait for that of another."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A stream for a purpose, one for all epochs, because the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on_stream(device: torch.device, purpose: str) -> AbstractContextManager[object]:
    """Use the stream of this purpose, if this is a GPU."""
    return torch.cuda.stream(_stream(device, purpose)) if device.type == "cuda" else nullcontext()


@contextmanager
def beside_ops(device: torch.device) -> Iterator[None]:
    """On a GPU, do not wait for the ops that were launched before this block; what the block computes is there at its end.

    What it uses must be there already: none of the ops in flight may write it.
    """
    with on_stream(device, "beside ops"):
        yield
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
