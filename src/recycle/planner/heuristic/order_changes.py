"""Compiled changes of a schedule's orders and cuts: what a step of the search over them may do, and how it is taken back.

A step changes what the longest path to the end of a late worker goes through: an op moves in its row, or a layer of a chain goes
from its worker to the worker of another stage, or a stage opens earlier or later.
"""

from typing import NamedTuple

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import F, I, uncounted
from recycle.planner.heuristic.row_times import CHAIN, KIND, NEED_HERE, NEED_THERE, NEED_US, STAGE, WORKER
from recycle.planner.heuristic.row_updates import Rows, mark, mark_followers, move_back, move_op, relink, take_back
from recycle.planner.model.assignment import Ints

_NONE = -1
# What a step changes; nothing, if what it chose is not legal.
NO_CHANGE, CUT_CHANGE, MOVE_CHANGE, OPENING_CHANGE = range(4)
# Of the steps that change an order, the share that changes an end of a block; the others swap two ops. Of all steps, the share
# that shifts an opening.
_BLOCK_SHARE, _OPEN_SHARE = 0.5, 0.05
# A step starts from the end of a worker that is at most so much better than the worst, and shifts an opening by at most so much;
# as shares of the mean length of an op.
_NEARLY, _FARTHEST = 0.4, 1.1


class CutTables(NamedTuple):
    """A problem with shared layers and the routes of its chains, as the kernel takes them.

    `times` and `sizes` are sums over the layers: of the times of F, I and W, and of the memory that F takes and that stays until
    W. `layer_finish` is -1 for layers of one stage. `lows` and `highs` are the first and last layer at which a boundary may lie.
    `scale` is the mean length of an op, `cut_share` the share of the steps that shift a layer.
    """

    pipeline: Ints
    comm: Ints
    finish: Ints
    layer_finish: Ints
    capacity: Ints
    times: Ints
    sizes: Ints
    thousandths: Ints
    lows: Ints
    highs: Ints
    is_staggered: bool
    bound: int
    scale: float
    cut_share: float


class OrderState(NamedTuple):
    """What a step changes: rows, cuts, and the memory of ops that follows from the cuts."""

    rows: Rows
    held: Ints
    positions: Ints


