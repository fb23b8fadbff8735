"""What an iteration is expected to take: the plan's period where nothing is uneven, and more for each thing that is."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from recycle.core.plans.plan import Plan
from recycle.core.profile import Link, Profile
from recycle.sim.replay.expected_iteration import contention_factors, expected_iteration
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.replay.replay_result import ReplayResult
from tests.plans import costly_profile, make_1f1b_plan, make_split_plan
from tests.random_plans import legal_plans

pytestmark = pytest.mark.timeout(120)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
PLAN = make_1f1b_plan(2, 3, 4, profile=costly_profile(3))


def with_profile(plan: Plan, **changes: object) -> Plan:
    return replace(plan, problem=replace(plan.problem, profile=replace(plan.problem.profile, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [make_1f1b_plan(), make_split_plan(), make_1f1b_plan(profile=costly_profile(4))])
def test_where_all_are_alike_and_alone_an_iteration_takes_the_plans_period(plan: Plan) -> None:
    found = expected_iteration(plan)
    assert found.links_us == found.contended_us == found.uneven_us == plan.period_us


def test_free_links_leave_the_time_of_ops() -> None:
    # 1F1B: M + S - 1 times F and B, then reduction and step. Even a free message takes 1 µs, and some of them are waited for;
    # with links, at least the S - 1 messages there and back are.
    stage = PLAN.problem.profile.stages[0]
    found, ends = expected_iteration(PLAN), PLAN.problem.profile.reduce_us(0, 2) + stage.optimizer_us
    by_hand_us = (4 + 3 - 1) * (stage.forward_us + stage.fused_us) + ends
    assert by_hand_us <= found.ops_us <= by_hand_us + 2 * (4 + 3 - 1)
    assert found.links_us >= found.ops_us + 2 * 2 * PLAN.problem.profile.comm_us(0) - 2 * 2


@QUICK
@given(plan=legal_plans())
def test_free_links_are_never_slower(plan: Plan) -> None:
    found = expected_iteration(with_profile(plan, stage_link=Link(50, 1.0)))
    assert found.ops_us <= found.links_us


def test_slower_workers_cost_time_and_one_that_is_always_slow_costs_all_of_it() -> None:
    even, uneven = expected_iteration(PLAN), expected_iteration(with_profile(PLAN, factors=(1.0, 1.0, 1.4)))
    assert uneven.contended_us == even.contended_us
    assert uneven.uneven_us > 1.05 * even.uneven_us
    free = with_profile(PLAN, stage_link=Link(bytes_per_us=1e9), peer_link=Link(bytes_per_us=1e9))
    all_slow = expected_iteration(with_profile(free, factors=(2.0,)))
    step_us = free.problem.profile.stages[0].optimizer_us  # takes no longer
    assert all_slow.uneven_us - step_us == pytest.approx(2 * (all_slow.contended_us - step_us), rel=0.001)


def test_the_same_seed_draws_the_same_workers() -> None:
    uneven = with_profile(PLAN, factors=(0.9, 1.0, 1.1, 1.4))
    assert expected_iteration(uneven, seed=3) == expected_iteration(uneven, seed=3)


def test_equal_contention_of_all_ops_lengthens_ops_and_nothing_else() -> None:
    free = with_profile(PLAN, stage_link=Link(bytes_per_us=1e9), peer_link=Link(bytes_per_us=1e9))
    found, step_us = expected_iteration(with_profile(free, contention=(1.5,))), free.problem.profile.stages[0].optimizer_us
    assert found.contended_us - step_us == pytest.approx(1.5 * (found.links_us - step_us), rel=0.0005)


def test_only_workers_that_compute_at_the_same_moment_contend() -> None:
    # In one pipeline with one micro-batch no two workers compute at the same time.
    lone = make_1f1b_plan(1, 3, 1, profile=costly_profile(3))
    found = expected_iteration(with_profile(lone, contention=(1.0, 5.0, 9.0)))
    assert found.contended_us == found.links_us
    # In two of them both do the same at the same time.
    both = make_1f1b_plan(2, 3, 1, profile=costly_profile(3))
    assert (
        expected_iteration(with_profile(both, contention=(1.0, 2.0, 9.0))).contended_us > 1.5 * expected_iteration(both).links_us
    )


def slow_contention_factors(result: ReplayResult, profile: Profile) -> list[float]:
    """The same, by counting the busy workers in every microsecond of every op."""
    stages = [row.worker.stage for row in result.plan.rows]
    ops = list(zip(result.starts_us.ravel().tolist(), result.ends_us.ravel().tolist(), strict=True))
    finishes = [
        (int(starts[iteration, stage]), int(ends[iteration, stage]))
        for starts, ends in ((result.reduce_starts_us, result.reduce_ends_us), (result.step_starts_us, result.step_ends_us))
        for iteration in range(result.num_iterations)
        for stage in stages
    ]
    busy = [*ops, *finishes]

    def level(at: int) -> float:
        return profile.held_up(sum(start <= at < end for start, end in busy) - 1)

    return [sum(map(level, range(start, end))) / (end - start) for start, end in ops]


@QUICK
@given(plan=legal_plans())
def test_contention_factors_agree_with_a_count_by_microsecond(plan: Plan) -> None:
    contended = with_profile(plan, contention=(0.9, 1.0, 1.3, 1.4))
    result = replay(contended, Conditions(2, eager=True))
    if max(result.completions_us) > 400:
        return
    by_hand = slow_contention_factors(result, contended.problem.profile)
    assert contention_factors(result, contended.problem.profile).ravel().tolist() == pytest.approx(by_hand)
