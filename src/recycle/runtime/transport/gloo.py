"""Links between processes: one group of all live workers, one for each stage's peers, one for each tie; made fresh for an epoch.

Groups are objects under a prefix of the store, never torch's global ones, so that an epoch's groups can be dropped and others
made. A message is sent without waiting, and kept until its receiver must have taken it: a message from that receiver which it
made later says so. Messages are told apart by a tag, from the round (an iteration, or the second try at one) and the op.

gloo carries host memory, so that what lies on a GPU is copied through the host: that is what several workers on one GPU need.

Links break together: when a worker dies, those that wait for it fail, and `abort` from another thread makes all others fail, too.
Broken links are never mended; the next epoch has its own.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.errors import Unsendable
from recycle.core.op import Kind
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.row_program import TensorMessage

# No message has this tag: whoever waits for one waits in vain, and gloo then closes all connections of the group.
_NEVER_SENT = 2**31 - 1
_BULK_TAGS = 2**30
_AT_ONCE = timedelta(milliseconds=1)
# Until a connection is made. gloo tries five times; whoever makes links does not wait for that once the epoch is over.
_CONNECT = timedelta(seconds=2)
# Messages of so many rounds may be on their way at once: stages run at most one iteration apart, and may try one twice.
_ROUNDS = 8


class TransportBroken(Exception):
    """A connection to another worker is gone, or was cut because the epoch is over."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The form of what a stage sends on: the gradient that comes back has the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class GroupView:
    """Where a worker is among the live ones, in one epoch. `workers` are in the same order everywhere."""

    worker: Worker
    workers: Sequence[Worker]
    epoch: int = 0

    def peers(self, stage: int) -> list[Worker]:
        return [other for other in self.workers if other.stage == stage]

    @property
    def is_first_peer(self) -> bool:
        """Whether it speaks for its stage where one of the peers must."""
        return self.worker == self.peers(self.worker.stage)[0]


