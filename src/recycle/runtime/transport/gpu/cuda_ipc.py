"""CudaIpcTransport: a transport between workers that share one GPU: tensors stay in its memory, gloo carries only notifications.

Every worker opens its memory to the others by a CUDA IPC handle: an inbox with a slot for each message of an iteration, and a
staging buffer for what it adds to an all-reduce. A sender copies into the inbox, and then notifies the receiver over gloo; so
waiting, failing and aborting are gloo's. Of several workers that sum, each adds up one part of all staging buffers, in the order
of the workers, and takes the other parts from those who added them up. So all get the same bits, and however many they are, a
worker reads and writes about as much.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.control.net.handshake import this_host
from recycle.core.cluster import Worker
from recycle.host.process_lifetime import process_start
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.send_thread import SendThread
from recycle.runtime.transport.message_queue import MessageQueue, Posted
from recycle.runtime.transport.reducer import Reducer
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportBroken, TransportSpec

# Stages run at most one iteration apart: a message for the next one must not overwrite a message for this one.
_NUM_INBOX_ROUNDS = 2
# Of two sums in a row, the second must not overwrite the parts that peers still read for the first.
_NUM_STAGING_BUFFERS = 2
_SMALL_BYTES = 2**16
_ALIGNMENT = 256  # bytes at which a tensor of any dtype may begin
INBOX, STAGING = "inbox", "staging"
# The GPU has run, or dropped, all copies of a process that was seen to be gone so long ago.
_LAST_COPIES_S = 10.0


def own_process() -> str:
    """A name of this process that no other process ever has: its machine and process ids' name space, its id, its start."""
    return f"{this_host()} {os.getpid()} {process_start(os.getpid())}"


def is_gone(process: str) -> bool:
    """Whether the process of this name is seen to have ended. One in another name space of process ids never is."""
    host, pid, start = process.rsplit(" ", 2)
    return host == this_host() and bool(start) and process_start(int(pid)) != start


