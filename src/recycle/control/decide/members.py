"""The members of a job, and the facts of one recovery."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from recycle.control.decide.agreement import Resume, agree_if_possible
from recycle.control.decide.journal import JournalEntry
from recycle.control.decide.messages import EpochStopped, LayerTransfer, ProgressReport, RenewLease
from recycle.control.decide.place_assignment import LayersAt, first_places, free_places, keeps_state, layer_transfers
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.carried_layers import carried_by_stage
from recycle.core.plans.plan_source import PlanAssignment

# With more members, nothing is done for each of them whenever one comes.
_LARGE_JOB = 256
LEAVES = "it was asked to leave"
Reporters = Mapping[int, AbstractSet[int]]
"""For each earlier iteration that is not in the record yet, the members that must still report it: see `JournalEntry`."""


@dataclass(slots=True)
class Member:
    """A worker process. `place` is its place in the present epoch, None if it has none yet.

    `clock_offset_us` is how far its clock is behind the coordinator's: each machine has its own clock. `started` tells its
    process from a later one with the same id, if it is on the coordinator's machine. One that `is_ready` has loaded the
    job, and can take a place. One that `is_leaving` has asked to leave, or is left out, and why. One that `has_left` has no place
    any more; it is a member until its last reports are acknowledged, and it disconnects. `layers` are those whose state it held
    when it stopped, if it said so.
    """

    number: int
    connection: int | None
    host: str
    pid: int
    preferred_place: Worker | None
    last_seen_s: float
    place: Worker | None = None
    busy_s: float = 0.0
    doing: str = ""
    waits_for: tuple[str, ...] = ()
    waited_s: float = 0.0
    has_state: bool = False
    progress: ProgressReport | None = None
    has_stopped: bool = False
    has_finished: bool = False
    is_ready: bool = False
    is_leaving: bool = False
    leaves_because: str = LEAVES
    has_left: bool = False
    clock_offset_us: int = 0
    started: str = ""
    layers: frozenset[int] | None = None

    def renew(self, message: RenewLease) -> None:
        """Note what the member says that it is doing."""
        self.busy_s, self.doing = message.busy_us / 1e6, message.doing
        self.waits_for = tuple(message.waits_for.split(", ")) if message.waits_for not in ("", "all") else ()
        self.waited_s = message.waited_us / 1e6

    def start(self, place: Worker) -> None:
        """Begin an epoch at this place; the member holds its stage's state, unless it reports otherwise when it stops."""
        self.place, self.progress, self.has_stopped, self.has_finished = place, None, False, False
        self.busy_s = self.waited_s = 0.0
        self.has_state, self.layers = True, None

    def stop(self, message: EpochStopped, origin: int) -> None:
        """Note the progress of a member that has stopped.

        Its state does not count if it is of another stage or origin: it missed an epoch that moved it, or that went back.
        """
        is_of_place = self.place is not None and message.stage in (-1, self.place.stage)
        self.progress, self.has_stopped = message.progress if is_of_place and message.origin == origin else None, True
        self.has_state, self.layers = self.progress is not None, frozenset(message.layers) or None
        self.busy_s = self.waited_s = 0.0


