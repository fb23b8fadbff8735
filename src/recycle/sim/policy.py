"""The `System` protocol of a training policy, and its vocabulary: members, steady states, pauses, losses, decisions.

A system is given the live members and returns a `PolicyDecision`: the steady state from now on, the pauses before it, and the
work that is lost. `trace_simulation` keeps time and accounts. A system's own state, if any, is part of its decision.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol

from recycle.core.cluster import Shape, Worker

Speeds = tuple[tuple[Worker, float], ...]
"""Workers that are slower than usual, each with its speed: at 0.6 an op takes 1 / 0.6 of its time."""


@dataclass(frozen=True, slots=True)
class Members:
    """The places of the cluster that hold a live node, and the number of spares: live nodes without a place.

    `slow` are live workers that compute slowly, `slow_links` those whose link is slow.
    """

    shape: Shape
    live: frozenset[Worker]
    num_spare: int = 0
    slow: Speeds = ()
    slow_links: Speeds = ()

    @property
    def num_live(self) -> int:
        return len(self.live) + self.num_spare

    @property
    def capacity(self) -> float:
        """The sum of the speeds of all live nodes, as if spares were at full speed."""
        return self.num_live - sum(1 - speed for _, speed in self.slow)

    @property
    def failed(self) -> frozenset[Worker]:
        return all_places(self.shape) - self.live


@lru_cache(maxsize=64)
def places_of(shape: Shape) -> Mapping[Worker, Worker]:
    """Every place of the cluster in order, always the same objects: sets of them are compared without looking inside."""
    return {place: place for place in shape.workers()}


@lru_cache(maxsize=64)
def all_places(shape: Shape) -> frozenset[Worker]:
    """The live workers while nobody is dead, always the same set: to make and hash thousands of workers takes long."""
    return frozenset(places_of(shape))


class ChangeKind(Enum):
    """What changed: the members (and maybe speeds too), only speeds, or nothing: the review that a decision asked for."""

    MEMBERS = "members"
    SPEEDS = "speeds"
    REVIEW = "review"


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """The members after a change, the places that lost their node in it, and the places that got one.

    If one of the lost nodes `hangs`, the job stands still until the system notices.
    """

    at_us: int
    members: Members
    left: tuple[Worker, ...] = ()
    joined: tuple[Worker, ...] = ()
    kind: ChangeKind = ChangeKind.MEMBERS
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Training between two changes: steps of `step_us` with `samples` each. Without a step the job is down.

    After every `checkpoint_every` steps a checkpoint takes `checkpoint_us`; with 0, a completed step is never lost.
    `slowdown` says how many times as long these steps take as they would if no worker had taken over from another.
    """

    step_us: int
    samples: int
    busy_share: float = 1.0
    checkpoint_every: int = 0
    checkpoint_us: int = 0
    slowdown: float = 1.0

    @property
    def is_down(self) -> bool:
        return self.step_us <= 0 or self.samples <= 0

    @property
    def samples_per_s(self) -> float:
        return 0.0 if self.is_down else self.samples * 1e6 / self.step_us


DOWN = SteadyState(0, 0)


class Loss(Enum):
    """The work that a change discards: none (the step in flight ends first), that step, or all steps since a checkpoint."""

    NOTHING = "nothing"
    STEP = "step"
    SINCE_CHECKPOINT = "since checkpoint"


@dataclass(frozen=True, slots=True)
class Pause:
    """Time without training, and its cause."""

    cause: str
    time_us: int


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """A system's answer to a change. `reason` is a sentence for people; `state` is passed to the next call of `change`.

    `keeps_unfinished`: the rest of earlier pauses follows the pauses of this decision; else this decision replaces them.
    `drops_samples`: the lost samples are never trained on, because the data moves on.
    `secures`: the change includes a checkpoint of all completed steps.
    `review_us`: if nothing changes for so long, the system is asked again; 0 for never. So noticing takes time.
    `slows_step`: the rest of the step in flight takes so many times as long as without a take-over. A step that is as slow
    already does not get slower.
    """

    steady_state: SteadyState
    pauses: tuple[Pause, ...] = ()
    loses: Loss = Loss.NOTHING
    reason: str = ""
    state: Any = None
    keeps_unfinished: bool = False
    drops_samples: bool = False
    secures: bool = False
    review_us: int = 0
    slows_step: float = 1.0


class System(Protocol):
    """A training system under failures."""

    @property
    def name(self) -> str: ...

    def begin(self, members: Members) -> PolicyDecision:
        """Decide what the job does with its first members."""

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        """Decide what a change of members does to the job, given the state of the last decision."""


def pauses(*causes: tuple[str, int]) -> tuple[Pause, ...]:
    """The pauses with these causes and times; those without time are left out."""
    return tuple(Pause(cause, round(time_us)) for cause, time_us in causes if round(time_us) > 0)
