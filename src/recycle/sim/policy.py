"""The protocol of a policy: what a training system does while nothing changes, and what a change costs it.

A system is told which members are live and answers with a `PolicyDecision`: the regime from now on, the pauses before it, and
what is lost. `trace_simulation` keeps the clock and the accounts. The system's own state, if it has any, is part of the decision.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from recycle.core.cluster import Shape, Worker


@dataclass(frozen=True, slots=True)
class Members:
    """Who is there: the places of the cluster that hold a live node, and the live nodes that have no place in it."""

    shape: Shape
    live: frozenset[Worker]
    num_spare: int = 0

    @property
    def num_live(self) -> int:
        return len(self.live) + self.num_spare

    @property
    def failed(self) -> frozenset[Worker]:
        return frozenset(self.shape.workers()) - self.live

    @property
    def num_failed(self) -> tuple[int, ...]:
        """Dead workers at each stage."""
        counts = [self.shape.num_pipelines] * self.shape.num_stages
        for worker in self.live:
            counts[worker.stage] -= 1
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class Event:
    """A change of membership: the places that lost their node, those that got one, and who is there after it."""

    at_us: int
    members: Members
    left: tuple[Worker, ...] = ()
    joined: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class Regime:
    """What repeats while nothing changes: a step of `step_us` that adds `samples`; without a step the job is down.

    After every `checkpoint_every` steps a checkpoint takes `checkpoint_us`; with 0, steps are safe as soon as they are done.
    """

    step_us: int
    samples: int
    busy_share: float = 1.0
    checkpoint_every: int = 0
    checkpoint_us: int = 0

    @property
    def is_down(self) -> bool:
        return self.step_us <= 0 or self.samples <= 0

    @property
    def samples_per_s(self) -> float:
        return 0.0 if self.is_down else self.samples * 1e6 / self.step_us


DOWN = Regime(0, 0)


class Loss(Enum):
    """What a change throws away: the step in flight is finished first, is lost, or all since the last checkpoint is."""

    NOTHING = "nothing"
    STEP = "step"
    SINCE_CHECKPOINT = "since checkpoint"


@dataclass(frozen=True, slots=True)
class Pause:
    """Time in which nobody trains, and why."""

    cause: str
    time_us: int


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """A system's answer to a change. `reason` is a sentence for people; `state` comes back with the next question.

    `keeps_unfinished` says that pauses which an earlier change began must still be sat out; else this answer replaces them.
    `drops_samples` says that what is lost is never trained on, because the data has moved on. `secures` says that a checkpoint
    of all finished steps is part of the change.
    """

    regime: Regime
    pauses: tuple[Pause, ...] = ()
    loses: Loss = Loss.NOTHING
    reason: str = ""
    state: Any = None
    keeps_unfinished: bool = False
    drops_samples: bool = False
    secures: bool = False


class System(Protocol):
    """A training system under failures."""

    @property
    def name(self) -> str: ...

    def begin(self, members: Members) -> PolicyDecision:
        """Say what the job does with its first members."""
        ...

    def change(self, event: Event, state: Any) -> PolicyDecision:
        """Say what a change of members does to the job."""
        ...


def pauses(*causes: tuple[str, int]) -> tuple[Pause, ...]:
    """The pauses of these causes and times, without those that take none."""
    return tuple(Pause(cause, round(time_us)) for cause, time_us in causes if round(time_us) > 0)
