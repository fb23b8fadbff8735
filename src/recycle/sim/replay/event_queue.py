"""EventQueue: the pending events of a simulation in order of (time, priority, counter), so that runs are reproducible."""

from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")


class EventQueue(Generic[T]):
    """A heap of pending events, and the present time `now_us`, which `next` advances to the event that it returns."""

    __slots__ = ("_counter", "_heap", "now_us")

    def __init__(self) -> None:
        self.now_us = 0
        self._counter = 0  # no two entries are equal, so that events are never compared
        self._heap: list[tuple[int, int, int, T]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_us: int, event: T, priority: int = 0) -> None:
        """Schedule `event` at `time_us`; at equal times the lower priority comes first, then the event that was pushed first."""
        assert time_us >= self.now_us, f"{event} is scheduled at {time_us} µs, but it is {self.now_us} µs already"
        heappush(self._heap, (time_us, priority, self._counter, event))
        self._counter += 1

    def next(self) -> T:
        self.now_us, _, _, event = heappop(self._heap)
        return event