class BufferPool:
    """The memory that this process opens to others, each buffer with the processes that may still write into it.

    A worker that was taken for dead may wake up and finish a copy into the buffer of its epoch. So a later epoch gets that buffer
    only if each of these processes takes part in it, and so has left the earlier one, or ended a while ago: the GPU may still run
    the last copies of a process that was killed. Until then the buffer stays allocated and unused. A buffer is never freed: CUDA
    keeps memory that was open to a process that was killed.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._buffers: dict[tuple[str, int], list[tuple[Tensor, set[str]]]] = {}
        self._gone_since_s: dict[str, float] = {}

    def take(self, purpose: str, size_bytes: int, writers: Iterable[str], allocate: Callable[[int], Tensor]) -> Tensor:
        """A buffer for an epoch, into which these processes of the epoch write."""
        buffers, present = self._buffers.setdefault((purpose, size_bytes), []), set(writers)
        for number, (buffer, former) in enumerate(buffers):
            if all(self._is_long_gone(process) for process in former - present):
                buffers[number] = buffer, present
                return buffer
        buffers.append((allocate(size_bytes), present))
        return buffers[-1][0]

    def _is_long_gone(self, process: str) -> bool:
        if not is_gone(process):
            return False
        now_s = self._clock_s()
        return now_s - self._gone_since_s.setdefault(process, now_s) >= _LAST_COPIES_S


_pool = BufferPool()


@contextmanager
def _unless_over() -> Iterator[None]:
    """The other worker may be dead, or the epoch over: that is no fault of this worker."""
    try:
        yield
    except RuntimeError as problem:
        raise TransportBroken(f"no memory of another worker: {str(problem).partition(chr(10))[0]}") from None


class SharedMemory:
    """GPU memory that the workers of one epoch open to each other, by name."""

    def __init__(self, store: Any, view: GroupView, device: torch.device) -> None:
        self.device = device
        self._handles = dist.PrefixStore(f"e{view.epoch}/memory", store)  # type: ignore[attr-defined]
        processes = dist.PrefixStore(f"e{view.epoch}/process", store)  # type: ignore[attr-defined]
        processes.set(str(view.worker), own_process())
        with _unless_over():
            self._members = [processes.get(str(other)).decode() for other in view.workers]

    def open(self, purpose: str, name: str, size_bytes: int) -> Tensor:
        """Take memory of this worker that only workers of this epoch write into, and publish its handle under a name."""
        writers = self._members if purpose == INBOX else ()  # others only read a staging buffer
        memory = _pool.take(purpose, size_bytes, writers, self._allocate)
        if size_bytes:
            _, *handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            fields = [part.hex() if isinstance(part, bytes) else part for part in handle]
            self._handles.set(name, json.dumps([size_bytes, *fields]))
        return memory

    def _allocate(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def map(self, name: str) -> Tensor:
        """The memory that another worker has opened under a name."""
        with _unless_over():
            size_bytes, *fields = json.loads(self._handles.get(name))
            handle = [bytes.fromhex(part) if isinstance(part, str) else part for part in fields]
            storage = torch.UntypedStorage._new_shared_cuda(self.device.index or 0, *handle)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (size_bytes,), (1,))

    def synchronize(self) -> None:
        """Wait until the copies of this worker have arrived."""
        torch.cuda.current_stream(self.device).synchronize()


class CudaIpcTransport:
    """The connections of one worker in one epoch."""

    def __init__(self, store: Any, view: GroupView, spec: TransportSpec, memory: SharedMemory) -> None:
        self.host = GlooGroups(store, view, spec)
        self._view, self._memory = view, memory
        self.reducer = Reducer(self._add, self.host, view, spec)
        self._carrier = CudaIpcCarrier(self.host, view, spec, memory, self.reducer)
        self.messages = MessageQueue(view, spec, self.host, self._carrier)
        self._groups = view.sum_groups(spec.ties)
        self._staging: dict[tuple[Tie | None, int], _Staging] = {}

    def _add(self, tensor: Tensor, tie: Tie | None) -> None:
        is_there = tensor.device == self._memory.device and tensor.is_contiguous()
        if tensor.nbytes < _SMALL_BYTES or not is_there:
            self.reducer.add_through_host(tensor, tie)
            return
        staging = self._staging_for(tensor, tie)
        start = staging.num_sums % _NUM_STAGING_BUFFERS * tensor.nbytes
        staging.num_sums += 1
        flat = tensor.view(-1)
        shares = _shares(flat.numel(), len(staging.of_all), tensor.dtype)

        def staged(number: int, share: slice) -> Tensor:
            return staging.of_all[number][start : start + tensor.nbytes].view(tensor.dtype)[share]

        mine = shares[staging.number]
        with self.reducer.writing(tensor):
            staged(staging.number, slice(None)).copy_(flat)
        self.reducer.meet(tie)  # what all add is there
        with self.reducer.writing(tensor):
            flat[mine].copy_(staged(0, mine))
            for number in range(1, len(shares)):
                flat[mine].add_(staged(number, mine))
            # Nobody else reads this part of the buffer before it has the sum.
            staged(staging.number, mine).copy_(flat[mine])
        self.reducer.meet(tie)  # the sums of all are there
        with self.reducer.writing(tensor):
            for number, share in enumerate(shares):
                if number != staging.number:
                    flat[share].copy_(staged(number, share))

    def _staging_for(self, tensor: Tensor, tie: Tie | None) -> "_Staging":
        """The staging buffers of all workers of a group for sums of this size; made when they are first needed."""
        size_bytes = tensor.nbytes
        if (tie, size_bytes) not in self._staging:
            group, members = self._groups[tie]
            with self.reducer.writing(tensor):
                own = self._memory.open(
                    f"{STAGING} of {group}",
                    f"{self._view.worker}/{group}/{size_bytes}",
                    _NUM_STAGING_BUFFERS * size_bytes,
                )
            self.reducer.meet(tie)  # nobody has to wait long for a buffer
            of_all = [
                own if other == self._view.worker else self._memory.map(f"{other}/{group}/{size_bytes}") for other in members
            ]
            self._staging[tie, size_bytes] = _Staging(members.index(self._view.worker), of_all)
        return self._staging[tie, size_bytes]

    def abort(self) -> None:
        self._carrier.abort()
        self.reducer.abort()
        self.host.abort()

    def close(self) -> None:
        self.messages.close()
        self.host.close()
        self.reducer.close()
        self._carrier.close()
        self._staging.clear()


@dataclass(slots=True)
class _Staging:
    """The staging buffers of a group for sums of one size, those of all its workers in order, and this worker's number."""

    number: int
    of_all: Sequence[Tensor]
    num_sums: int = 0


