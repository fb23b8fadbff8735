"""The choice between gloo, NCCL and CUDA IPC: `choose_transport`, by which all workers of an epoch use the same."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from recycle.control.net.handshake import this_host
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.runtime.options import AUTO, GLOO, IPC, NCCL
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.gpu.cuda_ipc import CudaIpcTransport, SharedMemory
from recycle.runtime.transport.gpu.nccl import NcclTransport, share_gpus
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView, MessageLink, TransportBroken, TransportSpec


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """Where a worker computes: its machine, and the UUID of its GPU, which is empty on a CPU."""

    host: str
    gpu: str = ""


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The transport of an epoch: gloo, nccl or ipc. `warning` says why it is slow, if it need not be."""

    kind: str
    warning: str = ""
    shares_gpus: bool = False
    is_one_machine: bool = False


def device_of_worker(device: torch.device) -> WorkerDevice:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return WorkerDevice(this_host(), gpu)


def choose_transport(devices: Mapping[Worker, WorkerDevice], wanted: str = AUTO) -> TransportChoice:
    """Return the transport for workers at these places: the fastest one that connects all, or the one that is wanted.

    Raises:
        UserError: The one that is wanted does not connect these workers.
    """
    workers_of = Counter(device.gpu for device in devices.values())
    on_cpu = [worker for worker, device in devices.items() if not device.gpu]
    is_shared = max(workers_of.values()) > 1
    if len(devices) == 1 or wanted == GLOO or (on_cpu and wanted == AUTO):
        return TransportChoice(GLOO)
    if on_cpu:
        raise UserError(f"the transport is {wanted}, which connects GPUs, but {on_cpu[0]} computes on a CPU: write gloo or auto")
    if wanted == IPC and len(workers_of) > 1:
        raise UserError(f"the transport is ipc, which connects workers on one GPU, but they have {len(workers_of)}: write auto")
    if wanted == NCCL and is_shared:
        text = f"NCCL connects workers that share a GPU ({_shared(devices)}) by sockets only: that is slow, and for tests"
        return TransportChoice(NCCL, text, True, len({device.host for device in devices.values()}) == 1)
    if not is_shared:
        return TransportChoice(NCCL)
    if len(workers_of) == 1:
        return TransportChoice(IPC)
    costs = "tensors go through the host's memory, over gloo: a copy from the GPU and one to it for each message and each sum"
    why = f"{_shared(devices)}, and others have another one; give each worker a GPU of its own, or all the same one"
    return TransportChoice(GLOO, f"{costs}; {why}")


def _shared(devices: Mapping[Worker, WorkerDevice]) -> str:
    """Say which workers share the first GPU that is shared."""
    (gpu, _), *_ = Counter(device.gpu for device in devices.values()).most_common(1)
    workers = [str(worker) for worker, device in devices.items() if device.gpu == gpu]
    host = next(device.host for device in devices.values() if device.gpu == gpu)
    return f"{' and '.join((', '.join(workers[:-1]), workers[-1]))} share GPU {gpu} of {host}"


def agree_on_transport(store: Any, view: GroupView, own: WorkerDevice, wanted: str) -> TransportChoice:
    """The transport of an epoch, which its first worker chooses; all workers of the epoch must call this.

    The first worker asks the others only if it matters what they have: gloo connects it to any others if it has no GPU.
    """
    prefix = dist.PrefixStore(f"e{view.epoch}/transport", store)  # type: ignore[attr-defined]
    prefix.set(str(view.worker), json.dumps([own.host, own.gpu]))
    try:
        if view.worker == view.workers[0]:
            if wanted == GLOO or (wanted == AUTO and not own.gpu):
                choice = TransportChoice(GLOO)
            else:
                prefix.wait([str(other) for other in view.workers])
                devices = {other: WorkerDevice(*json.loads(prefix.get(str(other)))) for other in view.workers}
                choice = choose_transport(devices, wanted)
            prefix.set("choice", json.dumps(astuple(choice)))
        return TransportChoice(*json.loads(prefix.get("choice")))
    except RuntimeError as problem:  # the epoch is over, or another worker is late
        raise TransportBroken(str(problem)) from None


def make_transport(
    choice: TransportChoice, store: Any, view: GroupView, spec: TransportSpec, links: Iterable[MessageLink], device: torch.device
) -> Transport:
    """The transport of a worker that computes on `device`; all workers of the epoch must call it.

    `links` are those by which it sends and receives messages.
    """
    if choice.shares_gpus:
        share_gpus(view.worker, choice.is_one_machine)
    if choice.kind == NCCL:
        return NcclTransport(store, view, spec, links, device)
    if choice.kind == IPC:
        return CudaIpcTransport(store, view, spec, SharedMemory(store, view, device))
    return GlooTransport(store, view, spec)
