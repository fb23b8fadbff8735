"""Compiled local search over the order of rows and over cuts: small changes of a schedule, each measured exactly.

A schedule is the order of every worker's ops and the cut of every chain. From these follow the times: every op as early as its
row and its needs allow, then shifted right and left as `justify` does. A step changes what the longest path to the end of a
critical worker goes through: an op moves in its row, or a layer of a chain goes from its worker to the worker of another stage.
Unlike a new list schedule, such a step leaves nearly everything as it was, so that many of them add up.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.planner.heuristic.list_scheduling_kernel import F, I, compiled, uncounted
from recycle.planner.heuristic.row_times import (
    CHAIN,
    KIND,
    NEED_HERE,
    NEED_THERE,
    NEED_US,
    STAGE,
    WORKER,
    make_links,
    make_rows,
    measure_times,
    retime_rows,
)
from recycle.planner.model.assignment import Ints

Floats = npt.NDArray[np.float64]
_NONE = -1
# Shares of the steps that shift a layer, and that change an end of a block; the others swap two ops.
_CUT_SHARE, _BLOCK_SHARE = 0.4, 0.3
_LONGEST_RUN = 8
# A step starts from the end of a worker that is at most so many microseconds better than the worst.
_NEARLY_US = 4


class CutTables(NamedTuple):
    """A problem with shared layers and the routes of its chains, as the kernel takes them.

    `times` and `sizes` are sums over the layers: of the times of F, I and W, and of the memory that F takes and that stays until
    W. `layer_finish` is -1 for layers of one stage. `lows` and `highs` are the first and last layer at which a boundary may lie.
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


class _State(NamedTuple):
    """What a step changes: rows, cuts, and the costs of ops that follow from the cuts."""

    links: Ints
    lengths: Ints
    held: Ints
    positions: Ints
    heads: Ints
    before: Ints
    after: Ints


