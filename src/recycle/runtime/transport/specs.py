"""The values of the transport: TensorMessage, GroupView, TransportSpec; and TransportBroken, its only error."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from recycle.control.drift.message_times import MessageTimer
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.boundary.boundary_spec import BoundarySpec, PackedTensors, TensorSpec
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.activity import Activity

# Messages of so many rounds may be on their way at once: stages run at most one iteration apart, and may try one twice.
_NUM_TAG_ROUNDS = 8
# Of the tree along which all workers vote. Four: a dozen workers are two links from its root, and 2,048 are six.
_NUM_CHILDREN = 4


DelayTo = Callable[[Worker], float]
"""Returns by how many seconds messages to a worker are delayed on purpose."""


class TransportBroken(Exception):
    """A connection to another worker is gone, or was closed because the epoch is over.

    `unreachable` names the workers that this one could not reach when it tried, if it did.
    """

    def __init__(self, reason: str, unreachable: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


@dataclass(frozen=True, slots=True)
class TensorMessage:
    """A message from one worker to another: the activation (F) or the gradient (I) of a chain, for the op of `stage`.

    The sender makes it in the op at index `made_at` of its row, in its warm-up or after it; the receiver takes it for the op at
    index `taken_at` of its own row.
    """

    kind: Kind
    stage: int
    chain: int
    sender: Worker
    receiver: Worker
    made_at: int
    taken_at: int
    is_of_warm_up: bool


class MessageLink(NamedTuple):
    """A worker that sends messages of a kind to another one."""

    kind: Kind
    sender: Worker
    receiver: Worker


@dataclass(frozen=True, slots=True)
class GroupView:
    """A worker's view of the live workers of one epoch. `workers` have the same order in every view of the epoch.

    `partners` are those with which the worker exchanges messages or state in this epoch, and each of them has this worker among
    its own; None stands for all others.
    """

    worker: Worker
    workers: Sequence[Worker]
    epoch: int = 0
    partners: frozenset[Worker] | None = None

    @property
    def others(self) -> list[Worker]:
        return [other for other in self.workers if other != self.worker]

    @property
    def peers(self) -> list[Worker]:
        """The live workers of the worker's stage, itself included."""
        return [other for other in self.workers if other.stage == self.worker.stage]

    @property
    def is_first_peer(self) -> bool:
        """Whether the worker represents its stage where only one of the peers must contribute."""
        return self.worker == self.peers[0]

    @property
    def parent(self) -> Worker | None:
        """The worker before this one in the tree along which all workers vote; None at its root."""
        rank = self.workers.index(self.worker)
        return self.workers[(rank - 1) // _NUM_CHILDREN] if rank else None

    @property
    def children(self) -> Sequence[Worker]:
        """The workers after this one in that tree."""
        first = self.workers.index(self.worker) * _NUM_CHILDREN + 1
        return self.workers[first : first + _NUM_CHILDREN]

    @property
    def linked(self) -> list[Worker]:
        """The workers to which this one connects, beside those with which it sums: its partners, its parent and its children."""
        if self.partners is None:
            return self.others
        wanted = {*self.partners, *self.children, self.parent}
        return [other for other in self.others if other in wanted]

    def sum_groups(self, ties: Sequence[Tie]) -> dict[Tie | None, tuple[str, list[Worker]]]:
        """Name and members of the groups that sum gradients: of the peers (key None), and of each tie that the stage is in."""
        groups: dict[Tie | None, tuple[str, list[Worker]]] = {None: (f"stage{self.worker.stage}", self.peers)}
        for number, tie in enumerate(ties):
            if self.worker.stage in tie.stages:
                groups[tie] = f"tie{number}", [other for other in self.workers if other.stage in tie.stages]
        return groups

    def connected(self, ties: Sequence[Tie]) -> set[Worker]:
        """All workers to which this one connects. In each group that sums, they are the one before it and the one after it."""
        rings = [self.beside(members) for _, members in self.sum_groups(ties).values()]
        return {*self.linked, *(other for ring in rings for other in ring)}

    def beside(self, members: Sequence[Worker]) -> list[Worker]:
        """The members of a group that this worker has beside itself in the ring of all of them."""
        place = members.index(self.worker)
        ring = {members[place - 1], members[(place + 1) % len(members)]}
        return [other for other in members if other in ring - {self.worker}]

    def others_in_sum(self, tie: Tie | None) -> str:
        """The names of the other workers that sum with this one."""
        stages = tie.stages if tie is not None else (self.worker.stage,)
        return ", ".join(str(other) for other in self.workers if other.stage in stages and other != self.worker)


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """What a job asks of its transport, the same in every epoch.

    `boundaries` are by the stage that sends activations. `host` is the address at which other machines reach this one.
    `activity` is told whom the worker waits for, and `timer` how long messages are on their way, if their carrier stamps them.
    """

    boundaries: Mapping[int, BoundarySpec]
    num_chains: int
    ties: Sequence[Tie]
    timeout: timedelta
    host: str = "127.0.0.1"
    activity: Activity = field(default_factory=Activity)
    timer: MessageTimer = field(default_factory=MessageTimer)
    delay_s_to: DelayTo = lambda receiver: 0.0

    def tensor_spec(self, message: TensorMessage) -> TensorSpec:
        """The one tensor as which a message travels."""
        return self.packed(message.kind, message.stage).spec

    def packed(self, kind: Kind, stage: int) -> PackedTensors:
        """The tensors of a message for an op of `stage`, as they travel."""
        boundary = self.boundary(kind, stage)
        return boundary.forwards if kind is Kind.F else boundary.backwards

    def boundary(self, kind: Kind, stage: int) -> BoundarySpec:
        """The stage before made an activation; gradients are those of the tensors that their receiver had sent."""
        return self.boundaries[stage - 1 if kind is Kind.F else stage]

    def tag(self, message: TensorMessage, round_: int) -> int:
        return self.number(message, round_, _NUM_TAG_ROUNDS)

    def number(self, message: TensorMessage, round_: int, num_rounds: int) -> int:
        """A number that differs for all messages to one worker in any `num_rounds` consecutive rounds."""
        direction = 0 if message.kind is Kind.F else 1
        return (round_ % num_rounds * 2 + direction) * self.num_chains + message.chain

    def kind_of(self, tag: int) -> Kind:
        """The kind of the messages with this tag."""
        return Kind.I if tag // self.num_chains % 2 else Kind.F