class MemberTable(dict[int, Member]):
    """The members of a job by number. `last_number` is the last one given out."""

    last_number = 0

    def join(self, connection: int, host: str, pid: int, preferred_place: Worker | None, now_s: float) -> Member:
        """Add a new member, and return it."""
        self.last_number += 1
        self[self.last_number] = member = Member(self.last_number, connection, host, pid, preferred_place, now_s)
        return member

    @staticmethod
    def of(entry: JournalEntry, now_s: float) -> "MemberTable":
        """The members of a journal's epoch, none of them connected."""
        found = MemberTable()
        found.last_number = entry.last_number
        for place, number in entry.places.items():
            host, pid, started = entry.processes.get(place, ("", 0, ""))
            found[number] = Member(number, None, host, pid, None, now_s, Worker.parse(place), has_state=True, started=started)
        return found

    def discount(self, stalled_s: float, now_s: float) -> None:
        """Do not count the time as silence in which the coordinator stood still."""
        for member in self.values():
            member.last_seen_s = min(now_s, member.last_seen_s + stalled_s)

    @property
    def placed(self) -> list[Member]:
        """The members that have a place in the present epoch."""
        return [member for member in self.values() if member.place is not None]

    @property
    def unplaced(self) -> list[Member]:
        """The members that wait for a place."""
        return [member for member in self.values() if member.place is None and member.is_ready and not member.has_left]

    def take_first_places(self, rows: AbstractSet[Worker]) -> bool:
        """Give members tentative places in the first epoch; return whether every row of its plan has a member.

        In a large job they get them when they may be enough: for all of them that takes milliseconds, whenever one has come.
        """
        if len(self) < len(rows) and len(rows) > _LARGE_JOB:
            return False
        members = [member for member in self.values() if member.is_ready and not member.has_left]
        places = first_places(rows, [member.preferred_place for member in members])
        for member, place in zip(members, places, strict=True):
            member.place = place
        return rows <= set(places)

    def take_places(self, assignment: PlanAssignment) -> dict[Worker, Member]:
        """Move every member to its place of the assignment, and return the members by place, in order."""
        by_place = {member.place: member for member in self.values()}
        members = {place: by_place[now] for place, now in sorted(assignment.places.items())}
        for place, member in members.items():
            member.start(place)
        return members

    def resume_with(self, assignment: PlanAssignment) -> Resume | None:
        """Return where all can resume without a checkpoint, None if they cannot."""
        progress = [member.progress for member in self.values() if member.progress is not None]
        return agree_if_possible(progress) if self._hold_everything(assignment) else None

    def _hold_everything(self, assignment: PlanAssignment) -> bool:
        if self.layers_moving_to(assignment) is not None:
            return self.transfers_to(assignment) is not None
        stages = {place.stage for place in keeps_state(assignment, self.holders)}
        return len(stages) == assignment.plan.problem.shape.num_stages

    def layers_moving_to(self, assignment: PlanAssignment) -> LayersAt | None:
        """Return the layers that members hold, if some hold others than those of their places in the assignment; else None."""
        held = {member.place: member.layers for member in self.values() if member.has_state and member.layers is not None}
        wanted = assignment.plan.problem.stage_layers
        if wanted is None or all(layers == set(wanted.held(place.stage)) for place, layers in held.items() if place is not None):
            return None
        return {place: layers for place, layers in held.items() if place is not None}

    def transfers_to(self, assignment: PlanAssignment) -> tuple[LayerTransfer, ...] | None:
        """Return the transfers of layers with which an assignment begins; None if none are, or cannot be, transferred."""
        held, wanted = self.layers_moving_to(assignment), assignment.plan.problem.stage_layers
        return layer_transfers(assignment, held, wanted) if held is not None and wanted is not None else None

    def new_places(self, shape: Shape) -> list[tuple[Member, Worker]]:
        """Return the free place that each member gets that waits for one, as long as there are any."""
        if not (unplaced := self.unplaced):
            return []
        taken = [member.place for member in self.placed if member.place is not None]
        free = free_places(shape, taken, [member.preferred_place for member in unplaced])
        return list(zip(unplaced, free, strict=False))

    @property
    def connections(self) -> list[int]:
        """The connections of the members with a place."""
        return [member.connection for member in self.placed if member.connection is not None]

    @property
    def are_connected(self) -> bool:
        """Whether every member with a place has a connection."""
        return all(member.connection is not None for member in self.values() if member.place is not None)

    @property
    def has_unstopped(self) -> bool:
        """Whether a member with a place has not stopped. Who joined last is looked at first, and often stops last."""
        return any(not member.has_stopped and member.place is not None for member in reversed(self.values()))

    def empty_places(self, shape: Shape) -> frozenset[Worker]:
        """The places that no member has."""
        taken = {member.place for member in self.values()}
        return frozenset(place for place in shape.workers() if place not in taken)

    @property
    def leaving(self) -> list[Member]:
        """The members with a place that have asked to leave."""
        return [member for member in self.placed if member.is_leaving]

    @property
    def have_finished(self) -> bool:
        """Whether there are members with a place, and all of them have done all steps."""
        return bool(self.placed) and all(member.has_finished for member in self.placed)

    @property
    def holders(self) -> set[Worker]:
        """The places whose members hold the state of their stage."""
        return {member.place for member in self.values() if member.place is not None and member.has_state}


@dataclass(slots=True)
class Recovery:
    """The facts of a change of epochs so far. Times are in µs of the coordinator's clock.

    If it is `at_boundary`, members join or leave as they asked to: all trained until an iteration boundary, nothing is redone.
    """

    at_us: int
    cause: str
    at_boundary: bool
    left: list[str] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    noticed_us: int = 0
    stopped_us: int = 0
    planned_us: int = 0
    begun_us: int = 0
    transfer_us: int = 0
    iteration: int = 0
    epoch: int = 0
    moves: tuple[str, ...] = ()
    num_live: int = 0
    layers: tuple[int, ...] = ()
    carried: tuple[float, ...] = ()
    begun: set[int] = field(default_factory=set)

    def add_loss(self, place: str, cause: str, died_us: int) -> None:
        """Add a member that was lost, at `died_us` if that is not 0."""
        self.at_us = min(self.at_us, died_us or self.at_us)
        self.left.append(place)
        self.joined = [joined for joined in self.joined if joined != place]
        self.at_boundary, self.cause = False, cause

    def add_leave(self, place: str) -> None:
        """Add a member that left as it asked to."""
        self.left.append(place)
        self.joined = [joined for joined in self.joined if joined != place]

    @property
    def joins(self) -> bool:
        """Whether members only joined."""
        return self.at_boundary and not self.left

    def set_epoch(self, epoch: int, iteration: int, assignment: PlanAssignment, layers: tuple[int, ...]) -> None:
        """Note the epoch with which the recovery ends, when it starts; `layers` of each stage, if some are transferred."""
        self.epoch, self.iteration, self.num_live, self.layers = epoch, iteration, len(assignment.places), layers
        self.moves = tuple(f"{now}>{place}" for now, place in assignment.copies)
        self.carried = carried_by_stage(assignment.plan)

    def add_begun(self, number: int, transfer_us: int, now_us: int) -> None:
        """Note that a member has begun the epoch; it says so again when it reconnects."""
        self.begun_us = self.begun_us or now_us
        self.transfer_us = max(self.transfer_us, transfer_us)
        self.begun.add(number)


def members_at(places: Mapping[str, int]) -> dict[int, Worker]:
    """Return the place of each member by its number."""
    return {number: Worker.parse(place) for place, number in places.items()}
