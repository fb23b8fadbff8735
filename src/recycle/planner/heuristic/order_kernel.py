"""Compiled local search over the order of rows and over cuts: small changes of a schedule, each measured exactly.

A schedule is the order of every worker's ops, the cut of every chain, and when each stage opens. From these follow the times:
every op as early as its row, its needs and the opening of its stage allow. A step changes one thing and computes only the times
that depend on it, so that very many steps can be tried. Now and then all times are shifted right and left as `justify` does,
which finds the best openings for the rows as they are.

An op is a number: (kind * S + stage) * N + chain, for S stages and N chains.
"""

import numpy as np

from recycle.planner.heuristic.list_scheduling_kernel import F, W, compiled, uncounted
from recycle.planner.heuristic.order_changes import (
    NO_CHANGE,
    OPENING_CHANGE,
    CutTables,
    OrderState,
    change_order,
    set_held,
    set_lengths,
    take_back_change,
)
from recycle.planner.heuristic.row_times import CHAIN, KIND, STAGE, make_links, make_rows, retime_rows, shift_left
from recycle.planner.heuristic.row_updates import (
    NUM_CHANGED,
    NUM_COUNTS,
    Rows,
    begin_change,
    compute_latest_ends,
    compute_starts,
)
from recycle.planner.model.assignment import Ints

_ANY = np.int64(1) << 60
# Norm in which the excess of workers over the bound is measured: high, so that the worst ones count most.
_NORM = 8
# What a step costs besides the starts that it computes, in starts; and after how many starts for each op all are shifted anew.
_STEP_COST, _SHIFT_EVERY = 60, 50
# A step is given up as soon as an op ends later than its latest end by this share of the excess over the bound. The latest ends
# are computed anew after so many steps that were taken.
_MARGIN, _TAKEN_BETWEEN = 0.3, 16


@uncounted
def _least(values: Ints) -> int:
    """The least of an array: numpy's own counts references."""
    least = values[0]
    for value in values:
        least = min(least, value)
    return int(least)


@uncounted
def _measure(tables: CutTables, rows: Rows, spans: Ints) -> tuple[int, float]:
    """Fill `spans`; return the longest, and the sum over all workers of a high power of the excess over the bound."""
    first, period, total, num_pipelines = _least(rows.opens), np.int64(0), 0.0, tables.thousandths.shape[1]
    for worker in range(spans.size):
        op, stage = rows.tails[worker], worker // num_pipelines
        spans[worker] = 0
        if op >= 0:
            opened = rows.opens[stage] if tables.is_staggered else first
            spans[worker] = rows.starts[op] + rows.lengths[op] - opened + tables.finish[stage]
        period = max(period, spans[worker])
        total += _high_power(spans[worker] - tables.bound)
    return int(period), total


@uncounted
def _measure_layers(tables: CutTables, state: OrderState, period: int, firsts: Ints, lasts: Ints) -> tuple[int, float]:
    """The longest use of a shared layer with its step, at least `period`, and the sum of powers of those that are longer.

    A use that is longer than `period` begins so early, or ends so late, that only ops near the ends of rows can be part of it.
    """
    rows, num_pipelines, num_stages = state.rows, tables.thousandths.shape[1], tables.pipeline.shape[0]
    longest, total, finish = period, 0.0, np.int64(0)
    for each in tables.layer_finish:
        finish = max(finish, each)
    firsts[:], lasts[:] = np.int64(1) << 60, -(np.int64(1) << 60)
    for stage in range(num_stages):
        above = below = stage  # stages that hold a layer in common with this one
        while above > 0 and tables.highs[above] > tables.lows[stage]:
            above -= 1
        while below < num_stages - 1 and tables.lows[below + 1] < tables.highs[stage + 1]:
            below += 1
        opened, closed = np.int64(1) << 60, -(np.int64(1) << 60)
        for worker in range(above * num_pipelines, (below + 1) * num_pipelines):
            if rows.heads[worker] >= 0:
                head, tail = rows.heads[worker], rows.tails[worker]
                opened, closed = min(opened, rows.starts[head]), max(closed, rows.starts[tail] + rows.lengths[tail])
        for worker in range(stage * num_pipelines, (stage + 1) * num_pipelines):
            _first_uses(state, rows.heads[worker], closed + finish - period, firsts)
            _last_uses(state, rows.tails[worker], opened + period - finish, lasts)
    for layer in range(firsts.size):
        if tables.layer_finish[layer] >= 0:
            span = lasts[layer] - firsts[layer] + tables.layer_finish[layer]
            if span > period:
                longest = max(longest, span)
                total += _high_power(span - tables.bound)
    return longest, total


