"""The row of a single worker bounds the period of every plan, and explains most of what the formula does not know."""

import pytest
from hypothesis import HealthCheck, event, given, settings

import recycle
from recycle.core.problem import Problem
from recycle.planner.exact import cpsat
from recycle.planner.exact.exact_model import ExactLimit
from recycle.planner.exact.worker_proof import raise_bound
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.exact.serial import serial
from tests.planner.strategies import problems

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
LIMIT = ExactLimit(effort=3_000_000)


@QUICK
@given(problem=problems())
def test_no_row_proves_more_than_the_optimum(problem: Problem) -> None:
    start = serial(problem)
    found = cpsat.solve_cpsat(problem, LIMIT, start, 0)
    assert found.schedule is not None
    bound = lower_bound(problem)
    raised = raise_bound(problem, bound, start.period_us(problem), LIMIT).bound_us
    event(f"raised: {raised > bound}")
    assert bound <= raised <= found.schedule.period_us(problem)


@pytest.mark.parametrize(
    ("shape", "costs", "memory", "by_formula", "optimum"),
    [
        ((1, 2, 4), "3,4,2", 2, 43, 45),
        ((1, 3, 6), "10,13,9", 3, 224, 228),
        ((1, 4, 6), "3,4,2", 3, 78, 90),
    ],
)
def test_a_row_proves_plans_optimal_that_the_formula_does_not(
    shape: tuple[int, int, int], costs: str, memory: int, by_formula: int, optimum: int
) -> None:
    problem = recycle.problem(*shape, costs=costs, comm=1, memory=memory)
    plan = recycle.solve(problem, "greedy")
    assert (lower_bound(problem), plan.period_us) == (by_formula, optimum)
    assert raise_bound(problem, by_formula, optimum, LIMIT).bound_us == optimum
