"""Spares: nodes that are paid for and wait, so that they can take the places of nodes that fail.

A trace is rewritten once, before any system sees it, so that all systems get spares in the same way: a spare is added at the
moment at which a node leaves, and is used when it is ready. docs/simulator.md says what each system does with it.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace, live_counts

MOST_SPARES = 1_000_000
# Systems that always find another node, whatever the trace says.
ENDLESS_SPARES = ("checkpoint-restart-spare",)


def spare_names(num_spares: int) -> tuple[str, ...]:
    if not 0 <= num_spares <= MOST_SPARES:
        raise UserError(f"the number of spares is {num_spares}, but it must be a whole number from 0 to {MOST_SPARES}")
    return tuple(f"spare{number}" for number in range(num_spares))


def with_spares(trace: Trace, num_places: int, spares: Sequence[str]) -> Trace:
    """The trace as a job of so many places sees it: spares that wait are not in it.

    A node that leaves is replaced by a spare, if one waits and is alive. A node that is back after its repair takes a place that
    is empty, and else is a spare. Nodes of the trace beyond the places wait like `spares`. Spares that the trace does not have
    never fail.
    """
    if not spares:
        return trace
    present, known = frozenset(trace.initial), {change.node for change in trace.changes}
    given = set(spares)
    others = [node for node in trace.initial if node not in given]
    waiting = {node: None for node in (*others[num_places:], *spares) if node in present or node not in known}
    pool = _Pool(set(others[:num_places]), waiting, num_places)
    changes = [Change(0, True, node) for node in others[:num_places]]
    for _, at_one_time in groupby(trace.later, key=lambda change: change.at_us):
        changes += pool.apply(list(at_one_time))
    seen = {change.node for change in changes}
    return Trace(tuple(changes), trace.end_us, tuple(slow for slow in trace.slowdowns if slow.node in seen))


class _Pool:
    """The nodes that hold a place, and those that wait."""

    def __init__(self, active: set[str], waiting: dict[str, None], num_places: int) -> None:
        self._active, self._waiting, self._num_places = active, waiting, num_places

    def apply(self, changes: list[Change]) -> Iterator[Change]:
        """Yield what the job sees of these changes, which happen at one time."""
        for change in changes:
            if not change.joins and change.node in self._active:
                self._active.remove(change.node)
                yield change
            elif not change.joins:
                self._waiting.pop(change.node, None)
        for change in changes:
            if change.joins:
                self._waiting = {change.node: None, **self._waiting}  # a node that is back was used before, so it is used first
        while self._waiting and len(self._active) < self._num_places:
            node = next(iter(self._waiting))
            del self._waiting[node]
            self._active.add(node)
            yield Change(changes[0].at_us, True, node)


def paid_workers(system: str, trace: Trace, num_places: int, num_spares: int) -> int:
    """The workers that are paid for all the time: places, spares, and what a system with endless spares needs beyond them."""
    needed = most_missing(trace, num_places) if system.startswith(ENDLESS_SPARES) else 0
    return num_places + num_spares + needed


def most_missing(trace: Trace, num_places: int) -> int:
    """The most places that are empty at one time."""
    return max(0, *(num_places - count for _, count in live_counts(trace)))
