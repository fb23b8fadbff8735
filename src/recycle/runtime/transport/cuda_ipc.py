"""Links between workers that share one GPU: what they send each other stays in its memory, and only the word that it is there
goes through the host.

Every worker opens its memory to the others by a handle of CUDA's: an inbox with a place for each message of an iteration, and,
for sums over peers, a desk on which its own part lies. A sender copies into the inbox and then tells the receiver, over gloo, as
all other links do; so waiting, failing and aborting are gloo's. Peers add up what lies on all desks, each for itself and all in
the same order, so that they come to the same bits.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.row_program import TensorMessage
from recycle.runtime.transport.gloo import GlooTransport, GroupView, TensorSpec

# Stages run at most one iteration apart: what one sends for the next must not lie on what is still to be taken for this one.
_ROUNDS = 2
# Of two sums in a row, the second one's parts must not lie on what others still read for the first.
_DESKS = 2
_SMALL_BYTES = 2**16
_ALIGNMENT = 256  # bytes at which a tensor of any kind may begin
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_one_gpu(store: Any, address: GroupView, gpu: str) -> bool:
    """Whether all workers of an epoch compute on the same GPU of the same machine; all of them ask, each with its GPU's name."""
    prefix = dist.PrefixStore(f"e{address.epoch}/gpu", store)  # type: ignore[attr-defined]
    machine = _BOOT.read_text() if _BOOT.exists() else str(address.worker)
    prefix.set(str(address.worker), f"{machine} {gpu}")
    return len({prefix.get(str(other)) for other in address.workers}) == 1


_lasting: dict[tuple[str, int], Tensor] = {}


def _lasting_memory(name: str, size_bytes: int, device: torch.device) -> Tensor:
    """Memory that this process keeps for all its epochs: CUDA never gives back what was open to a process that was killed."""
    if (name, size_bytes) not in _lasting:
        _lasting[name, size_bytes] = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    return _lasting[name, size_bytes]


class CudaIpcTransport(GlooTransport):
    """The links of one worker in one epoch."""

    def __init__(
        self,
        store: Any,
        address: GroupView,
        parcels: Mapping[int, TensorSpec],
        num_chains: int,
        ties: Sequence[Tie],
        timeout: timedelta,
        device: torch.device,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(store, address, parcels, num_chains, ties, timeout, host)
        self._device = device
        self._memory = dist.PrefixStore(f"e{address.epoch}/memory", store)  # type: ignore[attr-defined]
        largest = max(map(_size_bytes, parcels.values()), default=0)
        self._place_bytes = -(-largest // _ALIGNMENT) * _ALIGNMENT
        self._inbox = self._opened("inbox", f"{address.worker}", _ROUNDS * 2 * num_chains * self._place_bytes)
        self._inboxes: dict[Worker, Tensor] = {}
        self._desks: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._num_sums = 0

    def _opened(self, purpose: str, name: str, size_bytes: int) -> Tensor:
        """Memory of this worker that others may enter under this name."""
        memory = _lasting_memory(purpose, size_bytes, self._device)
        if size_bytes:
            _, *handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            told = [part.hex() if isinstance(part, bytes) else part for part in handle]
            self._memory.set(name, json.dumps([size_bytes, *told]))
        return memory

    def _entered(self, name: str) -> Tensor:
        """Memory of another worker."""
        size_bytes, handle, *rest = json.loads(self._memory.get(name))
        storage_bytes, offset, counter, counter_offset, event, is_synced = rest
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device.index or 0,
            bytes.fromhex(handle),
            storage_bytes,
            offset,
            bytes.fromhex(counter),
            counter_offset,
            bytes.fromhex(event),
            is_synced,
        )
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size_bytes,), (1,))

    def close(self) -> None:
        super().close()
        self._inboxes.clear()
        self._desks.clear()

    def _place(self, inbox: Tensor, message: TensorMessage) -> Tensor:
        """Where a message of this round lies in its receiver's inbox."""
        parcel, direction = self._parcel(message), 0 if message.kind is Kind.F else 1
        number = (self.round % _ROUNDS * 2 + direction) * self._num_chains + message.chain
        place = inbox[number * self._place_bytes :][: _size_bytes(parcel)]
        return place.view(parcel.dtype).view(parcel.shape)

    def _packed(self, message: TensorMessage, tensor: Tensor) -> Tensor:
        if message.receiver not in self._inboxes:
            self._inboxes[message.receiver] = self._entered(f"{message.receiver}")
        self._place(self._inboxes[message.receiver], message).copy_(tensor.detach())
        torch.cuda.current_stream(self._device).synchronize()
        return torch.zeros(1, dtype=torch.uint8)

    def _room(self, message: TensorMessage) -> Tensor:
        return torch.empty(1, dtype=torch.uint8)

    def _unpacked(self, message: TensorMessage, body: Tensor) -> Tensor:
        """A copy: the sender will need the place again, and this micro-batch may still be in flight then."""
        return self._place(self._inbox, message).clone()

    def blank(self, message: TensorMessage) -> Tensor:
        return super().blank(message).to(self._device)

    def add_over_peers(self, tensor: Tensor) -> None:
        if tensor.nbytes < _SMALL_BYTES or not tensor.is_cuda or not tensor.is_contiguous():
            super().add_over_peers(tensor)
            return
        own, all_desks = self._desks_for(tensor.nbytes)
        start = self._num_sums % _DESKS * tensor.nbytes
        self._num_sums += 1

        def on(desk: Tensor) -> Tensor:
            return desk[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        on(own).copy_(tensor)
        torch.cuda.current_stream(self._device).synchronize()
        self.wait(self._begun(self._peers.allreduce, [torch.zeros(1)], self._patient))  # everybody's part is there
        first, *others = all_desks
        tensor.copy_(on(first))
        for other in others:
            tensor.add_(on(other))

    def _desks_for(self, size_bytes: int) -> tuple[Tensor, list[Tensor]]:
        """The own desk for sums of this size, and those of all peers in order; made when they are first needed."""
        if size_bytes not in self._desks:
            peers = self._address.peers(self._address.worker.stage)
            own = self._opened("desk", f"{self._address.worker}/{size_bytes}", _DESKS * size_bytes)
            desks = [own if other == self._address.worker else self._entered(f"{other}/{size_bytes}") for other in peers]
            self._desks[size_bytes] = own, desks
        return self._desks[size_bytes]


def _size_bytes(parcel: TensorSpec) -> int:
    return math.prod(parcel.shape) * parcel.dtype.itemsize
