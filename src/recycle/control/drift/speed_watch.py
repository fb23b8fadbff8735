"""`SpeedWatch`: the speed with which each member is planned, from the estimates of iterations, with hysteresis.

A speed changes only if `HOLD` iterations in a row say that it is more than `TOLERANCE` off, all to the same side. Where estimates
vary from iteration to iteration, because workers share cores or a network, more is tolerated: their median variation over all
members, several times. Each further change of a member needs twice as many iterations as the one before: a worker that swings is
soon left as it is.
"""

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median

from recycle.control.drift.relative_speeds import SpeedEstimate

HOLD, TOLERANCE = 3, 0.12
# So many times the usual change of an estimate from one iteration to the next is noise; the iterations by which that is known.
_NOISE, _NOISE_ITERATIONS = 3.0, 8
# Doubled at most so often.
_MOST_DOUBLINGS = 4
# The estimates by which a worker without a peer is known: later ones are compared with their median.
_LONE_BASELINE = 5
_SLOWEST, _FASTEST = 0.01, 10.0


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A member has had another speed than before since an iteration; 1 is that of its peers."""

    member: int
    speed: float
    since: int


@dataclass(slots=True)
class _Watched:
    speed: float = 1.0
    num_changes: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=deque)
    baseline: list[float] = field(default_factory=list)

    @property
    def hold(self) -> int:
        return HOLD << min(self.num_changes, _MOST_DOUBLINGS)


class SpeedWatch:
    """The speeds of members by their number."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._variations: deque[float] = deque(maxlen=_NOISE_ITERATIONS)

    @property
    def known(self) -> AbstractSet[int]:
        """The members that it knows."""
        return self._watched.keys()

    def speed(self, member: int) -> float:
        """The speed by which a member is planned; one that nothing is known of has the speed 1."""
        return self._watched[member].speed if member in self._watched else 1.0

    def set_speed(self, member: int, speed: float) -> None:
        """Take over a speed that another coordinator has found."""
        self._watched[member] = _Watched(speed)

    def keep_only(self, members: Mapping[int, object]) -> None:
        """Forget the members that are gone."""
        for number in self._watched.keys() - members.keys():
            del self._watched[number]

    def add(self, iteration: int, estimates: Mapping[int, SpeedEstimate]) -> list[SpeedChange]:
        """Add the estimates of an iteration, and return the speeds that change by it."""
        for number, estimate in estimates.items():
            watched = self._watched.setdefault(number, _Watched())
            if (speed := _speed_of(watched, estimate)) is not None:
                watched.recent.append((iteration, speed))
        self._note_variation(iteration)
        changes, tolerated = [], self._tolerated
        for number in sorted(estimates):
            watched = self._watched[number]
            while len(watched.recent) > watched.hold:
                watched.recent.popleft()
            if (change := _change(number, watched, tolerated)) is not None:
                watched.speed, watched.num_changes = change.speed, watched.num_changes + 1
                watched.recent.clear()
                changes.append(change)
        return changes

    def _note_variation(self, iteration: int) -> None:
        pairs = [(each.recent[-2], each.recent[-1]) for each in self._watched.values() if len(each.recent) > 1]
        changed = [abs(math.log(now / before)) for (_, before), (at, now) in pairs if at == iteration]
        if changed:
            self._variations.append(median(changed))

    @property
    def _tolerated(self) -> float:
        """How far off a speed may be, as a logarithm."""
        return max(-math.log(1 - TOLERANCE), _NOISE * median(self._variations) if self._variations else 0.0)


def _speed_of(watched: _Watched, estimate: SpeedEstimate) -> float | None:
    """The speed of an estimate; one without a peer is relative to how it was first, when it had the speed that is known."""
    if not estimate.is_lone:
        watched.baseline.clear()
        return estimate.speed
    if len(watched.baseline) < _LONE_BASELINE:
        watched.baseline.append(estimate.speed / watched.speed)
        return None
    return estimate.speed / median(watched.baseline)


def _change(number: int, watched: _Watched, tolerated: float) -> SpeedChange | None:
    if len(watched.recent) < watched.hold:
        return None
    off = [math.log(speed / watched.speed) for _, speed in watched.recent]
    if not (max(off) < -tolerated or min(off) > tolerated):
        return None
    speed = median(speed for _, speed in watched.recent)
    is_usual = abs(speed - 1) <= TOLERANCE
    speed = 1.0 if is_usual else round(min(_FASTEST, max(_SLOWEST, speed)), 2)
    return SpeedChange(number, speed, watched.recent[0][0]) if speed != watched.speed else None
