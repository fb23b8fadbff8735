"""Members of a job, what is known of a change from one epoch to the next, and what a coordinator can bring about."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from recycle.control.decide.messages import ControlMessage, ProgressReport, StartEpoch
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment


@dataclass(slots=True)
class Member:
    """A worker process. `seat` is its place in the present epoch, None if it has none yet."""

    number: int
    caller: int | None
    host: str
    pid: int
    wish: Worker | None
    heard_s: float
    seat: Worker | None = None
    busy_s: float = 0.0
    has_state: bool = False
    standing: ProgressReport | None = None
    has_stopped: bool = False
    has_finished: bool = False
    clock_us: int = 0
    """What its clock is behind the coordinator's: each machine has its own."""


@dataclass(slots=True)
class Recovery:
    """What is known of a change of epochs so far. Times are in µs of the coordinator's clock."""

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
    num_begun: int = 0


class CoordinatorEffects(Protocol):
    """What the coordinator can bring about."""

    def now_us(self) -> int: ...

    def is_ready(self) -> bool:
        """Whether the first epoch may begin when everybody is there; if not, newcomers are to be seated again later."""
        ...

    def send(self, caller: int, message: ControlMessage) -> None: ...

    def send_all(self, callers: Iterable[int], message: ControlMessage) -> None: ...

    def hang_up(self, caller: int) -> None: ...

    def is_running(self, member: Member) -> bool:
        """Whether the member's process is seen, and is not stopped; False if it is out of sight."""
        ...

    def fence(self, member: Member) -> None:
        """Make sure that a member does nothing any more, if it is in reach."""
        ...

    def ask(self, failed: frozenset[Worker]) -> None:
        """Fetch a plan for when these are dead: `Coordinator.answered` is called with it, later."""
        ...

    def checkpoint(self) -> int:
        """After how many steps the last whole checkpoint was made; 0 is the state that training began with."""
        ...

    def left(self, member: Member, reason: str) -> int:
        """Somebody is gone; return when it went, if that is known better than by noticing it now."""
        ...

    def suspected(self, member: Member, reason: str) -> None: ...

    def joining(self, member: Member, seat: Worker) -> None: ...

    def waiting(self, reason: str) -> None:
        """Training cannot go on, and what it waits for."""
        ...

    def began(self, answer: PlanAssignment, go: StartEpoch, members: Iterable[Member]) -> None:
        """A new epoch is about to begin."""
        ...

    def recovered(self, recovery: Recovery) -> None: ...