@uncounted
def _first_uses(state: OrderState, op: int, until: int, firsts: Ints) -> None:
    """Fill in the first start of each layer by the F's of a row that start before `until`."""
    links, starts = state.rows.links, state.rows.starts
    while op >= 0 and starts[op] < until:
        if links[op, KIND] == F:
            stage, chain = links[op, STAGE], links[op, CHAIN]
            for layer in range(state.positions[stage, chain], state.positions[stage + 1, chain]):
                firsts[layer] = min(firsts[layer], starts[op])
        op = state.rows.after[op]


@uncounted
def _last_uses(state: OrderState, op: int, since: int, lasts: Ints) -> None:
    """Fill in the last end of each layer by the W's of a row that end after `since`."""
    links, starts, lengths = state.rows.links, state.rows.starts, state.rows.lengths
    while op >= 0 and starts[op] + lengths[op] > since:
        if links[op, KIND] == W:
            stage, chain = links[op, STAGE], links[op, CHAIN]
            for layer in range(state.positions[stage, chain], state.positions[stage + 1, chain]):
                lasts[layer] = max(lasts[layer], starts[op] + lengths[op])
        op = state.rows.before[op]


@uncounted
def _high_power(excess: int) -> float:
    """A power of the excess, if there is one: high, so that the worst ones count most."""
    square = float(max(0, excess)) ** 2
    return square * square * square * square


@uncounted
def _set_latest_ends(tables: CutTables, rows: Rows, period: int, closes: Ints) -> None:
    """Compute when each op may end at the latest if no worker's span is longer than `period`."""
    first = _least(rows.opens)
    for stage in range(closes.size):
        closes[stage] = (rows.opens[stage] if tables.is_staggered else first) + period - tables.finish[stage]
    compute_latest_ends(rows, closes)


@compiled
def shift_all(tables: CutTables, state: OrderState, missing: Ints) -> None:
    """Shift all times right and left; afterwards a stage opens with its first op, or synchronous with the first of all."""
    rows = state.rows
    retime_rows(rows.links, rows.lengths, rows.before, rows.after, missing, rows.sequence, rows.opens, rows.starts)
    if not tables.is_staggered:
        rows.opens[:] = rows.opens.min()
        shift_left(rows.links, rows.lengths, rows.before, rows.sequence, rows.opens, rows.starts)
    for place in range(rows.sequence.size):
        rows.places[rows.sequence[place]] = place


@compiled
def make_order_state(tables: CutTables, positions: Ints, starts: Ints) -> OrderState:
    """The rows in the order of `starts`, with the cuts of `positions`; no times yet."""
    num_stages, num_chains = tables.pipeline.shape
    links = make_links(tables.pipeline, tables.comm, tables.thousandths.shape[1])
    heads, tails, before, after = make_rows(links, starts, tables.thousandths.size)
    opens, counts, marks = np.zeros(num_stages, np.int64), np.zeros(NUM_COUNTS, np.int64), np.zeros(starts.size, np.uint8)
    new = np.zeros((8, starts.size), np.int64)
    lengths, now, late, sequence, places = new[0], new[1], new[2], new[3], new[4]
    undo = new[5], new[6], new[7]
    rows = Rows(links, lengths, heads, tails, before, after, opens, now, late, sequence, places, marks, *undo, counts)
    state = OrderState(rows, np.zeros((2, num_stages, num_chains), np.int64), positions)
    for stage in range(num_stages):
        for chain in range(num_chains):
            set_held(tables, state, stage, chain)
            set_lengths(tables, state, stage, chain, False)
    return state


