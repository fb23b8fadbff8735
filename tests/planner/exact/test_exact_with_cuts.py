"""The exact methods with shared layers and speeds: they agree, nothing beats what they prove, the bound holds for every cut."""

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.plans.plan import Plan, Quality
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.planner.exact import cpsat, milp
from recycle.planner.exact.exact_model import Exact, ExactLimit
from recycle.planner.heuristic.greedy import solve_greedy
from recycle.planner.model.assignment import Assignment
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.model.schedule import Schedule
from tests.planner.exact.serial import serial

QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
TECHNIQUES = ("adaptive,decoupled,staggered", "adaptive,decoupled", "adaptive,staggered")


@st.composite
def small_cut_problems(draw: st.DrawFn, max_pipelines: int = 2, max_stages: int = 3, speeds: bool = True) -> Problem:
    pipelines, stages = draw(st.integers(1, max_pipelines)), draw(st.integers(2, max_stages))
    each = draw(st.integers(1, 3))
    dead = [f"W1_{draw(st.integers(0, stages - 1))}"] if pipelines > 1 and draw(st.booleans()) else []
    slow = {f"W0_{draw(st.integers(0, stages - 1))}": draw(st.sampled_from([0.5, 0.7, 1.5]))} if speeds else {}
    return recycle.problem(
        pipelines,
        stages,
        draw(st.integers(1, 2)),
        fail=dead,
        costs=tuple(draw(st.integers(1, 9)) for _ in range(3)),
        comm=draw(st.integers(0, 2)),
        memory=draw(st.sampled_from([None, 1, 2])),
        techniques=draw(st.sampled_from(TECHNIQUES)),
        layers=each * stages,
        shared_layers=draw(st.integers(0 if speeds else 1, each)),
        speeds=slow,
    )


def proven_us(problem: Problem, exact: Exact) -> int | None:
    """The period if it is proven optimal for its cuts. Whatever is returned is legal."""
    schedule = exact.schedule
    if schedule is None:
        return None
    period_us = schedule.period_us(problem)
    made = schedule.from_zero()
    plan = Plan(problem, made.rows(problem), period_us, Quality(0, "feasible", "exact", 0.0), made.assignment.cuts)
    assert check(plan) == []
    return period_us if period_us == exact.bound_us else None


@QUICK
@given(small_cut_problems())
def test_two_solvers_prove_the_same_optimum_for_the_same_cuts(problem: Problem) -> None:
    hint = serial(problem)
    by_cpsat = proven_us(problem, cpsat.solve_cpsat(problem, ExactLimit.seconds(10.0), hint, 0))
    by_milp = proven_us(problem, milp.solve_milp(problem, ExactLimit.seconds(2.0), hint, 0))
    event(f"milp proves: {by_milp is not None}, cut: {bool(hint.assignment.offsets.any())}")
    assert by_cpsat is not None
    assert by_milp in (None, by_cpsat)


@QUICK
@given(small_cut_problems())
def test_the_greedy_schedule_is_near_the_optimum_for_its_cuts(problem: Problem) -> None:
    greedy = solve_greedy(problem, lower_bound(problem), effort=50_000)
    optimum_us = proven_us(problem, cpsat.solve_cpsat(problem, ExactLimit.seconds(10.0), greedy, 0))
    assert optimum_us is not None
    assert optimum_us <= greedy.period_us(problem) <= 1.25 * optimum_us


def with_cuts(problem: Problem, offsets: np.ndarray) -> Schedule | None:
    """A hint with these cuts: the serial schedule, in which nothing overlaps; None if they are not legal."""
    held = problem.held_layers
    assert held is not None
    hint = serial(problem)
    if (np.diff(np.array(held.sums.bounds)[:, None] + offsets, axis=0) < 1).any():
        return None
    made = replace(hint, assignment=Assignment.of(problem, hint.pipeline, offsets))
    capacity = np.array([problem.capacity(stage) or 1 << 40 for stage in range(problem.shape.num_stages)])
    if (made.assignment.taken > capacity[:, None]).any():
        return None
    # Far enough apart that no op overlaps with another, however the layers are cut.
    starts = [100 * column for column in (made.forward_us, made.input_us, made.weight_us)]
    return replace(made, forward_us=starts[0], input_us=starts[1], weight_us=starts[2])


def optimum_of_all_cuts_us(problem: Problem) -> int:
    """The least period over every legal cut of every chain."""
    num_stages, num_chains, shared = problem.shape.num_stages, problem.shape.num_chains, problem.shared_layers
    best = 1 << 40
    for choice in product(range(-shared, shared + 1), repeat=(num_stages - 1) * num_chains):
        offsets = np.zeros((num_stages + 1, num_chains), dtype=np.int64)
        offsets[1:-1] = np.array(choice).reshape(num_stages - 1, num_chains)
        hint = with_cuts(problem, offsets)
        if hint is not None:
            found = cpsat.solve_cpsat(problem, ExactLimit.seconds(10.0), hint, 0)
            proven = proven_us(problem, found)
            assert proven is not None
            best = min(best, proven)
    return best


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(small_cut_problems(max_stages=2, speeds=False).filter(lambda problem: problem.shared_layers < 2))
def test_the_bound_is_at_most_the_optimum_of_all_cuts_and_greedy_is_near_it(problem: Problem) -> None:
    optimum_us = optimum_of_all_cuts_us(problem)
    greedy_us = recycle.solve(problem, "greedy", effort=50_000).period_us
    assert lower_bound(problem) <= optimum_us <= greedy_us <= 1.2 * optimum_us


def test_an_exact_method_does_not_raise_the_bound_beyond_what_other_cuts_could_reach() -> None:
    problem = recycle.problem(2, 2, 2, costs="8,12,8", comm=1, fail="W1_1", layers=8, shared_layers=2)
    for method in ("cpsat", "milp"):
        plan = recycle.solve(problem, method, effort=50_000)
        assert plan.quality.bound_us == lower_bound(problem)
        assert plan.period_us <= recycle.solve(problem, "greedy", effort=50_000).period_us
