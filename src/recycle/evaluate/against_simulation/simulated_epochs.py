"""`recycle report --against-simulation`: the failures of a run once more, through planner and simulator.

Each epoch is played op by op with the plan that the planner makes for its dead, eagerly, as rows alone drive the runtime; the
first step with an empty pipeline. How long ops, reductions, steps and messages take is measured in the run itself, by stage and
kind, and so is by how much ops vary: on a machine with fewer cores than workers they slow each other down, which no profile made
beforehand can know. So what is predicted is what the order of things makes of these times. Pauses are predicted by the
simulator's constants.
"""

from array import array
from collections.abc import Iterable, Sequence
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
    Comparison,
    Epoch,
    EpochPace,
    RecoveryPause,
    Stretch,
    in_flight_us,
    late_recoveries,
    split_epochs,
)
from recycle.planner.failure_normalization import move_time_us
from recycle.planner.live_planner import Planner
from recycle.report.record.run_columns import RunRecord
from recycle.sim.replay.op_graph import ABSENT, KINDS, Ints, OpGraph, compile_plan
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.systems.constants import Constants, RecycleConstants

# Iterations to play, and the ops in all of them; those after are taken to be like the last of them.
_MOST_PLAYED, _MOST_OPS = 60, 2_000_000
# Bytes that a link of the measured profile carries in a µs: so many that what a reduction took is met exactly.
_FINE = 1000


def read_constants(pairs: Iterable[str]) -> RecycleConstants:
    """What a recovery takes in the simulation: the defaults, but for texts such as `recycle.detect=50ms`."""
    given = list(pairs)
    for pair in given:
        if not pair.strip().startswith("recycle."):
            raise UserError(f"{pair!r} is no constant of a recovery: write recycle.name=value, such as recycle.detect=50ms")
    return Constants.for_model(0).with_values(given).recycle


def against_simulation(run: RunRecord, plan: Plan, costs: RecycleConstants) -> Comparison:
    """Predict a run that went by `plan` at first, and hold what was measured against it."""
    problem = without_failures(plan.problem)
    source = Planner(problem, given=plan)
    epochs = split_epochs(run, problem.shape)
    if not epochs:
        raise UserError("the record holds no whole iteration, so that there is nothing to be held against a simulation")
    stretches = tuple(_stretch(epoch, source) for epoch in epochs)
    pauses = (RecoveryPause(one, _predicted_parts_us(one, _before(one, epochs), problem, costs)) for one in late_recoveries(run))
    return Comparison(stretches, tuple(pauses), in_flight_us(run))


def _stretch(epoch: Epoch, source: Planner) -> Stretch:
    plan, is_planned = plan_of(epoch, source)
    predicted = EpochPace.of(predict_us(plan, epoch))
    dead = tuple(sorted(epoch.dead(plan.problem.shape)))
    steps = epoch.iterations[0] + 1, epoch.iterations[-1] + 1
    return Stretch(*steps, dead, is_planned, predicted, EpochPace.of(epoch.times_us))


def plan_of(epoch: Epoch, source: Planner) -> tuple[Plan, bool]:
    """The plan that an epoch went by, and whether it is the planner's; else it is made of what workers did."""
    problem = source.problem
    dead = epoch.dead(problem.shape)
    moves = epoch.recovered.moves if epoch.recovered is not None else ()
    # The planner was asked before anybody moved.
    empty = dead | {_seat(move, 2) for move in moves}
    for question in dict.fromkeys((empty - {_seat(move, 0) for move in moves}, dead)):
        plan = source.answer(question).plan
        if _rows(plan) == {worker: ops for worker, ops in epoch.rows.items() if ops}:
            return plan, True
    played = replace(problem, cluster=Cluster(problem.shape, dead))
    rows = (make_row(problem.shape, worker, ((0, op) for op in ops)) for worker, ops in sorted(epoch.rows.items()))
    return Plan(played, tuple(rows), 1, Quality(1, "feasible", "as recorded", 0.0)), False


def _seat(move: str, place: int) -> Worker:
    """Where a move goes from (0), or to (2)."""
    return Worker.parse(move.partition(">")[place])


def _rows(plan: Plan) -> dict[Worker, list[Op]]:
    """What each worker of a plan does, those without any op left out."""
    return {row.worker: [slot.op for slot in plan.slots(row)] for row in plan.rows if row.kinds}


