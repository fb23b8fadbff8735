"""The last part of the greedy method where chains are not cut: improve the best schedule by changes of the orders of its rows.

The kernel is that of the search over orders and cuts. A stage is one layer here, and no boundary may move.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner.heuristic.order_changes import CutTables
from recycle.planner.heuristic.order_search import anneal
from recycle.planner.heuristic.search import UNLIMITED
from recycle.planner.model.assignment import KIND_NUMBERS, Ints, speeds_of
from recycle.planner.model.schedule import Schedule, comms_of

# The search goes in so many parts, each from the best schedule so far, and each with less warmth than the one before.
_NUM_PARTS = 10
# Warmth: the excess that a step may add, as a share of the mean length of an op. With less effort for each op than this, warmth
# falls with it: then there is only time for steps that help.
_WARMTH, _WARM_EFFORT = 0.3, 3_000


def improve_rows(
    problem: Problem, schedule: Schedule, bound_us: int, effort: int, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the schedule after small changes of its orders that compute `effort` starts, or the same one if none helped.

    No chain is cut, and the backward passes are all split or all whole.
    """
    tables = row_tables(problem, schedule, bound_us)
    positions = np.repeat(np.arange(len(schedule.pipeline) + 1, dtype=np.int64)[:, None], schedule.pipeline.shape[1], axis=1)
    # A whole backward pass is an I that frees all memory, with a W that takes no time and frees nothing.
    weight_us = np.where(schedule.is_fused, schedule.input_us, schedule.weight_us)
    starts = np.stack([schedule.forward_us, schedule.input_us, weight_us])
    warmth = _WARMTH * tables.scale * min(1.0, effort / starts.size / _WARM_EFFORT)
    period_us = schedule.period_us(problem)
    if anneal(tables, warmth, _NUM_PARTS, effort, positions, starts, period_us, out_of_time) >= period_us:
        return schedule
    return replace(schedule, forward_us=starts[0], input_us=starts[1], weight_us=starts[2])


def row_tables(problem: Problem, schedule: Schedule, bound_us: int) -> CutTables:
    """The problem and the routes of a schedule as the kernel takes them, with a layer for each stage."""
    num_stages, is_staggered = problem.shape.num_stages, problem.techniques.staggered
    stages, kinds = range(num_stages), [Kind.F, Kind.I, Kind.W] if problem.techniques.decoupled else [Kind.F, Kind.B]
    times: Ints = np.zeros((3, num_stages + 1), dtype=np.int64)
    for number, kind in enumerate(kinds):
        times[number, 1:] = np.cumsum([problem.duration_us(stage, kind) for stage in stages])
    sizes: Ints = np.zeros((2, num_stages + 1), dtype=np.int64)
    sizes[0, 1:] = np.cumsum([problem.held_by_forward(stage) for stage in stages])
    if problem.techniques.decoupled:  # else a B frees everything
        sizes[1, 1:] = np.cumsum([problem.held_for_weight(stage) for stage in stages])
    slowest = max(map(problem.optimizer_us, stages))
    finish = [problem.finish_us(stage) if is_staggered else problem.reduce_us(stage) + slowest for stage in stages]
    capacities = [UNLIMITED if (each := problem.capacity(stage)) is None else each for stage in stages]
    bounds = np.arange(num_stages + 1, dtype=np.int64)
    lengths = schedule.assignment.lengths_us[[KIND_NUMBERS[kind] for kind in kinds]]
    return CutTables(
        pipeline=schedule.pipeline,
        comm=comms_of(problem),
        finish=np.array(finish, dtype=np.int64),
        layer_finish=np.zeros(0, dtype=np.int64),
        capacity=np.array(capacities, dtype=np.int64),
        times=times,
        sizes=sizes,
        thousandths=np.rint(speeds_of(problem) * 1000).astype(np.int64),
        lows=bounds,
        highs=bounds,
        is_staggered=is_staggered,
        bound=bound_us,
        scale=float(lengths.mean()),
        cut_share=0.0,
    )
