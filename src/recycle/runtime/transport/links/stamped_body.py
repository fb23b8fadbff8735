"""Stamped bodies: a tensor in host memory with the stamp of its message behind it, so that both travel as one.

The tensor lies at the start: how it is aligned decides how it is computed with, and so its last bits.
"""

import os
import time
import zlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from recycle.control.drift.message_times import MessageStamp
from recycle.runtime.boundary.boundary_spec import TensorSpec, contiguous_strides

_ALIGNMENT = 8  # bytes at which a number of the stamp may begin
_STAMP_BYTES = _ALIGNMENT * len(MessageStamp._fields)
_BOOT, _TIME_SPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/time"


def clock_us() -> int:
    """The time by the clock of this machine."""
    return time.monotonic_ns() // 1000


@cache
def own_clock() -> int:
    """A number that processes have in common if they read the same clock; 0 if that cannot be known."""
    if not _BOOT.exists():
        return 0
    space = os.readlink(_TIME_SPACE) if os.path.lexists(_TIME_SPACE) else ""
    return zlib.crc32(f"{_BOOT.read_text().strip()} {space}".encode()) or 1


def empty_body(spec: TensorSpec) -> Tensor:
    """Bytes for a tensor of this spec and the stamp of its message."""
    size_bytes = -(-spec.size_bytes // _ALIGNMENT) * _ALIGNMENT
    return torch.empty(size_bytes + _STAMP_BYTES, dtype=torch.uint8)


def tensor_in(body: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor in a body. It is no view of it, so that autograd takes it for a tensor of its own."""
    return torch.empty(0, dtype=spec.dtype).set_(body.untyped_storage(), 0, spec.shape, contiguous_strides(spec.shape))


def write_stamp(body: Tensor, stamp: MessageStamp) -> None:
    body[-_STAMP_BYTES:].view(torch.int64).copy_(torch.tensor(stamp))


def read_stamp(body: Tensor) -> MessageStamp:
    return MessageStamp(*body[-_STAMP_BYTES:].view(torch.int64).tolist())