def predict_us(plan: Plan, epoch: Epoch) -> list[int]:
    """What each step of an epoch takes by this plan, from an empty pipeline on: the mean of several tries where ops vary."""
    profile = measured_profile(plan, epoch)
    timed = _unclocked(replace(plan, problem=replace(plan.problem, profile=profile)))
    num_steps = len(epoch.iterations)
    num_played = min(num_steps, max(2, min(_MOST_PLAYED, _MOST_OPS // plan.num_ops)))
    jitter = _jitter(timed, epoch)
    num_tries = -(-_MOST_PLAYED // num_played) if jitter and plan.num_ops * _MOST_PLAYED <= _MOST_OPS else 1
    tries = (Conditions(num_played, jitter, eager=True, seed=seed) for seed in range(1, num_tries + 1))
    ends = np.array([replay(timed, conditions).completions_us for conditions in tries])
    times: list[int] = np.rint(np.diff(ends, axis=1, prepend=0).mean(axis=0)).astype(np.int64).tolist()
    later = times[len(times) // 2 :]
    return times + [round(sum(later) / len(later))] * (num_steps - num_played)


def _jitter(timed: Plan, epoch: Epoch) -> float:
    """By what share of their time ops of an iteration vary, in the median; no op can take less than nothing, so 1 is the most."""
    starts, ends = _steady_spans_us(timed, epoch)
    spread = ((ends - starts) / compile_plan(timed).durations_us).std(axis=1)
    return min(1.0, float(np.median(spread)))


def _steady_spans_us(plan: Plan, epoch: Epoch) -> tuple[Ints, Ints]:
    starts, ends = epoch.spans_us(_rows(plan))
    return starts[_steady(epoch)], ends[_steady(epoch)]


def _steady(epoch: Epoch) -> slice:
    """The iterations that speak for an epoch: not the first, where there is another."""
    return slice(1 if len(epoch.whole) > 1 else 0, None)


def _unclocked(plan: Plan) -> Plan:
    """The same rows without their times, so that every stage starts as soon as it can."""
    return replace(plan, rows=tuple(replace(row, starts_us=array("q", bytes(8 * len(row)))) for row in plan.rows))


def measured_profile(plan: Plan, epoch: Epoch) -> Profile:
    """What everything took at each stage: in the mean of an iteration, and of iterations the median, the first left out.

    In the mean, because an iteration is as long as its ops add up to; and the median, because a few iterations that something
    else held up would spoil the rest.
    """
    program, num_stages = compile_plan(plan), plan.problem.shape.num_stages
    steady = _steady(epoch)
    starts, ends = _steady_spans_us(plan, epoch)
    finishes = zip(_middle(epoch.reduced_us(num_stages)[steady]), _middle(epoch.stepped_us(num_stages)[steady]), strict=True)
    lags = _lags_us(program, starts, ends)
    stages = []
    for stage, (reduce_us, optimizer_us) in enumerate(finishes):
        known = plan.problem.profile.stages[stage]
        costs = _costs_us(program, ends - starts, stage)
        finish = _finish(reduce_us, optimizer_us, plan.problem.cluster.num_live(stage))
        changed: dict[str, Any] = {**costs, **finish}
        stages.append(replace(known, **changed, output_bytes=lags[stage] if stage < len(lags) else 0))
    return replace(plan.problem.profile, stages=tuple(stages), stage_link=Link(), peer_link=Link(0, _FINE), name="as it ran")


def _costs_us(program: OpGraph, lengths: Ints, stage: int) -> dict[str, int]:
    """The costs of a stage by the names of a profile; a kind that nobody runs there costs next to nothing."""
    found = {}
    for number, kind in enumerate(KINDS):
        chosen = (program.stage_of == stage) & (program.kinds == number)
        found[kind.value] = max(1, round(float(np.median(lengths[:, chosen].mean(axis=1))))) if chosen.any() else 1
    # A whole backward contains I, says a profile; measured, it may be shorter by chance.
    fused = max(found["B"], found["I"])
    return {"forward_us": found["F"], "input_us": found["I"], "weight_us": found["W"], "fused_us": fused}


def _finish(reduce_us: int, optimizer_us: int, num_live: int) -> dict[str, int]:
    """What lets a profile say that a reduction over so many peers took so long; one worker alone has none, so it steps longer."""
    if num_live < 2 or reduce_us < 1:
        return {"gradient_bytes": 0, "optimizer_us": reduce_us + optimizer_us}
    steps = 2 * (num_live - 1)
    return {"gradient_bytes": reduce_us * num_live * _FINE // steps - 1, "optimizer_us": optimizer_us}


def _lags_us(program: OpGraph, starts: Ints, ends: Ints) -> list[int]:
    """By the lower of two stages, how long a message takes between them: the median over receivers that did nothing else.

    Where there is no such receiver, a message has the share of an op's time that the plan gives it.
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


def _before(recovered: Recovered, epochs: Sequence[Epoch]) -> Epoch | None:
    """The last epoch with a step that began before this recovery."""
    return next((epoch for epoch in reversed(epochs) if epoch.begin_us < recovered.end_us), None)


def _predicted_parts_us(one: Recovered, before: Epoch | None, problem: Problem, costs: RecycleConstants) -> dict[str, int]:
    """What a recovery takes by the constants of the simulator; `before` is the epoch that it ended."""
    notice = {} if one.joins else {"detect": costs.detect_us, "abort": costs.abort_us}
    copies = [Worker.parse(name) for name in one.workers] if one.joins else []
    copies += [_seat(move, 2) for move in one.moves]
    there = replace(problem, cluster=Cluster(problem.shape, before.dead(problem.shape))) if before is not None else problem
    transfer_us = move_time_us(there, [worker.stage for worker in copies])
    parts = {**notice, "plan": costs.plan_us, "regroup": costs.regroup_us, "transfer": transfer_us}
    is_rolled_back = before is not None and one.iteration <= before.iterations[-1]
    return parts | ({"restart": costs.restart_us} if is_rolled_back else {})
