"""Placement: which node of a trace holds which place of the cluster."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Slowdown, Trace
from recycle.sim.policy import ChangeKind, Members, MembershipChange, places_of


class Placement:
    """The place of each node; `change` lets nodes leave and join, and returns the change of the places."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._places = places_of(shape)
        self._free = dict.fromkeys(self._places)  # a dict keeps the order in which places became empty
        self._place_of: dict[str, Worker] = {}
        # The places with a node. Sets are made from sets: hashing every worker at every change would take most of the time.
        self._live: frozenset[Worker] = frozenset()
        self._filled: list[Worker] = []  # places that got a node in the present change
        self._spare: dict[str, None] = {}

    def members(self, slow: Iterable[Slowdown] = ()) -> Members:
        """The members while these nodes are slow; slowdowns of one node multiply."""
        speeds: tuple[dict[Worker, float], dict[Worker, float]] = ({}, {})
        for one in slow:
            if (place := self._place_of.get(one.node)) is not None:
                found = speeds[one.is_link]
                found[place] = round(found.get(place, 1.0) * one.speed, 3)
        computing, links = (tuple(sorted(found.items())) for found in speeds)
        return Members(self._shape, self._live, len(self._spare), computing, links)

    def has_place(self, node: str) -> bool:
        return node in self._place_of

    def change(
        self, at_us: int, leaving: Iterable[str], joining: Iterable[str], slow: Iterable[Slowdown] = ()
    ) -> MembershipChange:
        before, self._filled = self._live, []
        joiners = list(joining)
        emptied = [place for node in leaving if (place := self._leave(node)) is not None]
        named = dict.fromkeys(node for node in joiners if self._own_place(node) in self._free)
        for node in [*named, *(node for node in joiners if node not in named)]:
            self._place_node(node)
        while self._free and self._spare:
            self._place_node(next(iter(self._spare)))
        left = tuple(place for place in emptied if place in before)
        kept = before.difference(left)
        self._live = kept.union(self._filled)
        joined = tuple(sorted(self._live - kept))
        members = self.members(slow)
        return MembershipChange(at_us, members, left, joined)

    def _own_place(self, node: str) -> Worker | None:
        try:
            worker = Worker.parse(node)
        except UserError:
            return None
        if worker not in self._shape:
            raise UserError(
                f"the trace names {node}, but the cluster has {self._shape.num_pipelines} pipelines of "
                f"{self._shape.num_stages} stages: use a trace of this cluster, or names that are not workers"
            )
        return worker

    def _place_node(self, node: str) -> None:
        self._spare.pop(node, None)
        own = self._own_place(node)
        place = self._places[own] if own is not None and own in self._free else next(iter(self._free), None)
        if place is None:
            self._spare[node] = None
            return
        del self._free[place]
        self._place_of[node] = place
        self._filled.append(place)

    def _leave(self, node: str) -> Worker | None:
        if node in self._spare:
            del self._spare[node]
            return None
        place = self._place_of.pop(node)
        self._free[place] = None
        return place


def ready_changes(changes: Iterable[Change], ready_us: int, hang_us: int = 0) -> list[Change]:
    """The changes as the job sees them: a node joins `ready_us` later, and not at all if it left before that.

    While a node hangs and nobody has noticed, which takes `hang_us`, no other node begins to join.
    """
    effective: dict[int, Change] = {}
    last_join: dict[str, int] = {}  # node -> the number of its last change, a join
    noticed_us = 0
    for number, change in enumerate(changes):
        if change.hangs:
            noticed_us = change.at_us + hang_us
        if change.joins:
            effective[number] = Change(max(change.at_us, noticed_us) + ready_us, True, change.node)
            last_join[change.node] = number
            continue
        join = last_join.pop(change.node, None)
        if join is not None and effective[join].at_us > change.at_us:
            del effective[join]
        else:
            effective[number] = change
    return sorted(effective.values(), key=lambda change: change.at_us)


def membership_changes(trace: Trace, shape: Shape, ready_us: int, hang_us: int = 0) -> Iterator[MembershipChange]:
    """Yield the initial members, then every change of members or speeds; changes at one time are one event."""
    placement, present = Placement(shape), set(trace.initial)
    slow = {number for number, one in enumerate(trace.slowdowns) if one.start_us == 0}
    first = placement.change(0, (), trace.initial, [trace.slowdowns[number] for number in slow])
    yield first
    known = first.members
    for at_us, (changes, begins, ends) in _by_time(trace, ready_us, hang_us):
        if at_us >= trace.end_us:
            return
        slow = (slow | begins) - ends
        slowdowns = [trace.slowdowns[number] for number in sorted(slow)]
        if changes:
            hangs = any(one.hangs and placement.has_place(one.node) for one in changes)
            change = replace(placement.change(at_us, *_leaving_and_joining(changes, present), slowdowns), hangs=hangs)
        else:
            change = MembershipChange(at_us, placement.members(slowdowns), kind=ChangeKind.SPEEDS)
        # A slowdown of a node without a place changes nothing.
        if changes or change.members != known:
            yield change
        known = change.members


def _by_time(trace: Trace, ready_us: int, hang_us: int) -> list[tuple[int, tuple[list[Change], set[int], set[int]]]]:
    """The changes of nodes, and the numbers of the slowdowns that begin and end, by time."""
    found: dict[int, tuple[list[Change], set[int], set[int]]] = {}
    for change in ready_changes(trace.later, ready_us, hang_us):
        found.setdefault(change.at_us, ([], set(), set()))[0].append(change)
    for number, slow in enumerate(trace.slowdowns):
        if slow.start_us:
            found.setdefault(slow.start_us, ([], set(), set()))[1].add(number)
        found.setdefault(slow.end_us, ([], set(), set()))[2].add(number)
    return sorted(found.items())


def _leaving_and_joining(changes: list[Change], present: set[str]) -> tuple[list[str], list[str]]:
    """The nodes that leave and those that join in changes at one time; `present` is brought up to date."""
    before = frozenset(present)
    for change in changes:
        (present.add if change.joins else present.discard)(change.node)
    nodes = dict.fromkeys(change.node for change in changes)
    gone = {change.node for change in changes if not change.joins}
    # A node that leaves and joins again at the same time has lost its state.
    leaving = [node for node in nodes if node in before and node in gone]
    return leaving, [node for node in nodes if node in present and (node not in before or node in gone)]
