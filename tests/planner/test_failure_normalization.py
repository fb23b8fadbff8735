"""Failure Normalization: the best distribution of a number of failures, and the fewest moves that lead to it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.plans.plan_source import places_for
from recycle.core.problem import Problem
from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.failure_normalization import (
    Distribution,
    best_distribution,
    decide_move,
    distributions,
    most_failures,
    move_time_us,
    normalized_problem,
)
from recycle.planner.live_planner import nearest
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.strategies import failures, problems

QUICK = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
wide_shapes = st.builds(Shape, st.integers(1, 5), st.integers(1, 5), st.just(2))


@st.composite
def alive(draw: st.DrawFn) -> Problem:
    """A problem whose failures are still to be chosen, and whose stages reduce their gradients in no time.

    A reduction over fewer peers is shorter, so with it a failure may also win time; that is left out of the choice.
    """
    problem = draw(problems())
    stages = tuple(replace(stage, gradient_bytes=0) for stage in problem.profile.stages)
    return replace(
        problem,
        cluster=Cluster(problem.shape),
        profile=replace(problem.profile, stages=stages, peer_link=Link()),
        techniques=replace(problem.techniques, adaptive=True),
    )


def every_distribution(shape: Shape, num_failures: int) -> list[Distribution]:
    everywhere = product(range(shape.num_pipelines), repeat=shape.num_stages)
    return [distribution for distribution in everywhere if sum(distribution) == num_failures]


def bound_us(problem: Problem, distribution: Distribution) -> int:
    """The bound of a cluster with that many dead workers at each stage, whichever they are."""
    dead = frozenset(Worker(pipeline, stage) for stage, num in enumerate(distribution) for pipeline in range(num))
    return lower_bound(replace(problem, cluster=Cluster(problem.shape, dead)))


@QUICK
@given(alive(), st.data())
def test_the_best_distribution_has_the_least_bound_of_all(problem: Problem, data: st.DataObject) -> None:
    num_failures = data.draw(st.integers(0, most_failures(problem.shape)))
    best = best_distribution(problem, num_failures)
    assert best in every_distribution(problem.shape, num_failures)
    assert bound_us(problem, best) == min(bound_us(problem, other) for other in every_distribution(problem.shape, num_failures))


@QUICK
@given(alive(), st.data())
def test_every_distribution_comes_once_and_bounds_never_fall(problem: Problem, data: st.DataObject) -> None:
    num_failures = data.draw(st.integers(0, most_failures(problem.shape)))
    found = list(distributions(problem, num_failures))
    assert Counter(found) == Counter(every_distribution(problem.shape, num_failures))
    assert found[0] == best_distribution(problem, num_failures)
    assert all(bound_us(problem, one) <= bound_us(problem, other) for one, other in pairwise(found))


def test_failures_go_where_memory_and_time_are_spare() -> None:
    """A synchronous optimizer waits for the way to a stage and back, so that the first stage suffers least."""
    problem = recycle.problem(3, 4, 6, costs=(1, 1, 1), techniques="adaptive,decoupled")
    assert best_distribution(problem, 1) == (1, 0, 0, 0)
    assert best_distribution(problem, 8) == (2, 2, 2, 2)


def test_a_stage_with_little_work_takes_the_failures() -> None:
    heavy, light = StageProfile(9, 9, 9, 18), StageProfile(1, 1, 1, 2)
    problem = Problem(Cluster(Shape(4, 3, 4)), Profile((heavy, light, heavy)))
    assert best_distribution(problem, 3) == (0, 3, 0)


def test_the_first_of_thousands_of_workers_is_found_at_once() -> None:
    problem = recycle.problem(64, 32, 64, costs=(10, 13, 9), comm=1, memory=64)
    assert sum(best_distribution(problem, 200)) == 200


@settings(QUICK, max_examples=20)
@given(problem=alive(), data=st.data())
def test_a_small_problem_gets_the_best_plan_of_all_distributions(problem: Problem, data: st.DataObject) -> None:
    tiny = replace(problem, cluster=Cluster(replace(problem.shape, num_microbatches=min(2, problem.shape.num_microbatches))))
    num_failures = data.draw(st.integers(0, min(3, most_failures(tiny.shape))))
    effort = 2_000_000  # enough to plan for every distribution of so few workers
    plan, distribution = recycle.solve_normalized(tiny, num_failures, "greedy", effort=effort)
    periods = {
        other: recycle.solve(normalized_problem(tiny, other), "greedy", effort=effort).period_us
        for other in every_distribution(tiny.shape, num_failures)
    }
    event(f"{len(periods)} distributions, periods differ: {len(set(periods.values())) > 1}")
    assert plan.period_us == periods[distribution] == min(periods.values())
    assert plan.problem.cluster.num_failed == distribution


def test_with_little_effort_one_promising_distribution_is_planned_for() -> None:
    problem = recycle.problem(8, 8, 16, costs=(10, 13, 9), comm=1, memory=12)
    plan, distribution = recycle.solve_normalized(problem, 5, "greedy", effort=1)
    assert sum(distribution) == 5
    assert plan.problem.cluster.num_failed == distribution
    assert plan.gap <= 1.2


@pytest.mark.parametrize("num_failures", [-1, 9, 10**6])
def test_more_failures_than_can_be_survived_are_refused_with_the_most_that_can(num_failures: int) -> None:
    problem = recycle.problem(3, 4, 6, costs=(1, 1, 1))
    for ask in (best_distribution, recycle.solve_normalized, lambda *given: next(distributions(*given))):
        with pytest.raises(UserError, match=rf"{num_failures} failures cannot be planned for: between 0 and 8 workers"):
            ask(problem, num_failures)


@st.composite
def real_and_planned(draw: st.DrawFn) -> tuple[Cluster, Distribution]:
    """A real failure set, and as many failures planned somewhere else."""
    shape = draw(wide_shapes)
    real = Cluster(shape, draw(failures(shape)))
    left = len(real.failed)
    planned = []
    for stage in range(shape.num_stages):
        room_after = (shape.num_stages - stage - 1) * (shape.num_pipelines - 1)
        planned.append(draw(st.integers(max(0, left - room_after), min(left, shape.num_pipelines - 1))))
        left -= planned[-1]
    return real, tuple(planned)


def places(real: Cluster, planned: Distribution) -> dict[Worker, Worker]:
    """The live worker that runs each row of a plan with this distribution, by its present place."""
    return places_for(nearest(real.shape, real.failed, planned), real.failed)


@QUICK
@given(real_and_planned())
def test_after_the_fewest_moves_every_stage_has_the_workers_that_the_plan_has(case: tuple[Cluster, Distribution]) -> None:
    real, planned = case
    found = places(real, planned)
    holds = Counter(row.stage for row in found)
    num_pipelines = real.shape.num_pipelines
    assert [holds[stage] for stage in range(real.shape.num_stages)] == [num_pipelines - num for num in planned]
    changes = [now for row, now in found.items() if now.stage != row.stage]
    assert len(changes) == sum(max(0, dead - num) for dead, num in zip(real.num_failed, planned, strict=True))


@QUICK
@given(real_and_planned())
def test_every_row_is_run_by_one_live_worker(case: tuple[Cluster, Distribution]) -> None:
    real, planned = case
    found = places(real, planned)
    assert sorted(found.values()) == real.live_workers()


@QUICK
@given(real_and_planned())
def test_a_worker_that_stays_at_its_stage_keeps_its_place(case: tuple[Cluster, Distribution]) -> None:
    real, planned = case
    assert all(now == row or now.stage != row.stage for row, now in places(real, planned).items())


def test_a_failure_that_is_where_the_plan_has_it_moves_nobody() -> None:
    real = Cluster(Shape(3, 4, 6), frozenset({Worker(2, 1), Worker(2, 2)}))
    assert places(real, (0, 1, 1, 0)) == {worker: worker for worker in real.live_workers()}


def test_a_failure_at_another_stage_moves_one_worker_whose_row_nobody_runs() -> None:
    found = places(Cluster(Shape(3, 4, 6), frozenset({Worker(0, 3)})), (1, 0, 0, 0))
    assert [(str(now), str(row)) for row, now in found.items() if now != row] == [("W2_0", "W0_3")]


def test_a_plan_for_another_number_of_failures_is_refused() -> None:
    with pytest.raises(AssertionError, match="a plan for 2 dead cannot be run with 1 dead"):
        places(Cluster(Shape(3, 2, 2), frozenset({Worker(0, 0)})), (1, 1))


def test_moving_pays_if_it_saves_more_than_it_takes() -> None:
    decision = decide_move(as_is_us=30_000, normalized_us=27_000, move_us=2_000_000, num_iterations=1_000)
    assert decision.moves
    assert decision.reason == "moving takes 2.000 s and saves 3.000 s over 1000 iterations"


def test_moving_does_not_pay_if_the_next_failure_comes_too_soon() -> None:
    decision = decide_move(as_is_us=30_000, normalized_us=27_000, move_us=2_000_000, num_iterations=100)
    assert not decision.moves
    assert decision.reason == "moving takes 2.000 s, but saves only 300.00 ms over 100 iterations"
    assert not decide_move(30_000, 27_000, move_us=3_000_000, num_iterations=1_000).moves


def test_moving_never_pays_if_the_failures_as_they_are_cost_no_more() -> None:
    decision = decide_move(as_is_us=27_000, normalized_us=27_000, move_us=0, num_iterations=10**9)
    assert not decision.moves
    assert decision.reason == "the failures as they are cost no more than the normalised ones: 27.00 ms an iteration"


def test_workers_copy_side_by_side_but_two_from_one_peer_in_turn() -> None:
    stage = StageProfile(1, 1, 1, 2, static_bytes=1_000)
    profile = Profile((stage, stage, stage), peer_link=Link(latency_us=5, bytes_per_us=10.0))
    shape = Shape(3, 3, 2)
    one_each = Problem(Cluster(shape, frozenset({Worker(0, 1), Worker(0, 2)})), profile)
    assert move_time_us(one_each.profile, [1, 2], one_each.cluster.num_live) == 105
    both_at_one = Problem(Cluster(shape, frozenset({Worker(0, 2), Worker(1, 2)})), profile)
    assert move_time_us(both_at_one.profile, [2, 2], both_at_one.cluster.num_live) == 2 * 105
    assert move_time_us(both_at_one.profile, [], both_at_one.cluster.num_live) == 0
