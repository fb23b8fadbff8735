"""`steady_period_us`: how often an iteration ends when every worker runs its row as soon as it can, at the speeds of the problem.

A plan's own period is that of its planned starts. When speeds change, the starts are wrong and the order of the rows remains:
this says what that order still yields, so that an old plan can be compared with a new one. As in the runtime, rows drive workers.
"""

from dataclasses import replace

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import lag_us

Speeds = tuple[tuple[Worker, float], ...]
"""Workers that are slower or faster than the profile says, each with its speed, as in `Problem.speeds`."""

# The first iterations are not steady yet.
_ITERATIONS, _UNSTEADY = 7, 2
_FORWARD, _BACKWARD, _ALONE = 1, -1, 0
_DIRECTIONS = {Kind.F.value: _FORWARD, Kind.I.value: _BACKWARD, Kind.B.value: _BACKWARD, Kind.W.value: _ALONE}
_Step = tuple[int, int, int, int, int]
"""An op: the number of its row, its stage, direction and chain, and its duration in µs."""


def with_speeds(plan: Plan, speeds: Speeds) -> Plan:
    """The same rows for other speeds of the plan's live workers; its starts and its period are then no longer right."""
    live = set(plan.problem.cluster.live_workers())
    kept = tuple((worker, speed) for worker, speed in speeds if worker in live)
    return replace(plan, problem=replace(plan.problem, speeds=kept))


def steady_period_us(plan: Plan) -> int:
    """Return the mean time between the ends of two iterations, after the first ones. All layers of a stage step together."""
    shape, problem = plan.problem.shape, plan.problem
    num_stages = shape.num_stages
    ends_us = {each: [[0] * shape.num_chains for _ in range(num_stages)] for each in (_FORWARD, _BACKWARD)}
    lags_us, steps = _lags_us(plan), _steps(plan)
    free_us, open_us, done_us = [0] * len(plan.rows), [0] * num_stages, list[int]()
    for _ in range(_ITERATIONS):
        last_us = [0] * num_stages
        for row, stage, direction, chain, duration_us in steps:
            start_us, before = max(free_us[row], open_us[stage]), stage - direction
            if direction and 0 <= before < num_stages:
                start_us = max(start_us, ends_us[direction][before][chain] + lags_us[direction, stage])
            free_us[row] = end_us = start_us + duration_us
            if direction:
                ends_us[direction][stage][chain] = end_us
            last_us[stage] = max(last_us[stage], end_us)
        reduced_us = [last + problem.reduce_us(stage) for stage, last in enumerate(last_us)]
        step_us = [problem.optimizer_us(stage) for stage in range(num_stages)]
        if problem.techniques.staggered:
            open_us = [reduced + step for reduced, step in zip(reduced_us, step_us, strict=True)]
        else:
            open_us = [max(reduced_us) + max(step_us)] * num_stages
        done_us.append(max(open_us))
    return round((done_us[-1] - done_us[_UNSTEADY - 1]) / (_ITERATIONS - _UNSTEADY))


def _lags_us(plan: Plan) -> dict[tuple[int, int], int]:
    """By direction and stage, the time of the message that an op there waits for."""
    found, num_stages, first = {}, plan.problem.shape.num_stages, MicroBatch(0, 0)
    for direction, kind in ((_FORWARD, Kind.F), (_BACKWARD, Kind.I)):
        for stage in range(num_stages):
            if 0 <= stage - direction < num_stages:
                found[direction, stage] = lag_us(Op(stage - direction, kind, first), Op(stage, kind, first), plan.problem)
    return found


def _steps(plan: Plan) -> list[_Step]:
    """All ops of an iteration, each behind those that it needs: in the order of their planned starts, which a legal plan has."""
    costs, timed = plan.costs, []
    for number, row in enumerate(plan.rows):
        stage, durations_us = row.worker.stage, costs.durations_us(row.worker, row.kinds, row.chains)
        for kind, chain, start_us, duration_us in zip(row.kinds, row.chains, row.starts_us, durations_us, strict=True):
            direction = _DIRECTIONS[kind]
            timed.append((start_us, stage * direction, (number, stage, direction, chain, duration_us)))
    timed.sort(key=lambda each: each[:2])  # stable: a row keeps its order
    return [step for _, _, step in timed]
