"""Plans of problems with shared layers and slow workers: legal, no shorter than their bound, replayed as planned."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Cluster, Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.core.problem import Problem
from recycle.core.profile import Profile, StageProfile
from recycle.planner.failure_normalization import least_bound
from recycle.planner.kept_throughput import fault_free_period_us, kept_throughput
from recycle.planner.live_planner import Planner, renamed
from recycle.planner.model.load_bound import LoadBound
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.solve import solve_normalized
from recycle.sim.replay.replay import Conditions, replay
from tests.planner.strategies import problems as plain_problems

EFFORT = 20_000


@st.composite
def cut_problems(draw: st.DrawFn) -> Problem:
    pipelines, stages, microbatches = (draw(st.integers(1, most)) for most in (3, 4, 5))
    each = draw(st.integers(1, 4))
    mortal = [f"W{p}_{s}" for p in range(1, pipelines) for s in range(stages)]
    workers = [f"W{p}_{s}" for p in range(pipelines) for s in range(stages)]
    speeds = draw(st.dictionaries(st.sampled_from(workers), st.sampled_from([0.3, 0.6, 0.95, 1.7]), max_size=2))
    techniques = draw(st.sampled_from(["adaptive,decoupled,staggered", "adaptive,decoupled", "adaptive,staggered"]))
    return recycle.problem(
        pipelines,
        stages,
        microbatches,
        fail=draw(st.sets(st.sampled_from(mortal), max_size=3)) if mortal else "",
        costs=(draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 40))),
        comm=draw(st.integers(0, 3)),
        memory=draw(st.sampled_from([None, 1, 2, stages, 2 * stages])),
        techniques=techniques,
        layers=each * stages,
        shared_layers=draw(st.integers(0, each)),
        speeds=speeds,
    )


@settings(max_examples=60, deadline=None)
@given(cut_problems())
def test_every_plan_is_legal_and_no_shorter_than_its_bound(problem: Problem) -> None:
    plan = recycle.solve(problem, "greedy", effort=EFFORT)
    assert recycle.check(plan) == []
    assert lower_bound(problem) == plan.quality.bound_us <= plan.period_us
    assert Plan.parse(plan.dumps()) == plan


@settings(max_examples=30, deadline=None)
@given(cut_problems())
def test_a_plan_is_replayed_as_planned(problem: Problem) -> None:
    plan = recycle.solve(problem, "greedy", effort=EFFORT)
    assert set(replay(plan).periods_us) == {plan.period_us}
    assert replay(plan, Conditions(num_iterations=8, eager=True)).steady_period_us <= plan.period_us


@settings(max_examples=30, deadline=None)
@given(cut_problems())
def test_every_layer_of_every_micro_batch_is_computed_once_by_a_worker_that_holds_it(problem: Problem) -> None:
    plan = recycle.solve(problem, "greedy", effort=EFFORT)
    if not plan.cuts:
        return
    held = problem.held_layers
    assert held is not None
    computed: dict[tuple[int, str], list[int]] = {}
    for worker, program in row_programs(plan).items():
        columns = zip(program.kinds, program.chains, program.first_layers, program.end_layers, strict=True)
        for kind, chain, first, end in columns:
            assert first in held.ranges[worker.stage]
            assert end - 1 in held.ranges[worker.stage]
            computed.setdefault((chain, "F" if kind == "F" else "W" if kind in "BW" else "I"), []).extend(range(first, end))
    whole = list(range(held.sums.num_layers))
    for (_, kind), layers in computed.items():
        if kind != "I":
            assert sorted(layers) == whole


@settings(max_examples=100, deadline=None)
@given(plain_problems())
def test_the_bound_by_load_holds_without_shared_layers_too(problem: Problem) -> None:
    assert LoadBound(problem).period_us() <= recycle.solve(problem, "greedy", effort=EFFORT).period_us


def test_one_dead_worker_of_32_costs_less_than_5_percent() -> None:
    problem = recycle.problem(4, 8, 32, costs="10,13,9", fail="W1_2", layers=32, shared_layers=2)
    plan = recycle.solve(problem, "greedy", effort=1_000_000)
    found = kept_throughput(plan, fault_free_period_us(problem, "greedy", 20))
    assert found.fault_free_us == 1024
    assert found.kept >= 0.94
    assert round(found.live_share, 4) == 0.9688
    re_routed = recycle.solve(recycle.problem(4, 8, 32, costs="10,13,9", fail="W1_2"), "greedy", effort=1_000_000)
    assert re_routed.period_us > 1.25 * plan.period_us


def test_uneven_stages_are_levelled_with_nobody_dead() -> None:
    even = recycle.problem(2, 4, 16, costs="10,13,9", layers=16).profile
    uneven = Profile((*even.stages[:3], StageProfile(15, 20, 13, 33)), layers=even.layers)
    fixed, levelled = (
        recycle.solve(recycle.problem(2, 4, 16, profile=uneven, shared_layers=num), "greedy", effort=300_000) for num in (0, 2)
    )
    assert levelled.period_us < 0.85 * fixed.period_us


def test_a_slow_worker_costs_about_what_it_lacks() -> None:
    problem = recycle.problem(3, 4, 24, costs="100,130,90", layers=24, shared_layers=2, speeds="W1_2=0.6")
    plan = recycle.solve(problem, "greedy", effort=2_000_000)
    assert kept_throughput(plan, fault_free_period_us(problem, "greedy", 20)).kept >= 0.93
    assert plan.problem.speeds == ((Worker(1, 2), 0.6),)


def test_a_plan_for_any_failures_is_no_shorter_than_the_least_bound() -> None:
    problem = recycle.problem(3, 4, 6, costs="10,13,9", layers=16, shared_layers=2)
    for num_failures in (0, 1, 3):
        plan, distribution = solve_normalized(problem, num_failures, "greedy", effort=100_000)
        assert sum(distribution) == num_failures
        assert least_bound(problem, num_failures) <= plan.quality.bound_us <= plan.period_us


def test_pipelines_in_another_order_take_their_cuts_along() -> None:
    problem = recycle.problem(3, 3, 7, costs="10,13,9", fail="W2_1", layers=12, shared_layers=1)
    plan = recycle.solve(problem, "greedy", effort=EFFORT)
    assert plan.cuts
    other = renamed(plan, Cluster(problem.shape, frozenset({Worker(0, 1)})))
    assert other is not None
    assert recycle.check(other) == []
    assert other.cuts != plan.cuts


def test_a_running_job_is_answered_with_cuts() -> None:
    problem = recycle.problem(3, 4, 6, costs="10,13,9", layers=16, shared_layers=2)
    answer = Planner(problem).answer(frozenset({Worker(1, 2)}))
    assert answer.plan.cuts
    assert recycle.check(answer.plan) == []


def test_neighbouring_bounds_do_not_fall_with_fewer_shared_layers() -> None:
    problems = [recycle.problem(4, 8, 16, costs="100,130,90", fail="W1_2,W0_2", layers=64, shared_layers=num) for num in range(4)]
    assert all(fewer >= more for fewer, more in pairwise(map(lower_bound, problems)))