class GlooTransport:
    """The links of one worker in one epoch."""

    def __init__(
        self,
        store: Any,
        address: GroupView,
        parcels: Mapping[int, TensorSpec],
        num_chains: int,
        ties: Sequence[Tie],
        timeout: timedelta,
        host: str = "127.0.0.1",
    ) -> None:
        """`host` is the address of this machine at which the others reach it."""
        self.round = 0
        self._address, self._parcels, self._num_chains = address, parcels, num_chains
        self._rank = {other: number for number, other in enumerate(address.workers)}
        # What was sent to each worker, a heap by the round and the place at which it is taken; the tensor is kept for it.
        self._sent: dict[Worker, list[tuple[tuple[int, int], int, Any, Tensor]]] = {other: [] for other in address.workers}
        self._counter = count()
        self._expected: dict[TensorMessage, tuple[Any, Tensor]] = {}

        self._timeout, self._host, self._is_aborted = timeout, host, False
        self._patient = dist.AllreduceOptions()
        self._patient.timeout = timeout
        self._all = self._group(store, "all", address.workers)
        self._peers = self._group(store, f"stage{address.worker.stage}", address.peers(address.worker.stage))
        self._ties = {
            tie: self._group(store, f"tie{number}", [other for other in address.workers if other.stage in tie.stages])
            for number, tie in enumerate(ties)
            if address.worker.stage in tie.stages
        }

    def _group(self, store: Any, name: str, members: Sequence[Worker]) -> Any:
        """A group of these workers, under the prefix of the epoch."""
        # torch's stubs do not know a PrefixStore.
        prefix = dist.PrefixStore(f"e{self._address.epoch}/{name}", store)  # type: ignore[attr-defined]
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = min(_CONNECT, self._timeout)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            return dist.ProcessGroupGloo(prefix, members.index(self._address.worker), len(members), options)
        except RuntimeError as problem:
            raise TransportBroken(f"the group {name} could not be made: {problem}") from None

    def abort(self) -> None:
        """Make whoever waits for these links fail at once, in this process and in the others; any thread may call it.

        Whoever waits hears it at once, but gloo needs some 50 ms to close a group: nobody waits for that.
        """
        if self._is_aborted:
            return
        self._is_aborted = True
        for group in self._groups():
            if group is not None and group.size() > 1:
                threading.Thread(target=_cut, args=(group,), name="cutting links", daemon=True).start()

    def _groups(self) -> list[Any]:
        return [self._all, self._peers, *self._ties.values()]

    def close(self) -> None:
        """Let go of the groups, which were aborted: their connections close when nobody holds on to them."""
        self._sent.clear()
        self._expected.clear()
        self._ties.clear()
        self._all = self._peers = None

    def wait(self, work: Any) -> None:
        """Wait until something that was begun is done."""
        try:
            work.wait(self._timeout)
        except RuntimeError as problem:
            raise TransportBroken(str(problem)) from None
        if self._is_aborted:
            raise TransportBroken("the epoch is over")

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        self._refuse_other_form(message, tensor)
        body = self._packed(message, tensor)
        self._keep(message, self._begun(self._all.send, [body], self._rank[message.receiver], self._tag(message)), body)

    def _packed(self, message: TensorMessage, tensor: Tensor) -> Tensor:
        """What is sent, in host memory."""
        return tensor.detach().cpu().contiguous()

    def _room(self, message: TensorMessage) -> Tensor:
        """Where to it is received."""
        parcel = self._parcel(message)
        return torch.empty(parcel.shape, dtype=parcel.dtype)

    def _unpacked(self, message: TensorMessage, body: Tensor) -> Tensor:
        """What was sent, from what was received."""
        return body

    def _begun(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Begin something that takes its time."""
        if self._is_aborted:
            raise TransportBroken("the epoch is over")
        try:
            return operation(*args)
        except RuntimeError as problem:
            raise TransportBroken(str(problem)) from None

    def _refuse_other_form(self, message: TensorMessage, tensor: Tensor) -> None:
        """The receiver has made room for what the first micro-batch of all had."""
        parcel = self._parcel(message)
        if (tuple(tensor.shape), tensor.dtype) != (parcel.shape, parcel.dtype):
            raise Unsendable(
                f"{message.sender} made {tensor.dtype} of shape {list(tensor.shape)} for {message.receiver}, but the first "
                f"micro-batch made {parcel.dtype} of shape {list(parcel.shape)}: all must be alike; pad or cut the samples"
            )

    def _keep(self, message: TensorMessage, work: Any, body: Tensor) -> None:
        """Hold on to what is being sent."""
        heappush(self._sent[message.receiver], ((self.round, message.taken_at), next(self._counter), work, body))

    def _parcel(self, message: TensorMessage) -> TensorSpec:
        """What reaches a stage forwards was made by the stage before; what comes back is as large as what it made itself."""
        return self._parcels[message.stage - 1 if message.kind is Kind.F else message.stage]

    def expect(self, message: TensorMessage) -> None:
        body = self._room(message)
        work = self._begun(self._all.recv, [body], self._rank[message.sender], self._tag(message))
        self._expected[message] = work, body

    def receive(self, message: TensorMessage) -> Tensor:
        if message not in self._expected:
            self.expect(message)
        work, body = self._expected.pop(message)
        self.wait(work)
        self._let_go(message.sender, (self.round, message.made_at))
        return self._unpacked(message, body)

    def blank(self, message: TensorMessage) -> Tensor:
        parcel = self._parcel(message)
        return torch.zeros(parcel.shape, dtype=parcel.dtype)

    def _let_go(self, receiver: Worker, reached: tuple[int, int]) -> None:
        """Let go of what `receiver` has taken, now that it is known to have reached a place of its row in a round."""
        sent = self._sent[receiver]
        while sent and sent[0][0] <= reached:
            _, _, work, _ = heappop(sent)
            self.wait(work)

    def settle(self) -> None:
        """Wait until everything that was sent was taken."""
        for receiver in self._sent:
            self._let_go(receiver, (self.round + 1, 0))

    def add_over_peers(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the peers of the stage."""
        self._add(self._peers, tensor)

    def add_over_tie(self, tie: Tie, tensors: Sequence[Tensor]) -> None:
        """Replace tensors that the peers of each stage have summed already by their sum over the stages of a tie."""
        for tensor in tensors:
            if not self._address.is_first_peer:
                tensor.zero_()
            self._add(self._ties[tie], tensor)

    def start_adding_over_all(self, tensor: Tensor) -> Any:
        """Begin to replace a tensor in host memory by its sum over all live workers; it is there after `wait`."""
        return self._begun(self._all.allreduce, [tensor], self._patient)

    def send_bytes(self, receiver: Worker, body: Tensor, tag: int) -> None:
        """Send bytes, and return when they were taken."""
        self.wait(self._begun(self._all.send, [body], self._rank[receiver], _BULK_TAGS + tag))

    def receive_bytes(self, sender: Worker, size_bytes: int, tag: int) -> Tensor:
        body = torch.empty(size_bytes, dtype=torch.uint8)
        self.wait(self._begun(self._all.recv, [body], self._rank[sender], _BULK_TAGS + tag))
        return body

    def _tag(self, message: TensorMessage) -> int:
        """A number that tells apart all messages between two workers that can be on their way at once."""
        direction = 0 if message.kind is Kind.F else 1
        return (self.round % _ROUNDS * 2 + direction) * self._num_chains + message.chain

    def _add(self, group: Any, tensor: Tensor) -> None:
        """Add up in place, through the host where gloo does it."""
        where = tensor.cpu() if isinstance(group, dist.ProcessGroupGloo) else tensor
        self.wait(self._begun(group.allreduce, [where], self._patient))
        if where is not tensor:
            tensor.copy_(where)


def _cut(group: Any) -> None:
    """Close all connections of a group."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NEVER_SENT).wait(_AT_ONCE)
