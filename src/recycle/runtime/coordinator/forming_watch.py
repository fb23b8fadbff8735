"""`FormingWatch`: says whom a job waits for before its first epoch, and ends a job whose own workers never join."""

import math
from collections.abc import Callable, Iterable

from recycle.control.decide.members import Member
from recycle.core.cluster import Worker

_FIRST_WORD_S = 30.0
# Workers that a launcher has started, and whose processes live, must have joined by then: they load modules, and no model yet.
_LIMIT_S = 600.0
# Time in which this process stood still is not time that workers had to join.
_LONGEST_TICK_S = 2.0


class FormingWatch:
    """Gets the members at every tick before the first epoch. `warn` gets a sentence after half a minute, one, two, and so on.

    `fail` gets the sentence that ends the job; it is None where people start the workers, who may take their time.
    """

    def __init__(
        self, places: Iterable[Worker], begin_s: float, warn: Callable[[str], None], fail: Callable[[str], None] | None
    ) -> None:
        self._places, self._last_s, self._warn, self._fail = frozenset(places), begin_s, warn, fail
        self._waited_s, self._next_s = 0.0, _FIRST_WORD_S

    def tick(self, now_s: float, members: Iterable[Member]) -> None:
        self._waited_s += min(now_s - self._last_s, _LONGEST_TICK_S)
        self._last_s = now_s
        waited_s, found = self._waited_s, list(members)
        if waited_s < self._next_s or len(found) >= len(self._places):
            return
        is_too_late = self._fail is not None and waited_s >= _LIMIT_S
        self._next_s = math.inf if is_too_late else 2 * self._next_s if self._fail is None else min(2 * self._next_s, _LIMIT_S)
        missing = sorted(self._places.difference(member.preferred_place for member in found if member.preferred_place))
        names = f": {', '.join(map(str, missing))}" if len(missing) == len(self._places) - len(found) else ""
        sentence = (
            f"{len(found)} of {len(self._places)} workers have joined after {waited_s:.0f} s, and the others have not{names}"
        )
        if self._fail is not None and is_too_late:
            self._fail(f"{sentence}; look for what holds up their processes")
        else:
            self._warn(f"training has not begun: {sentence}")
