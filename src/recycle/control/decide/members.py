"""The members of a job, the facts of one recovery, and `CoordinatorEffects`: the actions that the coordinator can take."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from recycle.control.decide.journal import JournalEntry
from recycle.control.decide.messages import ControlMessage, ProgressReport, StartEpoch
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment

Reporters = Mapping[int, AbstractSet[int]]
"""For each earlier iteration that is not in the record yet, the members that must still report it: see `JournalEntry`."""


@dataclass(slots=True)
class Member:
    """A worker process. `place` is its place in the present epoch, None if it has none yet.

    `clock_offset_us` is how far its clock is behind the coordinator's: each machine has its own clock. `started` tells its
    process from a later one with the same id, if it is on the coordinator's machine.
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
    clock_offset_us: int = 0
    started: str = ""


class MemberTable(dict[int, Member]):
    """The members of a job by number."""

    @staticmethod
    def of(entry: JournalEntry, now_s: float) -> "MemberTable":
        """The members of a journal's epoch, none of them connected."""
        found = MemberTable()
        for place, number in entry.places.items():
            host, pid, started = entry.processes.get(place, ("", 0, ""))
            found[number] = Member(number, None, host, pid, None, now_s, Worker.parse(place), has_state=True, started=started)
        return found

    @property
    def placed(self) -> list[Member]:
        """The members that have a place in the present epoch."""
        return [member for member in self.values() if member.place is not None]

    @property
    def unplaced(self) -> list[Member]:
        return [member for member in self.values() if member.place is None]

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
    """The facts of a change of epochs so far. Times are in µs of the coordinator's clock."""

    at_us: int
    cause: str
    joins: bool
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
    begun: set[int] = field(default_factory=set)

    def add_loss(self, place: str, cause: str, died_us: int) -> None:
        """Add a member that was lost, at `died_us` if that is not 0."""
        self.at_us = min(self.at_us, died_us or self.at_us)
        self.left.append(place)
        self.joined = [joined for joined in self.joined if joined != place]
        self.joins, self.cause = False, cause

    def set_epoch(self, epoch: int, iteration: int, assignment: PlanAssignment) -> None:
        """Note the epoch with which the recovery ends, when it starts."""
        self.epoch, self.iteration, self.num_live = epoch, iteration, len(assignment.places)
        self.moves = tuple(f"{now}>{place}" for now, place in assignment.copies)

    def add_begun(self, number: int, transfer_us: int, now_us: int) -> None:
        """Note that a member has begun the epoch; it says so again when it reconnects."""
        self.begun_us = self.begun_us or now_us
        self.transfer_us = max(self.transfer_us, transfer_us)
        self.begun.add(number)


def members_at(places: Mapping[str, int]) -> dict[int, Worker]:
    """Return the place of each member by its number."""
    return {number: Worker.parse(place) for place, number in places.items()}


def journal_entry(
    start: StartEpoch, members: Mapping[Worker, Member], reason: str, last_number: int, reporters: Reporters
) -> JournalEntry:
    """The entry of an epoch with these members at their places."""
    processes = {str(place): (member.host, member.pid, member.started) for place, member in members.items()}
    origin, late = start.origin, {iteration: sorted(numbers) for iteration, numbers in reporters.items()}
    return JournalEntry(start.epoch, start.iteration, start.places, start.plan, reason, last_number, processes, origin, late)


class CoordinatorEffects(Protocol):
    """The actions of the coordinator on connections, processes, plans and the ledger."""

    def now_us(self) -> int: ...

    def is_ready(self) -> bool:
        """Whether the first epoch may start; if not, `Coordinator.admit_new_members` is called again later."""

    def send(self, connection: int, message: ControlMessage) -> None: ...

    def send_all(self, connections: Iterable[int], message: ControlMessage) -> None: ...

    def disconnect(self, connection: int, reason: str = "") -> None:
        """Close a connection; with a `reason`, the member hears it first, and ends."""

    def is_process_running(self, member: Member) -> bool:
        """Whether the member's process is seen running on this machine, and not stopped."""

    def fence(self, member: Member) -> None:
        """Make sure that a member does nothing any more, if its machine is in reach."""

    def request_plan(self, failed: frozenset[Worker]) -> None:
        """Request a plan for these dead workers; `Coordinator.plan_received` is called with it later."""

    def find_checkpoint(self) -> None:
        """Find the newest complete checkpoint; `Coordinator.checkpoint_found` is called with its number of steps later."""

    def no_checkpoint(self, begins_again: bool) -> None:
        """Note that an epoch needs a checkpoint and there is none: training begins again, or keeps a wrong gradient."""

    def member_left(self, member: Member, reason: str) -> int:
        """Note that a member is gone; return when it died if that is known, else 0."""

    def member_suspected(self, member: Member, reason: str) -> None: ...

    def member_joining(self, member: Member, place: Worker) -> None: ...

    def planning_failed(self, reason: str) -> None:
        """Note that no plan will come: the job must end."""

    def stalled(self, stalled_s: float) -> None:
        """Note that the coordinator itself stood still for so long."""

    def cannot_save(self) -> None:
        """Note that the job is to stop, and that there is no epoch that could write a checkpoint: it must end."""

    def waiting(self, reason: str) -> None:
        """Note that training cannot continue, and what it waits for."""

    def epoch_started(self, assignment: PlanAssignment, start: StartEpoch) -> Reporters:
        """Note that an epoch starts; its members receive `start` afterwards."""

    def recovery_finished(self, recovery: Recovery) -> None: ...
