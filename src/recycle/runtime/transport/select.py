"""make_transport: choose gloo, NCCL or CUDA IPC by where the workers of an epoch compute."""

from collections.abc import Sequence
from typing import Any

import torch

from recycle.runtime.transport.cuda_ipc import CudaIpcTransport, SharedMemory, share_one_gpu
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.nccl import NcclTransport
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportSpec


def make_transport(
    store: Any, view: GroupView, spec: TransportSpec, incoming: Sequence[TensorMessage], device: torch.device
) -> Transport:
    """The transport of a worker that computes on `device`; all workers of the epoch must call it.

    `incoming` are the messages that the worker receives in an iteration.
    """
    if device.type != "cuda" or len(view.workers) == 1:
        return GlooTransport(store, view, spec)
    if len(view.workers) <= torch.cuda.device_count():  # NCCL refuses two workers on one GPU
        return NcclTransport(store, view, spec, incoming, device)
    if share_one_gpu(store, view, str(torch.cuda.get_device_properties(device).uuid)):
        return CudaIpcTransport(store, view, spec, SharedMemory(store, view, device))
    return GlooTransport(store, view, spec)
