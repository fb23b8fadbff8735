"""The contract of every method, on random small problems: a legal plan, a true bound, and no contradiction between methods."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings

import recycle
from recycle import Plan, Problem
from recycle.core.plans.rules import check
from recycle.planner.exact import cpsat
from recycle.planner.exact.exact_model import ExactLimit
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.solve import METHODS
from tests.planner.exact.brute_force import best_period_us
from tests.planner.exact.serial import serial
from tests.planner.strategies import problems, tiny_shapes
from tests.slow_check import broken_rules

LIMIT_S = 0.5
LITTLE = 20_000  # effort of the greedy part, so that it ends by its own count and never by the clock
QUICK = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(params=METHODS, scope="module")
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def proven_us(plan: Plan) -> int | None:
    return plan.period_us if plan.quality.status == "optimal" else None


@QUICK
@given(problem=problems())
def test_a_plan_is_legal_says_how_good_it_is_and_is_the_same_on_disk(method: str, problem: Problem) -> None:
    plan = recycle.solve(problem, method, LIMIT_S, LITTLE)
    event(f"{method}: {plan.quality.status}")
    assert plan.problem == problem
    assert check(plan) == []
    assert broken_rules(plan) == set()
    assert 0 < plan.quality.bound_us <= plan.period_us
    assert plan.quality.status == ("optimal" if plan.quality.bound_us == plan.period_us else "feasible")
    assert method == "auto" or method in plan.quality.method
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        assert Plan.load(path) == plan


@QUICK
@given(problem=problems())
def test_no_method_refutes_what_another_proves(problem: Problem) -> None:
    plans = {method: recycle.solve(problem, method, LIMIT_S, LITTLE) for method in METHODS}
    proven = {period for plan in plans.values() if (period := proven_us(plan)) is not None}
    event(f"proven: {bool(proven)}")
    assert len(proven) <= 1
    for plan in plans.values():
        assert plan.period_us >= max(other.quality.bound_us for other in plans.values())
    # `auto` starts from the greedy plan, so it is never the worse one.
    assert plans["auto"].period_us <= plans["greedy"].period_us


@QUICK
@given(problem=problems())
def test_the_bound_is_not_above_an_optimum_that_was_proven_without_it(problem: Problem) -> None:
    exact = cpsat.solve_cpsat(problem, ExactLimit.seconds(2.0), serial(problem), 0)
    assert exact.schedule is not None
    optimum = exact.schedule.period_us(problem)
    event(f"proven: {optimum == exact.bound_us}")
    assert lower_bound(problem) <= optimum
    assert recycle.solve(problem, "greedy", effort=LITTLE).period_us >= exact.bound_us


@QUICK
@given(problem=problems(tiny_shapes))
def test_no_plan_at_all_undercuts_the_bound_of_a_plan(problem: Problem) -> None:
    """Trying everything moves micro-batches of live workers too, which the exact methods rule out."""
    best = best_period_us(problem, limit=1_000, any_route=problem.techniques.adaptive)
    event(f"tried everything: {best is not None}")
    if best is not None:
        plan = recycle.solve(problem, "auto", 2.0, LITTLE)
        assert plan.quality.bound_us <= best <= plan.period_us


@QUICK
@given(problem=problems())
def test_the_same_problem_gives_the_same_greedy_plan(problem: Problem) -> None:
    first, second = (recycle.solve(problem, "greedy", effort=LITTLE) for _ in range(2))
    assert first.rows == second.rows
    assert first.period_us == second.period_us
