"""`NewEpoch`: all that a coordinator decides about an epoch; each member gets its own part of it, and the journal all of it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from recycle.control.decide.journal import JournalEntry
from recycle.control.decide.members import Member, Reporters
from recycle.control.decide.messages import Ballot, LayerTransfer, StartEpoch
from recycle.core.cluster import Shape, Worker

# The most ops of an iteration, on average, that the record holds one by one.
_MOST_OPS = 25_000


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """A new epoch: `places` maps each place to its member, `plan` is the packed plan, and the rest is as in `StartEpoch`.

    `sources` maps each place without the state of its stage to the place that it copies from. If layers are transferred, these
    are the places that have no state at all, each with one of the places that send it layers.
    """

    epoch: int
    plan: str
    places: Mapping[str, int]
    iteration: int
    ballot: Ballot | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    checkpoint: int = -1
    only_saves: bool = False
    origin: int = 1
    ops_every: int = 1
    term: int = 0
    layer_counts: tuple[int, ...] = ()
    transfers: tuple[LayerTransfer, ...] | None = None

    @property
    def moved_layers(self) -> tuple[int, ...]:
        """The number of layers of each stage, if layers are transferred."""
        return self.layer_counts if self.transfers else ()

    def messages(self, shape: Shape, programs: Mapping[Worker, str]) -> Iterator[tuple[Worker, StartEpoch]]:
        """Yield each place with the message to its member; `programs` are the row programs of the plan."""
        dead = tuple(str(place) for place in shape.workers() if str(place) not in self.places)
        transfers = defaultdict[str, list[LayerTransfer]](list)
        for each in self.transfers or ():
            transfers[each.receiver].append(each)
            transfers[each.sender].append(each)
        for place in map(Worker.parse, self.places):
            yield place, self._message(place, dead, programs[place], tuple(transfers[str(place)]))

    def _message(self, place: Worker, dead: tuple[str, ...], program: str, transfers: tuple[LayerTransfer, ...]) -> StartEpoch:
        of_stage = f"_{place.stage}"
        sources = {receiver: sender for receiver, sender in self.sources.items() if receiver.endswith(of_stage)}
        return StartEpoch(
            self.epoch,
            str(place),
            dead,
            program,
            self.iteration,
            self.ballot,
            sources,
            self.checkpoint,
            self.only_saves,
            self.origin,
            self.ops_every,
            self.term,
            self.layer_counts,
            self.transfers is not None,
            transfers,
        )


def default_ops_every(num_ops: int) -> int:
    """Return how rarely workers report every op of an iteration of so many ops, so that the record does not outgrow its disk."""
    return -(-num_ops // _MOST_OPS)


def journal_entry(
    start: NewEpoch, members: Mapping[Worker, Member], reason: str, last_number: int, reporters: Reporters
) -> JournalEntry:
    """The entry of an epoch with these members at their places."""
    processes = {str(place): (member.host, member.pid, member.started) for place, member in members.items()}
    late = {iteration: sorted(numbers) for iteration, numbers in reporters.items()}
    return JournalEntry(
        start.epoch,
        start.iteration,
        start.places,
        start.plan,
        reason,
        last_number,
        processes,
        start.origin,
        late,
        start.only_saves,
    )
