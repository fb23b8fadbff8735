"""Whole layers at other stages: the distributions against brute force, the transfer, and when the planner chooses it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.layer_sums import LayerSums, with_layer_counts
from recycle.core.layers import StageLayers
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan_source import LayerMovingSource, PlanAssignment, RunLayers
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.live_planner import Planner
from recycle.planner.whole_layers import layer_transfer_us, near_distributions
from tests.builders import dead

pytestmark = pytest.mark.timeout(120)
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def job(
    shape: tuple[int, int, int] = (3, 4, 6), layers: int = 24, shared: int = 0, state_bytes: int = 24_000, speed: float = 1.0
) -> Problem:
    """A job of equal stages of 1, 1.3 and 0.9 ms, whose stages have so many bytes of state; links carry `speed` bytes per µs."""
    stage = StageProfile(1000, 1300, 900, 2200, static_bytes=state_bytes)
    profile = Profile((stage,) * shape[1], peer_link=Link(0, speed)).with_equal_layers(layers)
    return Problem(Cluster(Shape(*shape)), profile, shared_layers=shared)


def answer(
    problem: Problem, failed: frozenset[Worker], mean_time_s: float | None, counts: tuple[int, ...] = ()
) -> PlanAssignment:
    planner = Planner(problem, mean_time_s=mean_time_s)
    assert isinstance(planner, LayerMovingSource)
    return planner.at_layers(RunLayers(counts or problem.layer_counts)).answer(failed)


@st.composite
def uneven_jobs(draw: st.DrawFn) -> Problem:
    """A small job with unequal layers, some dead workers and speeds."""
    shape = Shape(draw(st.integers(2, 3)), draw(st.integers(2, 4)), 2)
    random = Random(draw(st.integers(0, 10**6)))
    counts = [random.randint(1, 3) for _ in range(shape.num_stages)]
    layers = tuple(
        tuple(LayerShare(*(random.choice([0.5, 1.0, 3.0]) for _ in range(5))) for _ in range(count)) for count in counts
    )
    stages = tuple(StageProfile(*(random.randint(30, 90) for _ in range(3)), 200, static_bytes=999) for _ in counts)
    failed = frozenset(Worker(random.randrange(shape.num_pipelines), stage) for stage in random.sample(range(len(counts)), 1))
    speeds = tuple(
        (Worker(0, stage), random.choice([0.5, 1.0])) for stage in range(len(counts)) if Worker(0, stage) not in failed
    )
    return Problem(Cluster(shape, failed), Profile(stages, layers=layers), speeds=speeds, shared_layers=draw(st.integers(0, 1)))


def all_distributions(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(after - before for before, after in pairwise((0, *cuts, num_layers)))


def highest_load(problem: Problem, counts: tuple[int, ...]) -> float:
    """The work of the most loaded stage over the speed of its live workers, added up by hand."""
    sums, speeds = LayerSums(problem.profile), dict(problem.speeds)
    loads = []
    for stage, (start, stop) in enumerate(pairwise((0, *accumulate(counts)))):
        work = 0
        for layer in range(start, stop):
            forward, split, weight, fused = (
                sums.total(name, range(layer, layer + 1)) for name in ("forward_us", "input_us", "weight_us", "fused_us")
            )
            work += forward + min(split + weight, fused)
        live = [Worker(pipeline, stage) for pipeline in problem.cluster.live_pipelines(stage)]
        loads.append(work / sum(speeds.get(worker, 1.0) for worker in live))
    return max(loads)


def moved_bytes(problem: Problem, counts: tuple[int, ...]) -> int:
    """The bytes that all live workers receive, each layer one byte more than its state."""
    old, new = problem.stage_layers, StageLayers(counts, problem.shared_layers)
    assert old is not None
    sums = LayerSums(problem.profile)
    return sum(
        problem.cluster.num_live(stage) * (1 + sums.total("static_bytes", range(layer, layer + 1)))
        for stage in range(len(counts))
        for layer in new.held(stage)
        if layer not in old.held(stage)
    )


@QUICK
@given(uneven_jobs())
def test_no_distribution_has_a_lower_highest_load_and_of_those_none_moves_less(problem: Problem) -> None:
    first, *others = near_distributions(problem)
    every = list(all_distributions(sum(problem.layer_counts), problem.shape.num_stages))
    least = min(highest_load(problem, counts) for counts in every)
    assert highest_load(problem, first) == pytest.approx(least)
    equal = [counts for counts in every if highest_load(problem, counts) <= least * (1 + 1e-9)]
    assert moved_bytes(problem, first) == min(moved_bytes(problem, counts) for counts in equal)
    for counts, slack in zip(others, (0.02, 0.05, 0.1), strict=True):
        allowed = [each for each in every if highest_load(problem, each) <= least * (1 + slack) * (1 + 1e-9)]
        assert moved_bytes(problem, counts) == min(moved_bytes(problem, each) for each in allowed)


@QUICK
@given(uneven_jobs(), st.integers(0, 10**6))
def test_a_model_costs_the_same_however_its_layers_are_distributed(problem: Problem, seed: int) -> None:
    every = list(all_distributions(sum(problem.layer_counts), problem.shape.num_stages))
    counts = Random(seed).choice(every)
    before, after = LayerSums(problem.profile), LayerSums(with_layer_counts(problem.profile, counts))
    for name in ("forward_us", "input_us", "weight_us", "static_bytes"):
        assert after.sums[name] == pytest.approx(before.sums[name], abs=2)
    assert [after.sums["fused_us"][bound] for bound in after.bounds] == [before.sums["fused_us"][bound] for bound in after.bounds]
    back = with_layer_counts(with_layer_counts(problem.profile, counts), problem.layer_counts)
    assert [stage.forward_us for stage in back.stages] == [stage.forward_us for stage in problem.profile.stages]


def test_layers_that_are_too_many_or_at_no_stage_are_refused() -> None:
    for counts in ((6, 6, 6, 7), (24, 0, 0, 0), (12, 12)):
        with pytest.raises(UserError, match="24 layers at 4 stages cannot be"):
            with_layer_counts(job().profile, counts)


def test_a_dead_worker_makes_layers_leave_its_stage_if_failures_are_rare() -> None:
    found = answer(job(), dead("W1_2"), 3600)
    assert found.plan.problem.layer_counts[2] < 6
    assert found.moves == ()
    assert check(found.plan) == []
    assert without_failures(found.plan.problem) == replace(
        job(), profile=with_layer_counts(job().profile, found.plan.problem.layer_counts)
    )
    staying = Planner(job()).answer(dead("W1_2")).plan
    assert found.plan.period_us < 0.9 * staying.period_us
    assert "whole layers move, so that stages have" in found.reason
    assert "until the next failure" in found.reason


def test_the_choice_depends_on_the_time_until_the_next_failure_and_on_the_links() -> None:
    # A layer has 4,000 bytes, which take 4 ms at one byte a µs, and an iteration about 25 ms.
    assert answer(job(speed=1e-3), dead("W1_2"), 1).plan.problem.layer_counts == (6, 6, 6, 6)
    assert answer(job(speed=1e-3), dead("W1_2"), 3600).plan.problem.layer_counts != (6, 6, 6, 6)
    assert answer(job(speed=1.0), dead("W1_2"), 1).plan.problem.layer_counts != (6, 6, 6, 6)
    nearer = answer(job(speed=1e-2), dead("W1_2"), 5).plan.problem
    farther = answer(job(speed=1e-2), dead("W1_2"), 3600).plan.problem
    assert layer_transfer_us(job(speed=1e-2), nearer.layer_counts) < layer_transfer_us(job(speed=1e-2), farther.layer_counts)


def test_without_a_mean_time_the_expected_iterations_count() -> None:
    planner = Planner(job(speed=1e-3), expected_iterations=10).at_layers(RunLayers((6, 6, 6, 6)))
    assert planner.answer(dead("W1_2")).plan.problem.layer_counts == (6, 6, 6, 6)
    assert planner.at_layers(RunLayers((6, 6, 6, 6), 3_600_000_000)).answer(dead("W1_2")).plan.problem.layer_counts[2] < 6


def test_the_mean_time_that_a_user_gives_counts_more_than_that_of_the_run() -> None:
    planner = Planner(job(speed=1e-3), mean_time_s=1).at_layers(RunLayers((6, 6, 6, 6), 3_600_000_000))
    assert planner.answer(dead("W1_2")).plan.problem.layer_counts == (6, 6, 6, 6)


def test_layers_stay_where_nothing_is_gained() -> None:
    for failed in ("", "W0_0,W0_1,W0_2,W0_3"):
        workers = dead(*failed.split(",")) if failed else frozenset()
        assert answer(job(), workers, 3600).plan.problem.layer_counts == (6, 6, 6, 6)


def test_layers_come_back_when_the_worker_does() -> None:
    moved = answer(job(), dead("W1_2"), 3600).plan.problem.layer_counts
    assert answer(job(), frozenset(), 3600, moved).plan.problem.layer_counts == (6, 6, 6, 6)
    assert answer(job(speed=1e-6), frozenset(), 3600, moved).plan.problem.layer_counts == moved


def test_cuts_leave_little_to_whole_layers() -> None:
    found = answer(job(shared=2), dead("W1_2"), 3600)
    assert found.plan.problem.layer_counts == (6, 6, 6, 6)
    assert found.plan.period_us <= answer(job(), dead("W1_2"), 3600).plan.period_us


def test_with_cuts_of_one_layer_whole_layers_can_move_too() -> None:
    problem = job((4, 4, 8), 32, shared=1)
    failed = dead("W0_1", "W1_1", "W2_1")
    found = answer(problem, failed, 3600)
    assert check(found.plan) == []
    assert found.plan.problem.layer_counts[1] < 8
    assert found.plan.period_us < Planner(problem).answer(failed).plan.period_us


def test_a_planner_that_may_not_move_moves_no_layers_and_one_that_was_not_told_of_them_neither() -> None:
    stuck = Planner(job(), may_move=False, mean_time_s=3600).at_layers(RunLayers((6, 6, 6, 6)))
    for planner in (stuck, Planner(job(), mean_time_s=3600)):
        assert planner.answer(dead("W1_2")).plan.problem.layer_counts == (6, 6, 6, 6)


def test_a_stage_without_a_worker_is_filled_first() -> None:
    found = answer(job(), dead("W0_2", "W1_2", "W2_2"), 3600)
    assert found.plan.problem.layer_counts == (6, 6, 6, 6)
    assert len(found.copies) == 1


def test_memory_that_other_layers_do_not_fit_into_keeps_them_where_they_are() -> None:
    roomy, tight = (replace(job(), memory=recycle.Memory.bytes([24_000 + more] * 4)) for more in (24_000, 2_000))
    assert answer(roomy, dead("W1_2"), 3600).plan.problem.layer_counts[2] < 6
    assert answer(tight, dead("W1_2"), 3600).plan.problem.layer_counts == (6, 6, 6, 6)


def test_the_transfer_takes_as_long_as_the_busiest_worker_sends_or_receives() -> None:
    problem = replace(job(), cluster=Cluster(Shape(3, 4, 6), dead("W0_2", "W1_2")))
    # One layer, 4,000 bytes, from the only worker of the third stage to three of the second one; and then from three to one.
    assert layer_transfer_us(problem, (6, 7, 5, 6)) == 12_000
    assert layer_transfer_us(problem, (6, 5, 7, 6)) == 4_000
    assert layer_transfer_us(problem, (6, 6, 6, 6)) == 0


def test_no_mean_time_that_is_not_above_zero() -> None:
    with pytest.raises(UserError, match="the mean time between failures is 0 s, but"):
        Planner(job(), mean_time_s=0)
