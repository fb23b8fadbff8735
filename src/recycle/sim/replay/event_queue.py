"""The clock of a simulation: a heap of (time, priority, counter). Runs are reproducible by construction.

Of what is due at one time the lower priority comes first, and of equal ones what was asked for first. No two entries are
equal, so what they carry is never compared.
"""

from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """What is due when. Time goes on only by `next`, and never back."""

    __slots__ = ("_counter", "_heap", "now_us")

    def __init__(self, start_us: int = 0) -> None:
        self.now_us = start_us
        self._counter = 0
        self._heap: list[tuple[int, int, int, T]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_us: int, what: T, priority: int = 0) -> None:
        """Have `what` come up at `time_us`, which must not lie in the past."""
        assert time_us >= self.now_us, f"{what} is asked for at {time_us} µs, but it is {self.now_us} µs already"
        heappush(self._heap, (time_us, priority, self._counter, what))
        self._counter += 1

    def next(self) -> T:
        """Go on to what is due next, and return it; `now_us` is its time."""
        self.now_us, _, _, what = heappop(self._heap)
        return what
