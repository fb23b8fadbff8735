"""Changes of rows and cuts: the times that follow are those that a full computation has, and all can be taken back."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recycle.core.problem import Problem
from recycle.planner.heuristic.order_changes import NO_CHANGE, OrderState, change_order, take_back_change
from recycle.planner.heuristic.order_kernel import improve_orders, make_order_state, shift_all
from recycle.planner.heuristic.order_search import cut_tables
from recycle.planner.heuristic.row_times import NEED_HERE, NEED_THERE, NEED_US, STAGE, WORKER
from recycle.planner.heuristic.row_updates import Rows, begin_change, compute_starts
from recycle.planner.model.assignment import Assignment
from recycle.planner.model.schedule import Schedule
from tests.planner.heuristic.test_order_search import first_schedule, is_split_and_shared
from tests.planner.test_cut_plans import cut_problems

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
WITH_CUTS = cut_problems().filter(is_split_and_shared)
NO_LIMIT = 1 << 60


def positions_and_starts(problem: Problem, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    held = problem.held_layers
    assert held is not None
    positions = np.array(held.sums.bounds, dtype=np.int64)[:, None] + schedule.assignment.offsets
    return positions, np.stack([schedule.forward_us, schedule.input_us, schedule.weight_us])


def starts_by_hand(rows: Rows) -> np.ndarray:
    """Every op as early as its row, its needs and the opening of its stage allow, by going over all ops until nothing changes."""
    starts = rows.opens[rows.links[:, STAGE]].copy()
    is_changed = True
    while is_changed:
        is_changed = False
        for op, link in enumerate(rows.links):
            waits = [(int(rows.before[op]), 0), (int(link[NEED_HERE]), 0), (int(link[NEED_THERE]), int(link[NEED_US]))]
            start = max([starts[op], *(starts[need] + rows.lengths[need] + lag for need, lag in waits if need >= 0)])
            is_changed |= start != starts[op]
            starts[op] = start
    return starts


def copy_of(state: OrderState) -> list[np.ndarray]:
    rows = state.rows
    kept = (rows.lengths, rows.heads, rows.tails, rows.before, rows.after, rows.opens, rows.starts, rows.sequence, rows.places)
    return [each.copy() for each in (*kept, state.held, state.positions)]


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(WITH_CUTS, st.integers(0, 1000))
def test_a_change_computes_the_times_that_a_full_computation_has_and_can_be_taken_back(problem: Problem, seed: int) -> None:
    schedule = first_schedule(problem)
    tables = cut_tables(problem, schedule, 0)
    state = make_order_state(tables, *positions_and_starts(problem, schedule))
    rows, num_ops = state.rows, schedule.forward_us.size * 3
    path = np.zeros(num_ops, np.int64)
    shift_all(tables, state, np.zeros(num_ops, np.int64))
    rng = np.random.default_rng(seed)
    for _ in range(30):
        spans = rng.integers(0, 2, tables.thousandths.size)
        spans[rows.heads < 0] = 0
        spans[rows.links[0, WORKER]] = 2  # one is the longest, and it has ops
        before = copy_of(state)
        begin_change(rows)
        change = change_order(tables, state, spans, path, *rng.random(5))
        if change[0] == NO_CHANGE:
            assert all((one == other).all() for one, other in zip(before, copy_of(state), strict=True))
            continue
        assert compute_starts(rows, NO_LIMIT)
        assert (rows.starts == starts_by_hand(rows)).all()
        assert not rows.marks.any()
        assert (rows.places[rows.sequence] == np.arange(num_ops)).all()
        if rng.random() < 0.5:
            take_back_change(tables, state, *change)
            assert all((one == other).all() for one, other in zip(before, copy_of(state), strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(WITH_CUTS, st.integers(0, 1000))
def test_the_period_that_the_search_counts_is_that_of_the_rules(problem: Problem, seed: int) -> None:
    schedule = first_schedule(problem)
    positions, starts = positions_and_starts(problem, schedule)
    period_us, _ = improve_orders(cut_tables(problem, schedule, 0), 1.0, seed, 100_000, positions, starts)
    held = problem.held_layers
    assert held is not None
    assignment = Assignment.of(problem, schedule.pipeline, positions - np.array(held.sums.bounds)[:, None])
    found = Schedule(assignment, starts[0], starts[1], starts[2], schedule.is_fused)
    assert found.period_us(problem) == period_us
