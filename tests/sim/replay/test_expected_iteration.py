"""What an iteration is expected to take: the plan's period where nothing is uneven, and more for each thing that is."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from recycle.core.plans.plan import Plan
from recycle.core.profile import Link, Profile
from recycle.sim.replay.expected_iteration import expected, held_up
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.replay.replay_result import Replay
from tests.plans import costly_profile, make_1f1b_plan, make_split_plan
from tests.random_plans import legal_plans

pytestmark = pytest.mark.timeout(120)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
PLAN = make_1f1b_plan(2, 3, 4, profile=costly_profile(3))


def with_profile(plan: Plan, **changes: object) -> Plan:
    return replace(plan, problem=replace(plan.problem, profile=replace(plan.problem.profile, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", [make_1f1b_plan(), make_split_plan(), make_1f1b_plan(profile=costly_profile(4))])
def test_where_all_are_alike_and_alone_an_iteration_takes_the_plans_period(plan: Plan) -> None:
    found = expected(plan)
    assert found.links_us == found.crowded_us == found.uneven_us == plan.period_us


def test_free_links_leave_the_time_of_ops() -> None:
    # 1F1B: M + S - 1 times F and B, then reduction and step. Even a free message takes 1 µs, and some of them are waited for;
    # with links, at least the S - 1 messages there and back are.
    stage = PLAN.problem.profile.stages[0]
    found, ends = expected(PLAN), PLAN.problem.profile.reduce_us(0, 2) + stage.optimizer_us
    by_hand_us = (4 + 3 - 1) * (stage.forward_us + stage.fused_us) + ends
    assert by_hand_us <= found.ops_us <= by_hand_us + 2 * (4 + 3 - 1)
    assert found.links_us >= found.ops_us + 2 * 2 * PLAN.problem.profile.comm_us(0) - 2 * 2


@QUICK
@given(plan=legal_plans())
def test_free_links_are_never_slower(plan: Plan) -> None:
    found = expected(with_profile(plan, stage_link=Link(50, 1.0)))
    assert found.ops_us <= found.links_us


def test_slower_workers_cost_time_and_one_that_is_always_slow_costs_all_of_it() -> None:
    even, uneven = expected(PLAN), expected(with_profile(PLAN, factors=(1.0, 1.0, 1.4)))
    assert uneven.crowded_us == even.crowded_us
    assert uneven.uneven_us > 1.05 * even.uneven_us
    free = with_profile(PLAN, stage_link=Link(bytes_per_us=1e9), peer_link=Link(bytes_per_us=1e9))
    all_slow = expected(with_profile(free, factors=(2.0,)))
    step_us = free.problem.profile.stages[0].optimizer_us  # takes no longer
    assert all_slow.uneven_us - step_us == pytest.approx(2 * (all_slow.crowded_us - step_us), rel=0.001)


def test_the_same_seed_draws_the_same_workers() -> None:
    uneven = with_profile(PLAN, factors=(0.9, 1.0, 1.1, 1.4))
    assert expected(uneven, seed=3) == expected(uneven, seed=3)


def test_where_everybody_is_held_up_alike_ops_take_longer_and_nothing_else_does() -> None:
    free = with_profile(PLAN, stage_link=Link(bytes_per_us=1e9), peer_link=Link(bytes_per_us=1e9))
    found, step_us = expected(with_profile(free, contention=(1.5,))), free.problem.profile.stages[0].optimizer_us
    assert found.crowded_us - step_us == pytest.approx(1.5 * (found.links_us - step_us), rel=0.0005)


def test_only_the_crowd_of_the_moment_holds_up() -> None:
    # In one pipeline with one micro-batch nobody ever computes beside another.
    lone = make_1f1b_plan(1, 3, 1, profile=costly_profile(3))
    found = expected(with_profile(lone, contention=(1.0, 5.0, 9.0)))
    assert found.crowded_us == found.links_us
    # In two of them both do the same at the same time.
    both = make_1f1b_plan(2, 3, 1, profile=costly_profile(3))
    assert expected(with_profile(both, contention=(1.0, 2.0, 9.0))).crowded_us > 1.5 * expected(both).links_us


def slowly_held_up(played: Replay, profile: Profile) -> list[float]:
    """The same by looking, for every op, at every microsecond of it and at everybody who is busy in it."""
    stages = [row.worker.stage for row in played.plan.rows]
    ops = list(zip(played.starts_us.ravel().tolist(), played.ends_us.ravel().tolist(), strict=True))
    finishes = [
        (int(starts[iteration, stage]), int(ends[iteration, stage]))
        for starts, ends in ((played.reduce_starts_us, played.reduce_ends_us), (played.step_starts_us, played.step_ends_us))
        for iteration in range(played.num_iterations)
        for stage in stages
    ]
    busy = [*ops, *finishes]

    def level(at: int) -> float:
        return profile.held_up(sum(start <= at < end for start, end in busy) - 1)

    return [sum(map(level, range(start, end))) / (end - start) for start, end in ops]


@QUICK
@given(plan=legal_plans())
def test_what_holds_up_an_op_is_what_one_finds_microsecond_by_microsecond(plan: Plan) -> None:
    crowded = with_profile(plan, contention=(0.9, 1.0, 1.3, 1.4))
    played = replay(crowded, Conditions(2, eager=True))
    if max(played.completions_us) > 400:
        return
    by_hand = slowly_held_up(played, crowded.problem.profile)
    assert held_up(played, crowded.problem.profile).ravel().tolist() == pytest.approx(by_hand)
