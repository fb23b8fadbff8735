"""MessageQueue: the messages of one worker in one epoch, over any MessageCarrier: what was posted, what was sent, what is kept.

Several tensors of a message travel as one. A sent tensor is kept until a later message from its receiver shows, by its index in
the receiver's row, that it was taken.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recycle.control.drift.message_times import MessageStamp
from recycle.core.cluster import Worker
from recycle.core.errors import Unsendable
from recycle.core.op import Kind
from recycle.runtime.boundary.boundary_spec import PackedTensors, TensorSpec
from recycle.runtime.boundary.nests import Nest, tensors_in
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.links.stamped_body import clock_us
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportSpec


class Posted(NamedTuple):
    """A send or a receive that was begun, and the tensor that it reads from or writes to."""

    work: Any
    body: Tensor


class MessageCarrier(Protocol):
    """How tensors travel from worker to worker. `round_` is the round that the message belongs to."""

    device: torch.device
    """Where received tensors lie."""

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted: ...

    def post_receive(self, message: TensorMessage, round_: int) -> Posted: ...

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        """Return the tensor that was sent, from the body that was received."""
        ...

    def stamp_of(self, message: TensorMessage, body: Tensor, round_: int) -> MessageStamp | None:
        """Return the stamp of a message that was received and is not unpacked yet; None if messages have none."""
        ...


class MessageQueue:
    """Sends and receives over a carrier. `round` counts the tries at iterations: messages of two rounds are never confused."""

    def __init__(self, view: GroupView, spec: TransportSpec, groups: GlooGroups, carrier: MessageCarrier) -> None:
        self.round = 0
        self._spec, self._groups, self._carrier = spec, groups, carrier
        # The messages sent to each worker, a heap by the round and the index at which the receiver takes them.
        self._sent: dict[Worker, list[tuple[tuple[int, int], int, Posted]]] = {other: [] for other in view.linked}
        self._counter = count()
        self._posted: dict[TensorMessage, Posted] = {}

    def send(self, message: TensorMessage, nest: Nest, has_paths: bool = True) -> None:
        """Send without waiting for the receiver. Without `has_paths`, nothing goes back, and no tensor has a gradient path."""
        tensors, packed = list(tensors_in(nest)), self._spec.packed(message.kind, message.stage)
        self._refuse_other_spec(message, nest if has_paths else None, tensors, packed)
        posted = self._carrier.post_send(message, packed.pack(tensors, self._carrier.device), self.round)
        heappush(self._sent[message.receiver], ((self.round, message.taken_at), next(self._counter), posted))

    def _refuse_other_spec(self, message: TensorMessage, nest: Nest, tensors: Sequence[Tensor], packed: PackedTensors) -> None:
        """The receiver has allocated the tensors that the first micro-batch of the job had; those of a nest have paths, too."""
        made = tuple(map(TensorSpec.of, tensors))
        boundary = self._spec.boundary(message.kind, message.stage)
        if not packed.fits(made):
            what = "the largest micro-batch has" if boundary.varies else "the first micro-batch made"
            raise Unsendable(
                f"{message.sender} made {_listed(made)} for {message.receiver}, but {what} {_listed(packed.tensors)}: "
                f"{'none may be larger' if boundary.varies else 'all must be alike'}; pad or cut the samples"
            )
        if nest is not None and message.kind is Kind.F and not boundary.is_one_tensor and not boundary.is_alike(nest):
            raise Unsendable(
                f"{message.sender} made the same tensors for {message.receiver} as in the first micro-batch, but in another "
                "structure, or with other gradient paths: all must be alike"
            )

    def post_receive(self, message: TensorMessage) -> None:
        """Let the message arrive while something else runs."""
        if message not in self._posted:
            self._posted[message] = self._carrier.post_receive(message, self.round)

    def comes_within(self, seconds: float, message: TensorMessage) -> bool:
        """Wait for a message for so long at most; return whether it has come, or never will, which `receive` says.

        The next message to be received is to be this one.
        """
        self.post_receive(message)
        is_here: bool = self._posted[message].work.ends_within(seconds, self._spec.timeout)
        return is_here

    def receive(self, message: TensorMessage) -> Nest:
        """Return what was sent, or wait for it."""
        self.post_receive(message)
        work, body = self._posted.pop(message)
        asked_us = clock_us()
        self._groups.wait(work, str(message.sender))
        received_us = clock_us()
        if (stamp := self._carrier.stamp_of(message, body, self.round)) is not None:
            self._spec.timer.received(message.sender, stamp, asked_us, received_us)
        self._release(message.sender, (self.round, message.made_at))
        packed = self._spec.packed(message.kind, message.stage)
        return self._nest_of(message, packed.unpack(self._carrier.unpack(message, body, self.round)))

    def zeros(self, message: TensorMessage) -> Nest:
        """Return zeros of the shapes and dtypes that the message has."""
        specs = self._spec.packed(message.kind, message.stage).tensors
        return self._nest_of(message, [torch.zeros(spec.shape, dtype=spec.dtype, device=self._carrier.device) for spec in specs])

    def _nest_of(self, message: TensorMessage, tensors: Sequence[Tensor]) -> Nest:
        if message.kind is Kind.F:
            return self._spec.boundary(message.kind, message.stage).nest_of(tensors)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _release(self, receiver: Worker, reached: tuple[int, int]) -> None:
        """Release the tensors that `receiver` has taken, now that it has reached an index of its row in a round."""
        sent = self._sent[receiver]
        while sent and sent[0][0] <= reached:
            _, _, posted = heappop(sent)
            self._groups.wait(posted.work, str(receiver))

    def flush(self) -> None:
        """Wait until every message that was sent has been taken."""
        for receiver in self._sent:
            self._release(receiver, (self.round + 1, 0))

    def close(self) -> None:
        self._sent.clear()
        self._posted.clear()


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "nothing"