def _shares(num: int, num_workers: int, dtype: torch.dtype) -> Sequence[slice]:
    """The part of so many numbers that each worker adds up: about equal, and aligned."""
    each = _ALIGNMENT // dtype.itemsize
    share = -(-num // (num_workers * each)) * each
    return [slice(min(num, first), min(num, first + share)) for first in range(0, num_workers * share, share)]


class CudaIpcCarrier:
    """Copies tensors into the receiver's inbox, and notifies the receiver over gloo."""

    def __init__(self, groups: GlooGroups, view: GroupView, spec: TransportSpec, memory: SharedMemory, reducer: Reducer) -> None:
        self.device = memory.device
        self._groups, self._spec, self._memory = groups, spec, memory
        packed = [packed for one in spec.boundaries.values() for packed in (one.forwards, one.backwards)]
        largest = max((each.spec.size_bytes for each in packed), default=0)
        self._slot_bytes = -(-largest // _ALIGNMENT) * _ALIGNMENT
        self.inbox = memory.open(INBOX, f"{view.worker}", _NUM_INBOX_ROUNDS * 2 * spec.num_chains * self._slot_bytes)
        self._inboxes: dict[Worker, Tensor] = {}

        def end_waits(problem: str) -> None:
            reducer.abort(TransportBroken(problem))
            groups.abort()

        self._sends = SendThread(self._notify, lambda work, timeout: work.wait(timeout), self.device, end_waits)

    def slot(self, inbox: Tensor, message: TensorMessage, round_: int) -> Tensor:
        """The part of its receiver's inbox that a message of this round has."""
        spec = self._spec.tensor_spec(message)
        start = self._spec.number(message, round_, _NUM_INBOX_ROUNDS) * self._slot_bytes
        return inbox[start:][: spec.size_bytes].view(spec.dtype).view(spec.shape)

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted:
        if message.receiver not in self._inboxes:
            self._inboxes[message.receiver] = self._memory.map(f"{message.receiver}")
        self.slot(self._inboxes[message.receiver], message, round_).copy_(tensor.detach())
        return self._sends.post(message, self._spec.tag(message, round_), torch.zeros(1, dtype=torch.uint8))

    def _notify(self, message: TensorMessage, number: int, notification: Tensor) -> Sequence[Any]:
        """Say that a tensor is in the receiver's inbox, now that the copy has ended."""
        return self._groups.begin_send(notification, message.receiver, number), notification

    def post_receive(self, message: TensorMessage, round_: int) -> Posted:
        notification = torch.empty(1, dtype=torch.uint8)
        work = self._groups.begin_receive(notification, message.sender, self._spec.tag(message, round_))
        return Posted(work, notification)

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        """A copy: the sender will need the slot again, and the micro-batch may still be in flight then."""
        return self.slot(self.inbox, message, round_).clone()

    def stamp_of(self, message: TensorMessage, body: Tensor, round_: int) -> None:
        """None: the tensor does not leave the memory of the GPU, so that there is no link to measure."""

    def abort(self) -> None:
        self._sends.abort()

    def close(self) -> None:
        # A copy that is still to run would write into an inbox that a later epoch of the same workers uses.
        self._memory.synchronize()
        self._inboxes.clear()
