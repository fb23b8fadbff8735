"""`recycle report --against-simulation`: predict the epochs and pauses of a recorded run with planner and simulator.

Each epoch is replayed eagerly, from an empty pipeline, by the plan that the planner makes for its dead workers. The times of ops,
reductions, steps and messages, and the variation of op times, are measured in the run itself, by stage and kind: where workers
share cores they slow each other down, which no earlier profile can know. So the prediction tests the order and the overlap of
ops, not their costs. Pauses are predicted by the simulator's constants.
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from recycle.core.cluster import Cluster, Worker
from recycle.core.errors import UserError
from recycle.core.events.record import Recovered
from recycle.core.op import Op
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan, Quality, make_row
from recycle.core.problem import Problem
from recycle.core.profile import Link, Profile
from recycle.evaluate.against_simulation.epoch_comparison import (
    Epoch,
    EpochComparison,
    PauseComparison,
    RunComparison,
    StepTimes,
    in_flight_us,
    late_recoveries,
    split_epochs,
)
from recycle.planner.failure_normalization import move_time_us
from recycle.planner.live_planner import Planner
from recycle.report.record.run_columns import RunRecord
from recycle.sim.replay.op_graph import ABSENT, KINDS, Ints, OpGraph, build_op_graph
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.systems.constants import Constants, RecycleConstants

# The most iterations, and ops in all of them, to replay; later iterations are assumed to take as long as the last ones.
_MOST_REPLAYED, _MOST_OPS = 60, 2_000_000
# The bandwidth of the measured profile's peer link in bytes/µs: high enough to express a reduction time exactly.
_FINE = 1000


def read_constants(pairs: Iterable[str]) -> RecycleConstants:
    """Return the constants of a simulated recovery: the defaults, changed by texts such as `recycle.detect=50ms`."""
    given = list(pairs)
    for pair in given:
        if not pair.strip().startswith("recycle."):
            raise UserError(f"{pair!r} is no constant of a recovery: write recycle.name=value, such as recycle.detect=50ms")
    return Constants.for_model(0).with_values(given).recycle


def against_simulation(run: RunRecord, plan: Plan, costs: RecycleConstants) -> RunComparison:
    """Predict a run that began with `plan`, and compare the measured times with the prediction."""
    problem = without_failures(plan.problem)
    source = Planner(problem, given=plan)
    epochs = split_epochs(run, problem.shape)
    if not epochs:
        raise UserError("the record holds no whole iteration, so there is nothing to compare with a simulation")
    compared = tuple(_compared(epoch, source) for epoch in epochs)
    pauses = (PauseComparison(one, _predicted_parts_us(one, epochs, problem, costs)) for one in late_recoveries(run))
    return RunComparison(compared, tuple(pauses), in_flight_us(run))


def _compared(epoch: Epoch, source: Planner) -> EpochComparison:
    plan, is_planned = plan_of(epoch, source)
    predicted = StepTimes.of(predict_us(plan, epoch))
    dead = tuple(sorted(epoch.dead(plan.problem.shape)))
    steps = epoch.iterations[0] + 1, epoch.iterations[-1] + 1
    return EpochComparison(*steps, dead, is_planned, predicted, StepTimes.of(epoch.times_us))


def plan_of(epoch: Epoch, source: Planner) -> tuple[Plan, bool]:
    """Return the plan of an epoch, and whether it is the planner's; if not, it is built from the recorded ops."""
    problem = source.problem
    dead = epoch.dead(problem.shape)
    moves = epoch.recovered.moves if epoch.recovered is not None else ()
    # The planner planned for the dead workers of the time before workers moved.
    empty = dead | {_place(move, 2) for move in moves}
    for failed in dict.fromkeys((empty - {_place(move, 0) for move in moves}, dead)):
        plan = source.answer(failed).plan
        if _rows(plan) == {worker: ops for worker, ops in epoch.rows.items() if ops}:
            return plan, True
    recorded = replace(problem, cluster=Cluster(problem.shape, dead))
    rows = (make_row(problem.shape, worker, ((0, op) for op in ops)) for worker, ops in sorted(epoch.rows.items()))
    return Plan(recorded, tuple(rows), 1, Quality(1, "feasible", "as recorded", 0.0)), False


def _place(move: str, end: int) -> Worker:
    """Return the place from which (0), or to which (2), a worker moves."""
    return Worker.parse(move.partition(">")[end])


def _rows(plan: Plan) -> dict[Worker, list[Op]]:
    """Return the ops of each worker of a plan, without workers that have none."""
    return {row.worker: [slot.op for slot in plan.slots(row)] for row in plan.rows if row.kinds}


