"""`SpeedWatch`: the speed with which each member is planned, from the estimates of iterations, with hysteresis; or that of links.

A speed changes only if `hold` iterations in a row say that it is more than `tolerance` off, all to the same side. Where estimates
vary from iteration to iteration, because workers share cores or a network, more is tolerated: several times their usual change,
which is the median of those that change at all. (Of two peers the faster one has the speed 1 each time: most estimates may stay
the same while all workers vary. A mean would let one worker that swings hide all others.) Each further change of a member needs
twice as many iterations as the one before: a worker that swings is soon left as it is.
"""

import math
from collections import deque
from collections.abc import Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from recycle.control.drift.relative_speeds import SpeedEstimate

HOLD, TOLERANCE = 3, 0.12
# So many times the usual change of an estimate from one iteration to the next is noise; the iterations by which that is known.
_NOISE, _NOISE_ITERATIONS = 3.0, 8
# Doubled at most so often.
_MOST_DOUBLINGS = 4
# The estimates by which a worker without a peer is known: later ones are compared with their median.
_LONE_BASELINE = 5
_SLOWEST, _FASTEST = 0.01, 10.0

_Member = TypeVar("_Member", int, tuple[int, int])
"""A member by its number, or the two members of a link."""


@dataclass(frozen=True, slots=True)
class SpeedChange(Generic[_Member]):
    """A member has had another speed than before since an iteration; 1 is that of its peers."""

    member: _Member
    speed: float
    since: int


@dataclass(slots=True)
class _Watched:
    speed: float = 1.0
    num_changes: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=deque)
    baseline: list[float] = field(default_factory=list)


class SpeedWatch(Generic[_Member]):
    """The speeds of members by their number, or of links by the numbers of their members."""

    def __init__(self, hold: int = HOLD, tolerance: float = TOLERANCE) -> None:
        self._hold, self._tolerance = hold, tolerance
        self._watched: dict[_Member, _Watched] = {}
        self._variations: deque[float] = deque(maxlen=_NOISE_ITERATIONS)

    @property
    def known(self) -> AbstractSet[_Member]:
        """The members that it knows."""
        return self._watched.keys()

    def speed(self, member: _Member) -> float:
        """The speed by which a member is planned; one that nothing is known of has the speed 1."""
        return self._watched[member].speed if member in self._watched else 1.0

    def set_speed(self, member: _Member, speed: float) -> None:
        """Take over a speed that another coordinator has found."""
        self._watched[member] = _Watched(speed)

    def keep_only(self, members: Container[_Member]) -> None:
        """Forget the members that are gone."""
        for number in [number for number in self._watched if number not in members]:
            del self._watched[number]

    def add(self, iteration: int, estimates: Mapping[_Member, SpeedEstimate]) -> list[SpeedChange[_Member]]:
        """Add the estimates of an iteration, and return the speeds that change by it."""
        for number, estimate in estimates.items():
            watched = self._watched.setdefault(number, _Watched())
            if (speed := _speed_of(watched, estimate)) is not None:
                watched.recent.append((iteration, speed))
        self._note_variation(iteration)
        changes, tolerated = list[SpeedChange[_Member]](), self._tolerated
        for number in sorted(estimates):
            watched = self._watched[number]
            hold = self._hold << min(watched.num_changes, _MOST_DOUBLINGS)
            while len(watched.recent) > hold:
                watched.recent.popleft()
            if len(watched.recent) == hold and (change := self._change(number, watched, tolerated)) is not None:
                watched.speed, watched.num_changes = change.speed, watched.num_changes + 1
                watched.recent.clear()
                changes.append(change)
        return changes

    def _note_variation(self, iteration: int) -> None:
        pairs = [(each.recent[-2], each.recent[-1]) for each in self._watched.values() if len(each.recent) > 1]
        changes = [abs(math.log(now / before)) for (_, before), (at, now) in pairs if at == iteration]
        if changes:
            self._variations.append(median([change for change in changes if change] or [0.0]))

    @property
    def _tolerated(self) -> float:
        """How far off a speed may be, as a logarithm."""
        return max(-math.log(1 - self._tolerance), _NOISE * median(self._variations) if self._variations else 0.0)

    def _change(self, number: _Member, watched: _Watched, tolerated: float) -> SpeedChange[_Member] | None:
        off = [math.log(speed / watched.speed) for _, speed in watched.recent]
        if not (max(off) < -tolerated or min(off) > tolerated):
            return None
        speed = median(speed for _, speed in watched.recent)
        is_usual = abs(speed - 1) <= self._tolerance
        speed = 1.0 if is_usual else round(min(_FASTEST, max(_SLOWEST, speed)), 2)
        return SpeedChange(number, speed, watched.recent[0][0]) if speed != watched.speed else None


def _speed_of(watched: _Watched, estimate: SpeedEstimate) -> float | None:
    """The speed of an estimate; one without a peer is relative to how it was first, when it had the speed that is known."""
    if not estimate.is_lone:
        watched.baseline.clear()
        return estimate.speed
    if len(watched.baseline) < _LONE_BASELINE:
        watched.baseline.append(estimate.speed / watched.speed)
        return None
    return estimate.speed / median(watched.baseline)
