"""Which links the workers of an epoch have: over the host, within a GPU that they share, or between GPUs of their own."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.transport.cuda_ipc import CudaIpcTransport, share_one_gpu
from recycle.runtime.transport.gloo import GlooTransport, GroupView
from recycle.runtime.transport.nccl import NcclTransport
from recycle.runtime.worker.worker_spec import WorkerSpec


def make_transport(
    kit: WorkerSpec, store: Any, address: GroupView, turns: Sequence[Instruction], device: torch.device, host: str = "127.0.0.1"
) -> GlooTransport:
    """The links of a worker with these turns, which computes on `device` of the machine `host`; all of its epoch make theirs."""
    timeout = timedelta(seconds=kit.options.timeout_s)
    common = store, address, kit.tensor_specs, kit.shape.num_chains, kit.ties, timeout
    if device.type != "cuda" or len(address.workers) == 1:
        return GlooTransport(*common, host)
    if len(address.workers) <= torch.cuda.device_count():  # NCCL refuses two workers on one GPU
        return NcclTransport(*common, turns, device, host)
    if share_one_gpu(store, address, str(torch.cuda.get_device_properties(device).uuid)):
        return CudaIpcTransport(*common, device, host)
    return GlooTransport(*common, host)
