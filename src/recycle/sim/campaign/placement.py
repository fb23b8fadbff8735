"""Seats: which node of a trace holds which place of the cluster.

A trace speaks of nodes, a cluster of workers. A node that is called like a worker (`W1_2`) gets that place; any other gets the
place that has been empty longest. Nodes beyond the cluster's size are spare, and step in when a place falls empty.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace
from recycle.sim.policy import Event, Members


class Placement:
    """Who sits where; `change` moves nodes in and out and says what became of the places."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._free = dict.fromkeys(shape.workers())  # a dict keeps the order in which places fell empty
        self._place: dict[str, Worker] = {}
        self._spare: dict[str, None] = {}

    @property
    def members(self) -> Members:
        return Members(self._shape, frozenset(self._place.values()), len(self._spare))

    def change(self, at_us: int, leaving: Iterable[str], joining: Iterable[str]) -> Event:
        before = frozenset(self._place.values())
        joiners = list(joining)
        emptied = [place for node in leaving if (place := self._leave(node)) is not None]
        named = [node for node in joiners if self._own_place(node) in self._free]
        for node in [*named, *(node for node in joiners if node not in named)]:
            self._seat(node)
        while self._free and self._spare:
            self._seat(next(iter(self._spare)))
        members = self.members
        left = tuple(place for place in emptied if place in before)
        joined = tuple(sorted(members.live - (before - set(left))))
        return Event(at_us, members, left, joined)

    def _own_place(self, node: str) -> Worker | None:
        try:
            worker = Worker.parse(node)
        except UserError:
            return None
        if worker.pipeline >= self._shape.num_pipelines or worker.stage >= self._shape.num_stages:
            raise UserError(
                f"the trace names {node}, but the cluster has {self._shape.num_pipelines} pipelines of "
                f"{self._shape.num_stages} stages: use a trace of this cluster, or names that are not workers"
            )
        return worker

    def _seat(self, node: str) -> None:
        self._spare.pop(node, None)
        own = self._own_place(node)
        place = own if own in self._free else next(iter(self._free), None)
        if place is None:
            self._spare[node] = None
            return
        del self._free[place]
        self._place[node] = place

    def _leave(self, node: str) -> Worker | None:
        if node in self._spare:
            del self._spare[node]
            return None
        place = self._place.pop(node)
        self._free[place] = None
        return place


def effective(changes: Iterable[Change], ready_us: int) -> list[Change]:
    """The changes as the job sees them: a node that joins is there `ready_us` later, unless it left before that."""
    seen: dict[int, Change] = {}
    last_join: dict[str, int] = {}  # node -> the number of its last change, a join
    for number, change in enumerate(changes):
        if change.joins:
            seen[number] = Change(change.at_us + ready_us, True, change.node)
            last_join[change.node] = number
            continue
        join = last_join.pop(change.node, None)
        if join is not None and seen[join].at_us > change.at_us:
            del seen[join]
        else:
            seen[number] = change
    return sorted(seen.values(), key=lambda change: change.at_us)


def events(trace: Trace, shape: Shape, ready_us: int) -> Iterator[Event]:
    """Yield first who is there from the start, then every change; what happens at one time is one event."""
    seats, present = Placement(shape), set(trace.initial)
    yield seats.change(0, (), trace.initial)
    for at_us, group in groupby(effective(trace.later, ready_us), key=lambda change: change.at_us):
        if at_us >= trace.end_us:
            return
        before, changes = frozenset(present), list(group)
        for change in changes:
            (present.add if change.joins else present.discard)(change.node)
        nodes = dict.fromkeys(change.node for change in changes)
        gone = {change.node for change in changes if not change.joins}
        # A node that leaves and is back at the same time has still lost what it held.
        leaving = [node for node in nodes if node in before and node in gone]
        joining = [node for node in nodes if node in present and (node not in before or node in gone)]
        yield seats.change(at_us, leaving, joining)