@uncounted
def _set_costs(tables: CutTables, state: _State, stage: int, chain: int) -> None:
    """Write the lengths and the memory of a chain's ops at a stage, as its cuts have them."""
    num_stages, num_chains = tables.pipeline.shape
    first, end = state.positions[stage, chain], state.positions[stage + 1, chain]
    speed = tables.thousandths[stage, tables.pipeline[stage, chain]]
    for kind in range(3):
        whole = max(1, tables.times[kind, end] - tables.times[kind, first])
        state.lengths[(kind * num_stages + stage) * num_chains + chain] = whole if speed == 1000 else -(-whole * 1000 // speed)
    state.held[0, stage, chain] = tables.sizes[0, end] - tables.sizes[0, first]
    state.held[1, stage, chain] = min(state.held[0, stage, chain], tables.sizes[1, end] - tables.sizes[1, first])


@uncounted
def _fits(tables: CutTables, state: _State, worker: int) -> bool:
    """Whether the row of a worker never holds more than its memory."""
    op, now, links, held = state.heads[worker], 0, state.links, state.held
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
        op = state.after[op]
    return True


@uncounted
def _shift_cuts(tables: CutTables, state: _State, chain: int, first: int, last: int, shift: int) -> None:
    for boundary in range(first, last + 1):
        state.positions[boundary, chain] += shift
    for stage in range(first - 1, last + 1):
        _set_costs(tables, state, stage, chain)


@uncounted
def _try_cuts(tables: CutTables, state: _State, chain: int, first: int, last: int, shift: int) -> bool:
    """Shift the cuts of a chain at a run of boundaries, and say so; or leave them, if that is not legal."""
    at = state.positions
    if first < 1 or last > tables.pipeline.shape[0] - 1:
        return False
    for boundary in range(first, last + 1):
        if not tables.lows[boundary] <= at[boundary, chain] + shift <= tables.highs[boundary]:
            return False
    if at[first, chain] + shift <= at[first - 1, chain] or at[last + 1, chain] <= at[last, chain] + shift:
        return False
    _shift_cuts(tables, state, chain, first, last, shift)
    for stage in range(first - 1, last + 1):
        if not _fits(tables, state, stage * tables.thousandths.shape[1] + tables.pipeline[stage, chain]):
            _shift_cuts(tables, state, chain, first, last, -shift)
            return False
    return True


@uncounted
def _move(state: _State, op: int, to: int) -> None:
    """Take an op out of its row and put it back directly after `to`, or at the head of the row."""
    heads, before, after, worker = state.heads, state.before, state.after, state.links[op, WORKER]
    first, last = before[op], after[op]
    if first >= 0:
        after[first] = last
    else:
        heads[worker] = last
    if last >= 0:
        before[last] = first
    follower = after[to] if to >= 0 else heads[worker]
    before[op], after[op] = to, follower
    if to >= 0:
        after[to] = op
    else:
        heads[worker] = op
    if follower >= 0:
        before[follower] = op


@uncounted
def _try_move(tables: CutTables, state: _State, op: int, to: int) -> bool:
    """Move an op in its row, and say so; or leave it, if memory does not allow that."""
    if op < 0 or to == op or to == state.before[op]:
        return False
    was_after = state.before[op]
    _move(state, op, to)
    if _fits(tables, state, state.links[op, WORKER]):
        return True
    _move(state, op, was_after)
    return False


@uncounted
def _path(state: _State, starts: Ints, worker: int, choice: float, path: Ints) -> int:
    """Fill `path` with the ops that the end of a row waits for, the last first, each directly for the next; return how many."""
    links, lengths, size, op = state.links, state.lengths, 0, state.heads[worker]
    while state.after[op] >= 0:
        op = state.after[op]
    while op >= 0:
        path[size] = op
        size += 1
        row, here, there, found = state.before[op], links[op, NEED_HERE], links[op, NEED_THERE], _NONE
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
def _place(state: _State, path: Ints, size: int, at: int, how: float) -> tuple[int, int]:
    """Choose an op of the block of `path[at]`, and after which op it goes: the first two or the last two swap, or one goes far.

    A block is a part of the path in one row. Only what changes an end of it can make the path shorter at once.
    """
    before, after, end, begin = state.before, state.after, at, at
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
def _a_late_worker(spans: Ints, nearly: float, choice: float) -> int:
    """A worker whose span is the longest, or nearly."""
    longest = np.int64(0)
    for span in spans:
        longest = max(longest, span)
    least, num = longest - int(_NEARLY_US * nearly), 0
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
def _boundaries(stage: int, num_stages: int, how: float, far: float) -> tuple[int, int, int]:
    """The boundaries that shift, first and last, and by how much, if a layer goes from `stage` to one before or after it."""
    if how < 0.5:
        return stage - int(far * min(_LONGEST_RUN, stage)), stage, 1
    return stage + 1, stage + 1 + int(far * min(_LONGEST_RUN, num_stages - 1 - stage)), -1


@compiled
def improve_orders(tables: CutTables, warmth: float, randoms: Floats, positions: Ints, starts: Ints) -> int:
    """Improve a schedule by one step for each row of `randoms`; fill `positions` and `starts` with the best, return its period.

    `positions` are the layers at which chains are cut, by boundary and chain. A step that makes the schedule worse is taken with
    a probability that `warmth` sets.
    """
    num_stages, num_chains = tables.pipeline.shape
    num_ops, num_workers = 3 * num_stages * num_chains, tables.thousandths.size
    links = make_links(tables.pipeline, tables.comm, tables.thousandths.shape[1])
    lengths, held = np.zeros(num_ops, np.int64), np.zeros((2, num_stages, num_chains), np.int64)
    heads, before, after = make_rows(links, starts, num_workers)
    state = _State(links, lengths, held, positions, heads, before, after)
    for chain in range(num_chains):
        _shift_cuts(tables, state, chain, 1, num_stages - 1, 0)
    missing, sequence, path = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
    opens, spans, trial_spans = np.zeros(num_stages, np.int64), np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64)
    now, trial = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
    finish, layer_finish, is_staggered, bound = tables.finish, tables.layer_finish, tables.is_staggered, tables.bound
    retime_rows(links, lengths, before, after, missing, sequence, opens, now)
    period, energy = measure_times(links, positions, finish, layer_finish, is_staggered, bound, lengths, now, opens, spans)
    best, best_energy, best_starts, best_positions = period, energy, now.copy(), positions.copy()
    for step in range(randoms.shape[0]):
        which, pick, how, far, accept, choice = randoms[step]
        size = _path(state, now, _a_late_worker(spans, how, choice), choice, path)
        at = int(pick * size)
        op, to, chain = path[at], after[path[at]], links[path[at], CHAIN]
        first, last, shift = _boundaries(links[op, STAGE], num_stages, how, far)
        is_cut = which < _CUT_SHARE
        if not is_cut and which < _CUT_SHARE + _BLOCK_SHARE:
            op, to = _place(state, path, size, at, how)
        was_after = before[op]
        if not (_try_cuts(tables, state, chain, first, last, shift) if is_cut else _try_move(tables, state, op, to)):
            continue
        if retime_rows(links, lengths, before, after, missing, sequence, opens, trial):
            period, trial_energy = measure_times(
                links, positions, finish, layer_finish, is_staggered, bound, lengths, trial, opens, trial_spans
            )
            if trial_energy <= energy - warmth * np.log(max(accept, 1e-12)):
                energy = trial_energy
                now, trial, spans, trial_spans = trial, now, trial_spans, spans
                if period < best or (period == best and energy < best_energy):
                    best, best_energy = period, energy
                    best_starts[:] = now
                    best_positions[:] = positions
                continue
        if is_cut:
            _shift_cuts(tables, state, chain, first, last, -shift)
        else:
            _move(state, op, was_after)
    starts[:] = best_starts.reshape(starts.shape)
    positions[:] = best_positions
    return int(best)
