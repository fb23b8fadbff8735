"""Compiled times of a schedule that is given by the order of its rows: what follows from a small change of an order or a cut.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import F, I, compiled, uncounted
from recycle.planner.model.assignment import Ints

_NONE = -1
# Columns of `links`, a row an op: the ops that it waits for and the ops that wait for it, besides its neighbours in the row, at
# its own stage (HERE) and at a neighbouring one (THERE), the time of the message between these, and what it belongs to.
NEED_HERE, NEED_THERE, NEED_US, NEXT_HERE, NEXT_THERE, NEXT_US, STAGE, CHAIN, WORKER, KIND, NUM_LINKS = range(11)


@compiled
def make_links(pipeline: Ints, comm: Ints, num_pipelines: int) -> Ints:
    num_stages, num_chains = pipeline.shape
    num_each = num_stages * num_chains
    links = np.full((3 * num_each, NUM_LINKS), _NONE)
    for op in range(3 * num_each):
        kind, stage, chain = op // num_each, op // num_chains % num_stages, op % num_chains
        links[op, STAGE], links[op, CHAIN], links[op, KIND] = stage, chain, kind
        links[op, WORKER] = stage * num_pipelines + pipeline[stage, chain]
        if kind != F:
            links[op, NEED_HERE] = op - num_each
            links[op - num_each, NEXT_HERE] = op
        neighbour = stage - 1 if kind == F else stage + 1
        if kind <= I and 0 <= neighbour < num_stages:
            there = op + (neighbour - stage) * num_chains
            links[op, NEED_THERE], links[op, NEED_US] = there, comm[min(stage, neighbour)]
            links[there, NEXT_THERE], links[there, NEXT_US] = op, comm[min(stage, neighbour)]
    return links


@uncounted
def _sort(links: Ints, before: Ints, after: Ints, missing: Ints, sequence: Ints) -> bool:
    """Fill `sequence` with all ops, each after those that it waits for; False if rows contradict the needs."""
    num_ops, size = before.size, 0
    for op in range(num_ops):
        missing[op] = (before[op] >= 0) + (links[op, NEED_HERE] >= 0) + (links[op, NEED_THERE] >= 0)
        if missing[op] == 0:
            sequence[size] = op
            size += 1
    at = 0
    while at < size:
        op = sequence[at]
        at += 1
        for follower in (after[op], links[op, NEXT_HERE], links[op, NEXT_THERE]):
            if follower >= 0:
                missing[follower] -= 1
                if missing[follower] == 0:
                    sequence[size] = follower
                    size += 1
    return size == num_ops


@uncounted
def shift_left(links: Ints, lengths: Ints, before: Ints, sequence: Ints, opens: Ints, starts: Ints) -> None:
    for op in sequence:
        start = opens[links[op, STAGE]]
        row, here, there = before[op], links[op, NEED_HERE], links[op, NEED_THERE]
        if row >= 0:
            start = max(start, starts[row] + lengths[row])
        if here >= 0:
            start = max(start, starts[here] + lengths[here])
        if there >= 0:
            start = max(start, starts[there] + lengths[there] + links[op, NEED_US])
        starts[op] = start


@uncounted
def _shift_right(links: Ints, lengths: Ints, after: Ints, sequence: Ints, closes: Ints, starts: Ints) -> None:
    for index in range(sequence.size - 1, -1, -1):
        op = sequence[index]
        end = closes[links[op, STAGE]]
        row, here, there = after[op], links[op, NEXT_HERE], links[op, NEXT_THERE]
        if row >= 0:
            end = min(end, starts[row])
        if here >= 0:
            end = min(end, starts[here])
        if there >= 0:
            end = min(end, starts[there] - links[op, NEXT_US])
        starts[op] = end - lengths[op]


@compiled
def retime_rows(
    links: Ints, lengths: Ints, before: Ints, after: Ints, missing: Ints, sequence: Ints, opens: Ints, starts: Ints
) -> bool:
    """Compute the starts that follow from the rows; False if there are none. `opens` becomes the first start of each stage."""
    if not _sort(links, before, after, missing, sequence):
        return False
    num_ops = before.size
    opens[:] = 0
    shift_left(links, lengths, before, sequence, opens, starts)
    closes = np.zeros(opens.size, np.int64)
    for op in range(num_ops // 3 * 2, num_ops):
        closes[links[op, STAGE]] = max(closes[links[op, STAGE]], starts[op] + lengths[op])
    _shift_right(links, lengths, after, sequence, closes, starts)
    opens[:] = 1 << 60
    for op in range(num_ops // 3):
        opens[links[op, STAGE]] = min(opens[links[op, STAGE]], starts[op])
    shift_left(links, lengths, before, sequence, opens, starts)
    return True


@compiled
def make_rows(links: Ints, starts: Ints, num_workers: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The first and the last op of each row, and the op before and after each op in its row."""
    heads, tails = np.full(num_workers, _NONE), np.full(num_workers, _NONE)
    before, after = np.full(starts.size, _NONE), np.full(starts.size, _NONE)
    # Of ops that start at once the first number goes first: a W without length starts with its I, and all other ops take time.
    for op in np.argsort(starts.reshape(-1), kind="mergesort"):
        worker = links[op, WORKER]
        before[op] = tails[worker]
        if tails[worker] >= 0:
            after[tails[worker]] = op
        else:
            heads[worker] = op
        tails[worker] = op
    return heads, tails, before, after
