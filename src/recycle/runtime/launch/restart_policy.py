"""`RestartPolicy`: when a worker is started again after it died, and when no more."""

from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

# The first and the longest pause; each further death within `_FORGET_S` doubles it.
_FIRST_S, _LONGEST_S, _FORGET_S = 1.0, 60.0, 3600.0
_Slot = TypeVar("_Slot", bound=Hashable)


class RestartPolicy(Generic[_Slot]):
    """Starts the worker of a slot again, at most `most` times an hour: what fails again and again disturbs the others.

    A slot is what workers die at: a place of the plan, or a GPU.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._deaths_s: defaultdict[_Slot, list[float]] = defaultdict(list)

    def pause_s(self, slot: _Slot, now_s: float) -> float | None:
        """Return how long to wait before the worker that died now is started again; None if it stays dead."""
        recent = [death_s for death_s in self._deaths_s[slot] if now_s - death_s < _FORGET_S]
        self._deaths_s[slot] = [*recent, now_s]
        return min(_LONGEST_S, _FIRST_S * 2.0 ** min(len(recent), 10)) if len(recent) < self._most else None
