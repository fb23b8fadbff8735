"""NcclGroup: a process group of NCCL that can be aborted by another thread while one launches an operation on it."""

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# A launch takes less than this, unless the communicator is still being made.
_LAUNCH_S = 1.0


class NcclGroup:
    """The operations that a worker launches. torch itself does not keep an abort from freeing what a launch uses."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, has_priority: bool = False) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.is_high_priority_stream = has_priority
        self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        self._is_aborted = False
        self._launching = threading.Lock()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._launch("send", tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        return self._launch("recv", tensors, rank, tag)

    def allreduce(self, tensor: Tensor) -> Any:
        return self._launch("allreduce", [tensor], dist.AllreduceOptions())

    def _launch(self, name: str, *args: Any) -> Any:
        with self._launching:
            if self._is_aborted:
                raise RuntimeError("the epoch is over")
            return getattr(self._group, name)(*args)

    def abort(self) -> None:
        """Abort all communicators, also those that were made since the last call."""
        self._is_aborted = True
        is_free = self._launching.acquire(timeout=_LAUNCH_S)
        try:
            with suppress(RuntimeError):
                self._group.abort()
        finally:
            if is_free:
                self._launching.release()
