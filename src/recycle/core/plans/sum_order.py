"""sum_orders: in which order each stage sums its gradients over workers, if stages share layers.

A stage has several sums: one of the layers that no other stage holds, and those of the layers that it shares. A worker does one
sum at a time, and all holders of a layer do its sum together. So the orders of all stages come from one order of all sums, in
which no worker waits for ever. It is that of list scheduling, from when the plan ends what adds to a sum, and how long each
sum takes: the next is always the one that can begin first. In the order of the ends alone, sums of neighbouring boundaries would
wait for each other along the whole pipeline, each for a stage that is still busy with its other neighbour. List scheduling is a
heuristic: for a few plans of few stages that order would be shorter.

A stage's next iteration waits for the sums that come before its own: the use of their layers ends earlier by the plan.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from recycle.core.held_layers import HeldLayers
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import layer_windows, stage_windows

OWN_SUM = ()
"""Stands in an order of sums for the layers that the stage shares with no other."""


class _Sum(NamedTuple):
    """A sum. Sums compare by `begin_us`, which grows when holders become busy, and then by when the use of their layers ends.

    A stage's own sum, which has no layers, comes before shared ones that end with it: its next op needs it sooner.
    """

    begin_us: int
    end_of_use_us: int
    layers: Sequence[int]
    holders: Sequence[int]
    takes_us: int


def sum_orders(plan: Plan) -> Sequence[Sequence[Sequence[int]]]:
    """Return for each stage the layers of its sums, in their order; no sums if no layers are shared."""
    held, windows = plan.problem.held_layers, stage_windows(plan)
    found: list[list[Sequence[int]]] = [[] for _ in windows]
    if held is None or not held.shared:
        return found
    waiting = [*_own_sums(held, windows), *_shared_sums(plan, held, windows)]
    heapify(waiting)
    free_us = [0] * len(windows)
    while waiting:
        first = heappop(waiting)
        begin_us = max(first.begin_us, *(free_us[stage] for stage in first.holders))
        if begin_us > first.begin_us:  # its holders have become busy since
            heappush(waiting, first._replace(begin_us=begin_us))
            continue
        for stage in first.holders:
            free_us[stage] = begin_us + first.takes_us
            found[stage].append(first.layers)
    return found


def _own_sums(held: HeldLayers, windows: Sequence[tuple[int, int]]) -> Iterator[_Sum]:
    for stage, (_, end_us) in enumerate(windows):
        own = [layer for layer in held.ranges[stage] if len(held.holders[layer]) == 1]
        yield _Sum(end_us, end_us, OWN_SUM, (stage,), held.sum_us(own))


def _shared_sums(plan: Plan, held: HeldLayers, windows: Sequence[tuple[int, int]]) -> Iterator[_Sum]:
    """The layers that are summed in one go: those of the same stages that end together.

    Each sum costs more than its bytes: all workers meet for it. So a layer waits for others that end later, but not for longer
    than its own sum takes.
    """
    of_layers = layer_windows(plan)
    by_holders: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for layer in held.shared:
        home = bisect_right(held.sums.bounds, layer) - 1
        end_us = of_layers.get(layer, windows[home])[1]
        by_holders.setdefault(held.holders[layer], []).append((end_us, layer))
    for holders, ends_us in by_holders.items():
        joined, first_us, last_us = list[int](), 0, 0
        for end_us, layer in sorted(ends_us):
            if joined and end_us - first_us > held.sum_us(joined[:1]):
                yield _shared_sum(held, holders, joined, last_us)
                joined = []
            first_us, last_us = first_us if joined else end_us, end_us
            joined.append(layer)
        yield _shared_sum(held, holders, joined, last_us)


def _shared_sum(held: HeldLayers, holders: Sequence[int], layers: Sequence[int], end_us: int) -> _Sum:
    together = tuple(sorted(layers))
    return _Sum(end_us, end_us, together, holders, held.sum_us(together))
