"""Time shares of each worker (busy, bubble, reduction, step) and its memory, from a replay."""

from dataclasses import replace

import numpy as np

from recycle.core.plans.op_costs import OpCosts
from recycle.core.problem import Memory, Problem
from recycle.core.time_shares import TimeShares
from recycle.sim.replay.op_graph import Ints
from recycle.sim.replay.replay_result import ReplayResult

_UNLIMITED_BYTES = 10**15


def stage_intervals_us(result: ReplayResult) -> Ints:
    """Return by iteration and stage the start of the iteration there, and the start of the next iteration.

    The last iteration is taken to end a period after its start, or when the stage has stepped if that is later.
    """
    problem = result.problem
    stages = range(problem.shape.num_stages)
    firsts = np.stack([result.starts_us[:, result.graph.first_ops(stage)].min(axis=1) for stage in stages], axis=1)
    stepped = result.step_ends_us[-1]
    if not problem.techniques.staggered:
        firsts = np.repeat(firsts.min(axis=1, keepdims=True), firsts.shape[1], axis=1)
        stepped = np.full_like(stepped, stepped.max())
    last = np.maximum(stepped, firsts[-1] + result.periods_us[-1])
    return np.stack([firsts, np.concatenate([firsts[1:], [last]])], axis=2)


def time_shares(result: ReplayResult) -> list[TimeShares]:
    """Return the time shares of each live worker, from the start of its first iteration to the end of its last."""
    intervals = stage_intervals_us(result)
    reduced = (result.reduce_ends_us - result.reduce_starts_us).sum(axis=0)
    stepped = (result.step_ends_us - result.step_starts_us).sum(axis=0)
    shares = []
    for number, row in enumerate(result.plan.rows):
        stage, ops = row.worker.stage, result.graph.ops_of_row(number)
        busy = int((result.ends_us[:, ops] - result.starts_us[:, ops]).sum())
        span = int(intervals[-1, stage, 1] - intervals[0, stage, 0])
        shares.append(TimeShares(row.worker, span, busy, int(reduced[stage]), int(stepped[stage])))
    return shares


def with_unlimited_memory(problem: Problem) -> Problem:
    """Return `problem` with unlimited memory: in bytes if the profile has activation bytes, else in micro-batches."""
    stages = problem.profile.stages
    if any(stage.activation_bytes for stage in stages):
        return replace(problem, memory=Memory.bytes([_UNLIMITED_BYTES] * len(stages)))
    return replace(problem, memory=Memory.unlimited())


def memory_held(result: ReplayResult, row: int, iteration: int) -> tuple[Ints, Ints]:
    """Return the times at which the memory of a worker changes in an iteration, and the memory held from each time on."""
    graph, problem = result.graph, with_unlimited_memory(result.problem)
    planned, ops = graph.plan.rows[row], graph.ops_of_row(row)
    costs = OpCosts(problem, graph.plan.cuts)
    deltas = np.array(costs.memory_deltas(planned.worker, planned.kinds, planned.chains), dtype=np.int64)
    is_forward = graph.kinds[ops] == 0
    times = np.where(is_forward, result.starts_us[iteration, ops], result.ends_us[iteration, ops])
    return times, _static_bytes(problem, planned.worker.stage) + np.cumsum(deltas)


def _static_bytes(problem: Problem, stage: int) -> int:
    return problem.static_bytes(stage) if problem.memory.unit == "bytes" else 0


def peak_memory(result: ReplayResult) -> tuple[str, list[int]]:
    """Return the unit, and for each stage the peak memory of its fullest worker.

    Memory depends on the order of the row alone, so that one iteration gives the peak of all.
    """
    problem = with_unlimited_memory(result.problem)
    peaks = [_static_bytes(problem, stage) for stage in range(problem.shape.num_stages)]
    for number, row in enumerate(result.plan.rows):
        if row.kinds:
            peaks[row.worker.stage] = max(peaks[row.worker.stage], int(memory_held(result, number, 0)[1].max()))
    return "bytes" if problem.memory.unit == "bytes" else "layers" if problem.held_layers else "microbatches", peaks


def memory_curve(result: ReplayResult, stage: int, iteration: int, num_columns: int) -> list[int]:
    """Divide an iteration into columns of equal time, and return the peak memory of the stage's fullest worker in each."""
    first, last = stage_intervals_us(result)[iteration, stage].tolist()
    curve = np.full(num_columns, _static_bytes(with_unlimited_memory(result.problem), stage), dtype=np.int64)
    for number in result.graph.rows_of_stage(stage):
        times, held = memory_held(result, number, iteration)
        if len(times) == 0:
            continue
        columns = np.minimum((times - first) * num_columns // (last - first), num_columns - 1)
        np.maximum.at(curve, columns, held)
        # Memory stays the same until the next change.
        after = np.searchsorted(columns, np.arange(num_columns), side="left") - 1
        np.maximum(curve, np.where(after >= 0, held[after], 0), out=curve)
    return [int(value) for value in curve]
