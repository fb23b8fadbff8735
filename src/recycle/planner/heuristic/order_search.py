"""The last part of the greedy method where chains may be cut: improve the best schedule by changes of its orders and cuts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner.heuristic.order_changes import CutTables
from recycle.planner.heuristic.order_kernel import improve_orders
from recycle.planner.heuristic.search import UNLIMITED
from recycle.planner.model.assignment import Assignment, Ints, speeds_of
from recycle.planner.model.load_split import work_line
from recycle.planner.model.schedule import Schedule, comms_of

_CUT_SHARE = 0.4
# The search goes in so many parts, each from the best schedule so far, and each with less warmth than the one before.
_NUM_PARTS = 20
# Warmth: the time by which the span of one worker may get worse, as a share of the mean length of an op. With less effort for
# each op than this, warmth falls with it: then there is only time for steps that help.
_WARMTH, _WARM_EFFORT = 0.3, 60_000


def improve(
    problem: Problem, schedule: Schedule, bound_us: int, effort: int, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the schedule after small changes of orders and cuts that compute `effort` starts, or the same one if none helped.

    The problem has shared layers, and every backward pass of the schedule is split.
    """
    held = problem.held_layers
    assert held is not None
    base: Ints = np.array(held.sums.bounds, dtype=np.int64)[:, None]
    positions = base + schedule.assignment.offsets
    starts = np.stack([schedule.forward_us, schedule.input_us, schedule.weight_us])
    tables = cut_tables(problem, schedule, bound_us)
    warmth = _WARMTH * tables.scale / tables.thousandths.size * min(1.0, effort / starts.size / _WARM_EFFORT)
    period_us = schedule.period_us(problem)
    if anneal(tables, warmth, _NUM_PARTS, effort, positions, starts, period_us, out_of_time) >= period_us:
        return schedule
    assignment = Assignment.of(problem, schedule.pipeline, positions - base)
    return replace(schedule, assignment=assignment, forward_us=starts[0], input_us=starts[1], weight_us=starts[2])


def anneal(
    tables: CutTables,
    warmth: float,
    num_parts: int,
    effort: int,
    positions: Ints,
    starts: Ints,
    period_us: int,
    out_of_time: Callable[[], bool],
) -> int:
    """Improve `positions` and `starts`, whose period is `period_us`, in parts of falling warmth; return the period then."""
    for part in range(num_parts):
        if period_us <= tables.bound or out_of_time():
            break
        cooled = warmth * (1 - part / num_parts)
        period_us = improve_orders(tables, cooled, part, effort // num_parts, positions, starts)[0]
    return period_us


def cut_tables(problem: Problem, schedule: Schedule, bound_us: int) -> CutTables:
    """The problem and the routes of a schedule as the kernel takes them."""
    held, stages, is_staggered = problem.held_layers, range(problem.shape.num_stages), problem.techniques.staggered
    assert held is not None
    line, num_layers, sums = work_line(problem), held.sums.num_layers, held.sums.sums
    slowest = max(map(problem.optimizer_us, stages))
    capacities = [problem.capacity(stage) for stage in stages]
    counts = tuple(range(num_layers + 1))
    in_bytes = problem.memory.unit == "bytes"
    return CutTables(
        pipeline=schedule.pipeline,
        comm=comms_of(problem),
        finish=_ints([problem.finish_us(s) if is_staggered else problem.reduce_us(s) + slowest for s in stages]),
        # Synchronous steps wait for all layers anyway.
        layer_finish=_ints([held.finish_of_layer_us.get(layer, -1) for layer in range(num_layers if is_staggered else 0)]),
        capacity=_ints([UNLIMITED if each is None else each for each in capacities]),
        times=_ints([held.sums.times(kind) for kind in (Kind.F, Kind.I, Kind.W)]),
        sizes=_ints([sums["activation_bytes"], sums["weight_held_bytes"]] if in_bytes else [counts, counts]),
        thousandths=np.rint(speeds_of(problem) * 1000).astype(np.int64),
        lows=_ints(line.lows),
        highs=_ints(line.highs),
        is_staggered=is_staggered,
        bound=bound_us,
        scale=float(schedule.assignment.lengths_us[:3].mean()),
        cut_share=_CUT_SHARE,
    )


def _ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Ints:
    return np.array(values, dtype=np.int64)