def predict_us(plan: Plan, epoch: Epoch) -> list[int]:
    """Predict the time of each step of an epoch, from an empty pipeline on: the mean of several replays where op times vary."""
    profile = measured_profile(plan, epoch)
    timed = _unclocked(replace(plan, problem=replace(plan.problem, profile=profile)))
    num_steps = len(epoch.iterations)
    num_replayed = min(num_steps, max(2, min(_MOST_REPLAYED, _MOST_OPS // plan.num_ops)))
    jitter = _jitter(timed, epoch)
    num_replays = -(-_MOST_REPLAYED // num_replayed) if jitter and plan.num_ops * _MOST_REPLAYED <= _MOST_OPS else 1
    conditions = (Conditions(num_replayed, jitter, eager=True, seed=seed) for seed in range(1, num_replays + 1))
    ends = np.array([replay(timed, condition).completions_us for condition in conditions])
    times: list[int] = np.rint(np.diff(ends, axis=1, prepend=0).mean(axis=0)).astype(np.int64).tolist()
    later = times[len(times) // 2 :]
    return times + [round(sum(later) / len(later))] * (num_steps - num_replayed)


def _jitter(timed: Plan, epoch: Epoch) -> float:
    """The relative standard deviation of op times, the median over iterations, at most 1: no op takes less than no time."""
    starts, ends = _steady_spans_us(timed, epoch)
    spread = ((ends - starts) / build_op_graph(timed).durations_us).std(axis=1)
    return min(1.0, float(np.median(spread)))


def _steady_spans_us(plan: Plan, epoch: Epoch) -> tuple[Ints, Ints]:
    starts, ends = epoch.spans_us(_rows(plan))
    return starts[_steady(epoch)], ends[_steady(epoch)]


def _steady(epoch: Epoch) -> slice:
    """The complete iterations without the first, if there is another."""
    return slice(1 if len(epoch.complete) > 1 else 0, None)


def _unclocked(plan: Plan) -> Plan:
    """Return the plan with all start times 0, so that every stage starts as soon as it can."""
    return replace(plan, rows=tuple(replace(row, starts_us=array("q", bytes(8 * len(row)))) for row in plan.rows))


def measured_profile(plan: Plan, epoch: Epoch) -> Profile:
    """Return the measured costs of each stage: the median over iterations, without the first, of the mean in an iteration.

    The mean, because the ops of an iteration add up; the median, so that a few disturbed iterations do not matter.
    """
    program, num_stages = build_op_graph(plan), plan.problem.shape.num_stages
    steady = _steady(epoch)
    starts, ends = _steady_spans_us(plan, epoch)
    finishes = zip(_middle(epoch.reduced_us(num_stages)[steady]), _middle(epoch.stepped_us(num_stages)[steady]), strict=True)
    lags = [*_lags_us(program, starts, ends), 0]
    stages = []
    for stage, (reduce_us, optimizer_us) in enumerate(finishes):
        known = plan.problem.profile.stages[stage]
        costs = _costs_us(program, ends - starts, stage)
        finish = _finish(reduce_us, optimizer_us, plan.problem.cluster.num_live(stage))
        changed: dict[str, Any] = {**costs, **finish, "output_bytes": lags[stage]}
        stages.append(replace(known, **changed))
    return replace(plan.problem.profile, stages=tuple(stages), stage_link=Link(), peer_link=Link(0, _FINE), name="as it ran")


def _costs_us(program: OpGraph, lengths: Ints, stage: int) -> dict[str, int]:
    """Return the op costs of a stage by their names in a profile; a kind that no worker runs there costs 1 µs."""
    found = {}
    for number, kind in enumerate(KINDS):
        chosen = (program.stage_of == stage) & (program.kinds == number)
        found[kind.value] = max(1, round(float(np.median(lengths[:, chosen].mean(axis=1))))) if chosen.any() else 1
    # In a profile B takes at least as long as I; measured, it may be shorter by chance.
    fused = max(found["B"], found["I"])
    return {"forward_us": found["F"], "input_us": found["I"], "weight_us": found["W"], "fused_us": fused}


def _finish(reduce_us: int, optimizer_us: int, num_live: int) -> dict[str, int]:
    """Return the gradient size that gives this reduction time; a single worker has no reduction, so its step is longer."""
    if num_live < 2 or reduce_us < 1:
        return {"gradient_bytes": 0, "optimizer_us": reduce_us + optimizer_us}
    steps = 2 * (num_live - 1)
    return {"gradient_bytes": reduce_us * num_live * _FINE // steps - 1, "optimizer_us": optimizer_us}


def _lags_us(program: OpGraph, starts: Ints, ends: Ints) -> list[int]:
    """Return the message time between two stages, by the lower stage: the median over receivers that were idle.

    Without an idle receiver it is the planned message time, scaled like the op times.
    """
    sources = np.flatnonzero(program.targets != ABSENT)
    targets = program.targets[sources]
    has_before = ~np.isin(targets, program.bounds)
    sources, targets = sources[has_before], targets[has_before]
    is_idle = ends[:, targets - 1] <= ends[:, sources]
    waits = starts[:, targets] - ends[:, sources]
    lower = np.minimum(program.stage_of[sources], program.stage_of[targets])
    slowdown = (ends - starts).sum() / (len(starts) * program.durations_us.sum())
    found = []
    for stage in range(program.problem.shape.num_stages - 1):
        idle = waits[:, lower == stage][is_idle[:, lower == stage]]
        planned = program.problem.profile.comm_us(stage) * slowdown
        found.append(max(0, round(float(np.median(idle)) if idle.size else planned)))
    return found


def _middle(times: Ints) -> list[int]:
    """The median over iterations, by stage."""
    return [round(float(time)) for time in np.median(times, axis=0)]


def _predicted_parts_us(one: Recovered, epochs: list[Epoch], problem: Problem, costs: RecycleConstants) -> dict[str, int]:
    """Predict the parts of a recovery by the constants of the simulator."""
    notice = {} if one.joins else {"detect": costs.detect_us, "abort": costs.abort_us}
    copies = [Worker.parse(name) for name in one.workers] if one.joins else []
    copies += [_place(move, 2) for move in one.moves]
    before = next((epoch for epoch in reversed(epochs) if epoch.begin_us < one.end_us), None)  # the epoch that it ended
    cluster = Cluster(problem.shape, before.dead(problem.shape)) if before is not None else problem.cluster
    transfer_us = move_time_us(problem.profile, [worker.stage for worker in copies], cluster.num_live)
    parts = {**notice, "plan": costs.plan_us, "regroup": costs.regroup_us, "transfer": transfer_us}
    is_rolled_back = before is not None and one.iteration <= before.iterations[-1]
    return parts | ({"restart": costs.restart_us} if is_rolled_back else {})
