"""Forward-backward improvement: under any random change a schedule stays legal, loses no op, and its end gets shorter."""

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import recycle
from recycle import Plan, Problem
from recycle.core.plans.plan import Quality
from recycle.core.plans.rules import check
from recycle.planner.failure_normalization import normalized_problem
from recycle.planner.heuristic.forward_backward import ForwardBackwardSchedule, forward_backward, splits_all_backwards
from recycle.planner.heuristic.known_settings import portfolio
from recycle.planner.heuristic.search import Search
from recycle.planner.model.chain_cuts import assign
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.strategies import problems

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def first_of(problem: Problem) -> tuple[Search, ForwardBackwardSchedule]:
    """The schedule of the strongest setting, before any pass."""
    search = Search.of(problem, lower_bound(problem), assign(problem))
    return search, ForwardBackwardSchedule.of(search, search.run(next(portfolio(problem))))


def plan_of(search: Search, improved: ForwardBackwardSchedule) -> Plan:
    schedule = search.schedule(improved.starts).from_zero()
    return Plan(
        search.problem, schedule.rows(search.problem), improved.score[0], Quality(search.bound_us, "feasible", "greedy", 0)
    )


@MANY
@given(problems(), st.integers(0, 1000))
def test_a_schedule_stays_legal_after_every_pass(problem: Problem, seed: int) -> None:
    assume(problem.techniques.decoupled)
    search, improved = first_of(problem)
    rng = np.random.default_rng(seed)
    for number in range(6):
        improved = forward_backward(search, improved, rng if number else None)
        assert check(plan_of(search, improved)) == []


@MANY
@given(problems())
def test_whole_backward_passes_are_not_improved_backward(problem: Problem) -> None:
    assert splits_all_backwards(Search.of(problem, lower_bound(problem), assign(problem))) == problem.techniques.decoupled


def test_the_same_seed_gives_the_same_schedule() -> None:
    problem = recycle.problem(4, 8, 16, fail="W1_2", costs=(10, 13, 9), comm=1, memory=16)
    search, first = first_of(problem)
    one, other = (forward_backward(search, first, np.random.default_rng(7)) for _ in range(2))
    assert (one.starts == other.starts).all()


def test_one_improvement_shortens_the_end_where_little_time_is_to_spare() -> None:
    # Nine stages in the middle with two of sixteen dead: the last gradients have to climb past workers that are always busy.
    whole = recycle.problem(16, 16, 64, costs=(10, 13, 9), comm=1, memory=32)
    search, first = first_of(normalized_problem(whole, (1, 1, *[2] * 9, *[1] * 5)))
    once = forward_backward(search, first)
    assert first.score[0] > 1.015 * search.bound_us
    assert once.score[0] <= 1.005 * search.bound_us
