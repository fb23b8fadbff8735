"""Swinging: whatever is changed on the way, a schedule stays legal; no op is lost; and the end of an iteration gets shorter."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import recycle
from recycle import Plan, Problem
from recycle.core.plans.plan import Quality
from recycle.core.plans.rules import check
from recycle.planner.failure_normalization import normalized_problem
from recycle.planner.heuristic.forward_backward import Swing, can_swing, swung
from recycle.planner.heuristic.portfolio import portfolio
from recycle.planner.heuristic.search import Search
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.strategies import problems

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def first_of(problem: Problem) -> tuple[Search, Swing]:
    """The strongest setting's schedule, not swung yet."""
    search = Search.of(problem, lower_bound(problem))
    return search, Swing.of(search, search.run(next(portfolio(problem))))


def plan_of(search: Search, swing: Swing) -> Plan:
    schedule = search.schedule(swing.starts).from_zero()
    return Plan(search.problem, schedule.rows(search.problem), swing.score[0], Quality(search.bound_us, "feasible", "greedy", 0))


@MANY
@given(problems(), st.integers(0, 1000))
def test_a_schedule_stays_legal_however_it_is_swung(problem: Problem, seed: int) -> None:
    assume(problem.techniques.decoupled)
    search, swing = first_of(problem)
    rng = np.random.default_rng(seed)
    for number in range(6):
        swing = swung(search, swing, rng if number else None)
        assert check(plan_of(search, swing)) == []


@MANY
@given(problems())
def test_whole_backward_passes_are_not_swung(problem: Problem) -> None:
    assert can_swing(Search.of(problem, lower_bound(problem))) == problem.techniques.decoupled


def test_the_same_seed_swings_the_same_way() -> None:
    problem = recycle.problem(4, 8, 16, fail="W1_2", costs=(10, 13, 9), comm=1, memory=16)
    search, swing = first_of(problem)
    one, other = (swung(search, swing, np.random.default_rng(7)) for _ in range(2))
    assert (one.starts == other.starts).all()


def test_a_swing_shortens_the_end_where_little_time_is_to_spare() -> None:
    # Nine stages in the middle with two of sixteen dead: the last gradients have to climb past workers that are always busy.
    whole = recycle.problem(16, 16, 64, costs=(10, 13, 9), comm=1, memory=32)
    search, swing = first_of(normalized_problem(whole, (1, 1, *[2] * 9, *[1] * 5)))
    once = swung(search, swing)
    assert swing.score[0] > 1.015 * search.bound_us
    assert once.score[0] <= 1.005 * search.bound_us
