"""SHA-256 digests of weights, by which two runs are compared bit for bit, and the bytes of a tensor that digests are made of."""

import ctypes
import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from recycle.core.cluster import Worker


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, valid while the tensor lives. (torch's own way to it needs numpy.)"""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def digest(module: nn.Module) -> str:
    """The digest of a stage: names and bits of its module's parameters and buffers."""
    made = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):  # a module may keep extra state of its own beside its tensors
            made.update(name.encode())
            whole = value.detach().cpu().contiguous()
            made.update(tensor_bytes(whole))
    return made.hexdigest()


def whole_digest(digests: Mapping[Worker, str]) -> str:
    """One digest of all stages in order, each by its first worker."""
    by_stage = {worker.stage: digests[worker] for worker in sorted(digests, reverse=True)}
    return hashlib.sha256("".join(digest for _, digest in sorted(by_stage.items())).encode()).hexdigest()
