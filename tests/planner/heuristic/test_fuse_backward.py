"""Decoupled BackProp only where it pays: no split without a reason, and never a loss against whole backward passes."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings

import recycle
from recycle import Plan, Problem
from recycle.core.op import Kind, MicroBatch
from recycle.core.plans.plan import Slot
from recycle.core.profile import StageProfile
from tests.planner.strategies import problems

QUICK = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
LIMIT_S = 0.5
LITTLE = 20_000


def decoupled(problem: Problem, extra_us: int | None = None) -> Problem:
    """The problem with split backward passes allowed, a fused one taking I + W + `extra_us` (at least I) if that is given."""
    profile = problem.profile
    if extra_us is not None:
        profile = replace(profile, stages=tuple(_with_fused(stage, extra_us) for stage in profile.stages))
    return replace(problem, profile=profile, techniques=replace(problem.techniques, decoupled=True))


def _with_fused(stage: StageProfile, extra_us: int) -> StageProfile:
    return replace(stage, fused_us=max(stage.input_us, stage.input_us + stage.weight_us + extra_us))


def whole(problem: Problem) -> Problem:
    return replace(problem, techniques=replace(problem.techniques, decoupled=False))


def needless_splits(plan: Plan) -> list[Slot]:
    """Every W that starts when its I ends, while the stage before would have got the gradient in time from a B too."""
    slots: dict[tuple[int, MicroBatch, Kind], Slot] = {
        (slot.op.stage, slot.op.microbatch, slot.op.kind): slot for slot in plan.all_slots()
    }
    found = []
    for (stage, microbatch, kind), weight in slots.items():
        if kind is not Kind.W or weight.start_us != slots[stage, microbatch, Kind.I].end_us:
            continue
        waiting = [slots[key] for kind in (Kind.I, Kind.B) if (key := (stage - 1, microbatch, kind)) in slots]
        if all(weight.end_us + plan.problem.profile.comm_us(stage - 1) <= slot.start_us for slot in waiting):
            found.append(weight)
    return found


@pytest.mark.parametrize("method", ["greedy", "cpsat"])
@QUICK
@given(problem=problems())
def test_where_fusing_costs_nothing_every_split_is_there_for_a_reason(method: str, problem: Problem) -> None:
    plan = recycle.solve(decoupled(problem, extra_us=0), method, LIMIT_S, LITTLE)
    event(f"splits: {any('W' in row.kinds for row in plan.rows)}, whole: {any('B' in row.kinds for row in plan.rows)}")
    assert needless_splits(plan) == []


def test_the_worked_example_splits_only_where_somebody_waits_or_a_bubble_is_filled() -> None:
    plan = recycle.solve(recycle.problem(3, 4, 6, fail="W1_2", costs=(1, 1, 1), memory=6))
    assert plan.period_us == 27
    assert needless_splits(plan) == []


@QUICK
@given(problem=problems())
def test_where_splitting_costs_time_it_is_never_worse_than_not_splitting(problem: Problem) -> None:
    cheap = decoupled(problem, extra_us=-1)
    chosen, fused = (recycle.solve(either, "greedy", effort=LITTLE) for either in (cheap, whole(cheap)))
    assert chosen.period_us <= fused.period_us


@pytest.mark.parametrize("method", ["greedy", "cpsat", "milp"])
@QUICK
@given(problem=problems())
def test_where_fusing_costs_time_no_backward_pass_is_whole(method: str, problem: Problem) -> None:
    plan = recycle.solve(decoupled(problem, extra_us=1), method, LIMIT_S, LITTLE)
    assert not any("B" in row.kinds for row in plan.rows)


@QUICK
@given(problem=problems())
def test_with_every_stage_as_it_likes_proven_optima_gain_from_the_choice(problem: Problem) -> None:
    free = decoupled(problem)
    chosen, fused = recycle.solve(free, "auto", LIMIT_S, LITTLE), recycle.solve(whole(free), "auto", LIMIT_S, LITTLE)
    event(f"proven: {chosen.quality.status == fused.quality.status == 'optimal'}")
    assert chosen.quality.bound_us <= fused.period_us
    if chosen.quality.status == "optimal":
        assert chosen.period_us <= fused.period_us
