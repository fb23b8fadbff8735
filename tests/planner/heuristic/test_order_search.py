"""Steps that change orders and cuts: every schedule stays legal, none gets worse, and the period is the one that rules count."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.plans.plan import Plan, Quality
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.planner.heuristic.known_settings import portfolio
from recycle.planner.heuristic.order_search import improve
from recycle.planner.heuristic.search import Search
from recycle.planner.model.chain_cuts import assign
from recycle.planner.model.schedule import Schedule
from tests.planner.test_cut_plans import cut_problems

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def first_schedule(problem: Problem) -> Schedule:
    search = Search.of(problem, 0, assign(problem))
    return search.schedule(search.run(next(portfolio(problem))).starts)


def is_split_and_shared(problem: Problem) -> bool:
    return problem.shared_layers > 0 and problem.shape.num_stages > 1 and problem.techniques.decoupled


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(cut_problems().filter(is_split_and_shared), st.sampled_from([2_000, 200_000]))
def test_a_schedule_stays_legal_and_never_gets_longer(problem: Problem, effort: int) -> None:
    before = first_schedule(problem)
    after = improve(problem, before, 0, effort)
    made, period_us = after.from_zero(), after.period_us(problem)
    plan = Plan(problem, made.rows(problem), period_us, Quality(0, "feasible", "greedy", 0.0), made.assignment.cuts)
    assert check(plan) == []
    assert period_us <= before.period_us(problem)


def test_little_memory_is_respected_by_both_methods() -> None:
    for method in ("greedy", "cpsat"):
        problem = recycle.problem(2, 3, 4, costs="9,14,7", comm=1, fail="W1_1", memory=2, layers=9, shared_layers=2)
        plan = recycle.solve(problem, method, time_limit_s=5.0, effort=200_000)
        assert recycle.check(plan) == []


def test_the_same_steps_give_the_same_schedule_which_is_better_than_the_first() -> None:
    problem = recycle.problem(3, 4, 6, costs="10,13,9", comm=1, fail="W1_2", memory=8, layers=16, shared_layers=2)
    first = first_schedule(problem)
    one, other = (improve(problem, first, 0, 2_000_000) for _ in range(2))
    assert one.period_us(problem) < first.period_us(problem)
    assert (one.forward_us == other.forward_us).all()
    assert one.assignment.cuts == other.assignment.cuts


@pytest.mark.slow
def test_small_steps_find_what_list_scheduling_does_not() -> None:
    """With list scheduling alone the period is 239 µs, however much effort it gets."""
    problem = recycle.problem(3, 4, 6, costs="10,13,9", comm=1, fail="W1_2", memory=8, layers=16, shared_layers=2)
    assert recycle.solve(problem, "greedy").period_us <= 232
