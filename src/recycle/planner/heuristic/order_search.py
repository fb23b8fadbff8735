"""The last part of the greedy method where chains may be cut: improve the best schedule by changes of its orders and cuts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner.heuristic.order_kernel import improve_orders
from recycle.planner.heuristic.search import UNLIMITED
from recycle.planner.model.assignment import Assignment, Ints, speeds_of
from recycle.planner.model.load_split import work_line
from recycle.planner.model.schedule import Schedule, comms_of

# Steps go in so many parts, each from the best schedule so far, and each with less warmth than the one before.
_NUM_PARTS = 20
# With few steps for each op only those that help are taken; with more, worse ones help to leave a local optimum.
_MOST_WARMTH, _WARMTH_OF_A_STEP = 0.3, 0.01


def improve(
    problem: Problem, schedule: Schedule, bound_us: int, num_steps: int, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the schedule after `num_steps` small changes of orders and cuts, or the same one if none helped.

    The problem has shared layers, and every backward pass of the schedule is split.
    """
    held = problem.held_layers
    assert held is not None
    base: Ints = np.array(held.sums.bounds, dtype=np.int64)[:, None]
    positions = base + schedule.assignment.offsets
    starts = np.stack([schedule.forward_us, schedule.input_us, schedule.weight_us])
    tables, rng = _tables(problem), np.random.default_rng(0)
    warmth = min(_MOST_WARMTH, _WARMTH_OF_A_STEP * num_steps / starts.size)
    period_us = schedule.period_us(problem)
    for part in range(_NUM_PARTS):
        if period_us <= bound_us or out_of_time():
            break
        randoms = rng.random((-(-num_steps // _NUM_PARTS), 6))
        cooled = warmth * (1 - part / _NUM_PARTS)
        period_us = improve_orders(schedule.pipeline, *tables, bound_us, cooled, randoms, positions, starts)
    if period_us >= schedule.period_us(problem):
        return schedule
    assignment = Assignment.of(problem, schedule.pipeline, positions - base)
    return replace(schedule, assignment=assignment, forward_us=starts[0], input_us=starts[1], weight_us=starts[2])


def _tables(problem: Problem) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, bool]:
    """The problem as the kernel takes it."""
    held, stages, is_staggered = problem.held_layers, range(problem.shape.num_stages), problem.techniques.staggered
    assert held is not None
    line, num_layers = work_line(problem), held.sums.num_layers
    slowest = max(map(problem.optimizer_us, stages))
    finish = [problem.finish_us(stage) if is_staggered else problem.reduce_us(stage) + slowest for stage in stages]
    # Synchronous steps wait for all layers anyway.
    layer_finish = [held.finish_of_layer_us.get(layer, -1) for layer in range(num_layers if is_staggered else 0)]
    capacities = [problem.capacity(stage) for stage in stages]
    times = [held.sums.times(kind) for kind in (Kind.F, Kind.I, Kind.W)]
    sizes = [range(num_layers + 1)] * 2
    if problem.memory.unit == "bytes":
        sizes = [held.sums.sums[name] for name in ("activation_bytes", "weight_held_bytes")]  # type: ignore[misc]
    lists = (finish, layer_finish, [UNLIMITED if each is None else each for each in capacities], times, sizes)
    thousandths = np.rint(speeds_of(problem) * 1000).astype(np.int64)
    made = (np.array(each, dtype=np.int64) for each in lists)
    return comms_of(problem), *made, thousandths, np.array(line.lows), np.array(line.highs), is_staggered  # type: ignore[return-value]