@uncounted
def _measure_all(tables: CutTables, state: OrderState, limit: float, spans: Ints, firsts: Ints, lasts: Ints) -> tuple[int, float]:
    """Fill `spans`; return the period, and the excess over the bound in a norm; without layers if it is beyond `limit` anyway."""
    period, total = _measure(tables, state.rows, spans)
    energy = (total / spans.size) ** (1 / _NORM)
    if firsts.size and energy <= limit:
        period, more = _measure_layers(tables, state, period, firsts, lasts)
        energy = ((total + more) / spans.size) ** (1 / _NORM)
    return period, energy


@compiled
def improve_orders(tables: CutTables, warmth: float, seed: int, budget: int, positions: Ints, starts: Ints) -> tuple[int, int]:
    """Improve a schedule by random steps until these have computed `budget` starts, or what takes as long.

    `positions` are the layers at which chains are cut, by boundary and chain. A step that makes the schedule worse is taken with
    a probability that `warmth` sets. Fill `positions` and `starts` with the best schedule; return its period and the number of
    steps.
    """
    state = make_order_state(tables, positions, starts)
    rows, num_ops, num_workers, num_layers = state.rows, starts.size, tables.thousandths.size, tables.layer_finish.size
    missing, path, best_starts = np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64), np.zeros(num_ops, np.int64)
    spans, trial_spans, closes = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64), np.zeros_like(rows.opens)
    firsts, lasts, best_positions = np.zeros(num_layers, np.int64), np.zeros(num_layers, np.int64), positions.copy()
    np.random.seed(seed)
    root = num_workers ** (1 / _NORM)
    best, best_energy, period, energy = np.int64(1) << 60, np.inf, np.int64(1) << 60, np.inf
    used, shift_at, num_taken, num_steps = 0, 0, 0, 0
    while best > tables.bound:
        if used >= shift_at or num_taken >= _TAKEN_BETWEEN or used >= budget:
            if used >= shift_at:
                shift_all(tables, state, missing)
                period, energy = _measure_all(tables, state, np.inf, spans, firsts, lasts)
                used += 4 * num_ops
                shift_at = used + _SHIFT_EVERY * num_ops
            if period < best or (period == best and energy < best_energy):
                best, best_energy = period, energy
                best_starts[:] = rows.starts
                best_positions[:] = positions
            if used >= budget:
                break
            _set_latest_ends(tables, rows, spans.max(), closes)
            used += num_ops
            num_taken = 0
        randoms = np.random.random(6)
        begin_change(rows)
        change = change_order(tables, state, spans, path, randoms[0], randoms[1], randoms[2], randoms[3], randoms[4])
        num_steps += 1
        used += _STEP_COST
        if change[0] == NO_CHANGE:
            continue
        limit, trial, trial_period = energy - warmth * np.log(max(randoms[5], 1e-12)), np.inf, period
        # Without cuts more is worse for a while than later helps: a step is given up only if it cannot be taken.
        margin = energy * _MARGIN if tables.cut_share > 0 else limit * root - (period - tables.bound)
        is_within = compute_starts(rows, _ANY if change[0] == OPENING_CHANGE else int(margin))
        used += rows.counts[NUM_CHANGED]
        if is_within:
            trial_period, trial = _measure_all(tables, state, limit, trial_spans, firsts, lasts)
        if trial <= limit:
            period, energy = trial_period, trial
            spans[:] = trial_spans
            # The next turn keeps a shorter schedule; one that is only better in other ways is kept now and then.
            num_taken = _TAKEN_BETWEEN if period < best else num_taken + 1
        else:
            take_back_change(tables, state, *change)
    starts[:] = best_starts.reshape(starts.shape)
    positions[:] = best_positions
    return int(best), num_steps