@uncounted
def set_lengths(tables: CutTables, state: OrderState, stage: int, chain: int, marks: bool) -> None:
    """Write the lengths of a chain's ops at a stage, as its cuts have them; perhaps mark what waits for a new length."""
    num_stages, num_chains = tables.pipeline.shape
    first, end = state.positions[stage, chain], state.positions[stage + 1, chain]
    speed = tables.thousandths[stage, tables.pipeline[stage, chain]]
    for kind in range(3):
        op = (kind * num_stages + stage) * num_chains + chain
        length = tables.times[kind, end] - tables.times[kind, first]
        if tables.times[kind, -1] > 0:  # else W's take no time, because backward passes are whole
            length = max(1, length)
        if speed != 1000:
            length = -(-length * 1000 // speed)
        if marks and length != state.rows.lengths[op]:
            mark_followers(state.rows, op)
        state.rows.lengths[op] = length


@uncounted
def set_held(tables: CutTables, state: OrderState, stage: int, chain: int) -> None:
    """Write the memory that a chain takes at a stage, as its cuts have it."""
    first, end = state.positions[stage, chain], state.positions[stage + 1, chain]
    state.held[0, stage, chain] = tables.sizes[0, end] - tables.sizes[0, first]
    state.held[1, stage, chain] = min(state.held[0, stage, chain], tables.sizes[1, end] - tables.sizes[1, first])


@uncounted
def _fits(tables: CutTables, state: OrderState, worker: int) -> bool:
    """Whether the row of a worker never holds more than its memory."""
    op, now, links, held = state.rows.heads[worker], 0, state.rows.links, state.held
    capacity = tables.capacity[worker // tables.thousandths.shape[1]]
    while op >= 0:
        kind, stage, chain = links[op, KIND], links[op, STAGE], links[op, CHAIN]
        if kind == F:
            now += held[0, stage, chain]
            if now > capacity:
                return False
        elif kind == I:
            now -= held[0, stage, chain] - held[1, stage, chain]
        else:
            now -= held[1, stage, chain]
        op = state.rows.after[op]
    return True


@uncounted
def _shift_cuts(tables: CutTables, state: OrderState, chain: int, first: int, last: int, shift: int) -> None:
    """Shift the cuts of a chain at a run of boundaries, with the memory that follows; lengths are as before."""
    for boundary in range(first, last + 1):
        state.positions[boundary, chain] += shift
    for stage in range(first - 1, last + 1):
        set_held(tables, state, stage, chain)


@uncounted
def _try_cuts(tables: CutTables, state: OrderState, chain: int, first: int, last: int, shift: int) -> bool:
    """Shift the cuts of a chain at a run of boundaries, and say so; or leave them, if that is not legal."""
    at = state.positions
    if first > last:
        return False
    for boundary in range(first, last + 1):
        if not tables.lows[boundary] <= at[boundary, chain] + shift <= tables.highs[boundary]:
            return False
    if at[first, chain] + shift <= at[first - 1, chain] or at[last + 1, chain] <= at[last, chain] + shift:
        return False
    _shift_cuts(tables, state, chain, first, last, shift)
    # All other stages of the run have as many layers as before, but not always as large ones.
    for stage in range(first - 1, last + 1):
        if not _fits(tables, state, stage * tables.thousandths.shape[1] + tables.pipeline[stage, chain]):
            _shift_cuts(tables, state, chain, first, last, -shift)
            return False
    for stage in range(first - 1, last + 1):
        set_lengths(tables, state, stage, chain, True)
    return True


@uncounted
def _try_move(tables: CutTables, state: OrderState, op: int, to: int) -> bool:
    """Move an op in its row, and say so; or leave it, if memory or what it waits for does not allow that."""
    rows = state.rows
    if op < 0 or to == op or to == rows.before[op]:
        return False
    was_after = rows.before[op]
    relink(rows, op, to)
    fits = _fits(tables, state, rows.links[op, WORKER])
    relink(rows, op, was_after)
    return bool(fits and move_op(rows, op, to))


@uncounted
def _path(rows: Rows, worker: int, choice: float, path: Ints) -> int:
    """Fill `path` with the ops that the end of a row waits for, the last first, each directly for the next; return how many."""
    links, lengths, starts, size, op = rows.links, rows.lengths, rows.starts, 0, rows.tails[worker]
    while op >= 0:
        path[size] = op
        size += 1
        row, here, there, found = rows.before[op], links[op, NEED_HERE], links[op, NEED_THERE], _NONE
        if there >= 0 and starts[there] + lengths[there] + links[op, NEED_US] == starts[op]:
            found = there
        if here >= 0 and starts[here] + lengths[here] == starts[op]:
            found = here
        if row >= 0 and starts[row] + lengths[row] == starts[op]:
            choice = choice * 7.0 % 1.0  # where the row and a need bind at once, one of the two paths is followed
            if found < 0 or choice < 0.5:
                found = row
        op = found
    return size


@uncounted
def _place(rows: Rows, path: Ints, size: int, at: int, how: float) -> tuple[int, int]:
    """Choose an op of the block of `path[at]`, and after which op it goes: the first two or the last two swap, or one goes far.

    A block is a part of the path in one row. Only what changes an end of it can make the path shorter at once.
    """
    before, after, end, begin = rows.before, rows.after, at, at
    while end > 0 and after[path[end]] == path[end - 1]:
        end -= 1
    while begin + 1 < size and before[path[begin]] == path[begin + 1]:
        begin += 1
    if begin == end:
        return _NONE, _NONE
    if how < 0.25:
        return path[begin], path[begin - 1]
    if how < 0.5:
        return path[end], before[path[end + 1]]
    if how < 0.75:
        return path[at], path[end]
    return path[at], before[path[begin]]


@uncounted
def _a_late_worker(spans: Ints, nearly_us: float, choice: float) -> int:
    """A worker whose span is the longest, or nearly."""
    longest = np.int64(0)
    for span in spans:
        longest = max(longest, span)
    least, num = longest - int(nearly_us), 0
    for span in spans:
        num += span >= least
    skipped = int(choice * num)
    for worker in range(spans.size):
        if spans[worker] >= least:
            if skipped == 0:
                return worker
            skipped -= 1
    return 0


@uncounted
def _boundaries(tables: CutTables, spans: Ints, stage: int, chain: int, one: float, other: float) -> tuple[int, int, int]:
    """The boundaries that shift, first and last, and by how much, if a layer goes from `stage` to another one.

    Of two stages by random numbers it goes to the one whose worker has the shorter span.
    """
    num_stages, num_pipelines = tables.pipeline.shape[0], tables.thousandths.shape[1]
    to, second = int(one * num_stages), int(other * num_stages)
    span = spans[to * num_pipelines + tables.pipeline[to, chain]]
    second_span = spans[second * num_pipelines + tables.pipeline[second, chain]]
    if to == stage or (second != stage and second_span < span):
        to = second
    return (to + 1, stage, 1) if to < stage else (stage + 1, to, -1)


@uncounted
def change_order(
    tables: CutTables,
    state: OrderState,
    spans: Ints,
    path: Ints,
    which: float,
    pick: float,
    how: float,
    far: float,
    choice: float,
) -> tuple[int, int, int, int, int]:
    """Change one thing on a path to the end of a late worker.

    Returns:
        What was changed, or `NO_CHANGE`; of what (a chain, a stage or an op); the first and the last boundary, or after which
        op it was; and by how much.
    """
    rows, num_pipelines = state.rows, tables.thousandths.shape[1]
    worker = _a_late_worker(spans, how * _NEARLY * tables.scale, choice)
    size = _path(rows, worker, choice, path)
    at = int(pick * size)
    op = path[at]
    if which < tables.cut_share:
        chain = rows.links[op, CHAIN]
        first, last, shift = _boundaries(tables, spans, rows.links[op, STAGE], chain, how, far)
        return (CUT_CHANGE if _try_cuts(tables, state, chain, first, last, shift) else NO_CHANGE), chain, first, last, shift
    if which >= 1 - _OPEN_SHARE and tables.is_staggered:
        stage, shift = worker // num_pipelines, 1 + int(far * _FARTHEST * tables.scale)
        if how < 0.5:
            stage, shift = rows.links[path[size - 1], STAGE], -shift
        rows.opens[stage] += shift
        for each in range(stage * num_pipelines, (stage + 1) * num_pipelines):
            mark(rows, rows.heads[each])
        return OPENING_CHANGE, stage, 0, 0, shift
    to = rows.after[op]
    if which < tables.cut_share + _BLOCK_SHARE * (1 - tables.cut_share):
        op, to = _place(rows, path, size, at, how)
    was_after = rows.before[op]
    return (MOVE_CHANGE if _try_move(tables, state, op, to) else NO_CHANGE), op, was_after, 0, 0


@uncounted
def take_back_change(tables: CutTables, state: OrderState, what: int, which: int, first: int, last: int, shift: int) -> None:
    """Take back what `change_order` did, and all starts that followed from it."""
    take_back(state.rows)
    if what == CUT_CHANGE:
        _shift_cuts(tables, state, which, first, last, -shift)
        for stage in range(first - 1, last + 1):
            set_lengths(tables, state, stage, which, False)
    elif what == OPENING_CHANGE:
        state.rows.opens[which] -= shift
    else:
        move_back(state.rows, which, first)
