"""The exact methods prove the worked example, agree with each other, and agree with trying everything."""

import time
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.plans.plan import Plan, Quality
from recycle.core.plans.rules import check
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.exact import cpsat, milp
from recycle.planner.exact.exact_model import Exact, ExactLimit, canonical
from recycle.planner.heuristic.greedy import DEFAULT_EFFORT
from recycle.planner.model.schedule import Schedule
from tests.planner.exact.brute_force import best_period_us
from tests.planner.exact.serial import serial
from tests.processes import depends_on_load

QUICK = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
Solve = Callable[[Problem, float, Schedule, int], Exact]
ONE_F_ONE_B = Memory.microbatches((4, 3, 2, 1))
SPARE = Memory.microbatches((6, 6, 6, 6))


def worked_example(techniques: Techniques, memory: Memory, failed: tuple[Worker, ...] = (Worker(1, 2),)) -> Problem:
    return Problem(Cluster.of(Shape(3, 4, 6), failed), Profile.uniform(4, 1, 1, 1), memory, techniques)


def plan_of(problem: Problem, schedule: Schedule, bound_us: int = 0) -> Plan:
    quality = Quality(bound_us, "feasible", "exact", 0.0)
    return Plan(problem, schedule.from_zero().rows(problem), schedule.period_us(problem), quality)


def proven_us(problem: Problem, exact: Exact) -> int | None:
    """The period if it is proven optimal. Whatever is returned is legal, and its bound is a bound."""
    if exact.schedule is None:
        return None
    assert check(plan_of(problem, exact.schedule, exact.bound_us)) == []
    period_us = exact.schedule.period_us(problem)
    return period_us if period_us == exact.bound_us else None


@st.composite
def stage_profiles(draw: st.DrawFn) -> StageProfile:
    forward, split, weight, optimizer = (draw(st.integers(1, 4)) for _ in range(4))
    fused = draw(st.integers(split, split + weight + 1))
    held = draw(st.integers(1, 3))
    activation = held + draw(st.integers(1, 3))
    return StageProfile(
        forward, split, weight, fused, optimizer, activation, held, static_bytes=1, gradient_bytes=draw(st.integers(0, 3))
    )


@st.composite
def small_problems(draw: st.DrawFn, max_pipelines: int = 3, max_ops: int = 12) -> Problem:
    """Up to three pipelines, stages and micro-batches, with as many failures as leave every stage alive."""
    shape = Shape(draw(st.integers(1, max_pipelines)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    shape = Shape(shape.num_pipelines, shape.num_stages, min(shape.num_microbatches, max(max_ops // shape.num_workers, 1)))
    stages = tuple(draw(stage_profiles()) for _ in range(shape.num_stages))
    profile = Profile(stages, stage_link=Link(latency_us=draw(st.integers(0, 2))))
    failed = [
        Worker(pipeline, stage)
        for stage in range(shape.num_stages)
        for pipeline in draw(st.sets(st.integers(0, shape.num_pipelines - 1), max_size=shape.num_pipelines - 1))
    ]
    adaptive = bool(failed) or draw(st.booleans())
    memory = draw(memories(stages))
    return Problem(Cluster.of(shape, failed), profile, memory, Techniques(adaptive, draw(st.booleans()), draw(st.booleans())))


def memories(stages: tuple[StageProfile, ...]) -> st.SearchStrategy[Memory]:
    counts = st.tuples(*(st.integers(1, 3) for _ in stages)).map(Memory.microbatches)
    least = [stage.static_bytes + stage.activation_bytes for stage in stages]
    sizes = st.tuples(*(st.integers(some, some + 6) for some in least)).map(Memory.bytes)
    return st.one_of(st.just(Memory.unlimited()), counts, sizes)


@pytest.mark.parametrize(
    ("techniques", "memory", "failed", "period_us"),
    [
        pytest.param(Techniques(False, False, False), ONE_F_ONE_B, (), 27, id="fault-free"),
        pytest.param(Techniques(True, False, False), ONE_F_ONE_B, (Worker(1, 2),), 36, id="adaptive", marks=pytest.mark.slow),
        pytest.param(Techniques(True, False, False), SPARE, (Worker(1, 2),), 33, id="adaptive with spare memory"),
        pytest.param(Techniques(True, True, False), SPARE, (Worker(1, 2),), 29, id="decoupled"),
        pytest.param(Techniques(True, True, True), SPARE, (Worker(1, 2),), 27, id="staggered"),
    ],
)
def test_cpsat_proves_the_optima_of_the_worked_example(
    techniques: Techniques, memory: Memory, failed: tuple[Worker, ...], period_us: int
) -> None:
    problem = worked_example(techniques, memory, failed)
    assert proven_us(problem, cpsat.solve_cpsat(problem, ExactLimit.seconds(60.0), serial(problem), 0)) == period_us


def test_milp_proves_that_the_fault_free_worked_example_takes_27_slots() -> None:
    problem = worked_example(Techniques(False, False, False), ONE_F_ONE_B, ())
    assert proven_us(problem, milp.solve_milp(problem, ExactLimit.seconds(30.0), serial(problem), 0)) == 27


@QUICK
@given(small_problems())
def test_two_solvers_prove_the_same_optimum(problem: Problem) -> None:
    by_cpsat = proven_us(problem, cpsat.solve_cpsat(problem, ExactLimit(effort=DEFAULT_EFFORT), serial(problem), 0))
    by_milp = proven_us(problem, milp.solve_milp(problem, ExactLimit.seconds(0.5), serial(problem), 0))
    event(f"milp proves: {by_milp is not None}")
    assert by_cpsat is not None
    assert by_milp in (None, by_cpsat)


@QUICK
@given(small_problems(max_pipelines=2, max_ops=5))
def test_no_schedule_is_better_than_a_proven_one(problem: Problem) -> None:
    best = best_period_us(problem, limit=2_000)
    event(f"tried everything: {best is not None}")
    if best is not None:
        assert proven_us(problem, cpsat.solve_cpsat(problem, ExactLimit(effort=DEFAULT_EFFORT), serial(problem), 0)) == best
        assert proven_us(problem, milp.solve_milp(problem, ExactLimit.seconds(5.0), serial(problem), 0)) in (None, best)


@QUICK
@given(small_problems(), st.randoms(use_true_random=False))
def test_a_hint_and_its_relabelled_form_are_the_same_schedule(problem: Problem, random: Random) -> None:
    schedule = cpsat.solve_cpsat(problem, ExactLimit(effort=DEFAULT_EFFORT), serial(problem), 0).schedule
    assert schedule is not None
    shuffled = shuffle_chains(problem, schedule, random)
    relabelled = canonical(problem, shuffled)
    assert relabelled is not None
    assert check(plan_of(problem, relabelled)) == []
    assert relabelled.period_us(problem) == schedule.period_us(problem)
    assert (np.diff(relabelled.forward_us[0].reshape(problem.shape.num_pipelines, -1)) >= 0).all()


def shuffle_chains(problem: Problem, schedule: Schedule, random: Random) -> Schedule:
    """Rename the micro-batches of each home at random."""
    size = problem.shape.num_microbatches
    order = [home * size + at for home in range(problem.shape.num_pipelines) for at in random.sample(range(size), size)]
    columns = schedule.forward_us, schedule.input_us, schedule.weight_us, schedule.is_fused
    routes = schedule.assignment.routed(problem, schedule.pipeline[:, order])
    return Schedule(routes, *(column[:, order] for column in columns))


@QUICK
@given(small_problems())
def test_the_serial_schedule_is_legal(problem: Problem) -> None:
    assert check(plan_of(problem, serial(problem))) == []


@pytest.mark.parametrize("solve", [cpsat.solve_cpsat, milp.solve_milp])
def test_a_hint_that_meets_the_bound_is_the_answer(solve: Solve) -> None:
    problem = worked_example(Techniques(), Memory.unlimited())
    hint = serial(problem)
    exact = solve(problem, ExactLimit.seconds(60.0), hint, hint.period_us(problem))
    assert exact.schedule is hint
    assert proven_us(problem, exact) == hint.period_us(problem)


@pytest.mark.parametrize("solve", [cpsat.solve_cpsat, milp.solve_milp])
def test_an_optimal_hint_is_proven_without_a_bound(solve: Solve) -> None:
    problem = Problem(Cluster.of(Shape(2, 2, 2), [Worker(0, 1)]), Profile.uniform(2, 1, 1, 1))
    hint = cpsat.solve_cpsat(problem, ExactLimit.seconds(10.0), serial(problem), 0).schedule
    assert hint is not None
    assert proven_us(problem, solve(problem, ExactLimit.seconds(30.0), hint, 0)) == hint.period_us(problem)


@pytest.mark.parametrize("solve", [cpsat.solve_cpsat, milp.solve_milp])
def test_a_hint_that_moves_a_live_workers_chain_is_legal_but_only_a_limit(solve: Solve) -> None:
    problem = Problem(Cluster(Shape(2, 1, 1)), Profile.uniform(1, 1, 1, 1))
    hint = serial(problem)
    hint.pipeline[0] = (0, 0)
    assert canonical(problem, hint) is None
    assert proven_us(problem, solve(problem, ExactLimit.seconds(10.0), hint, 0)) == 3


@pytest.mark.parametrize(("solve", "num_microbatches"), [(cpsat.solve_cpsat, 5_000), (milp.solve_milp, 24)])
def test_what_is_too_large_is_refused_at_once(solve: Solve, num_microbatches: int) -> None:
    problem = Problem(Cluster(Shape(2, 4, num_microbatches)), Profile.uniform(4, 1, 1, 1))
    hint = serial(problem)
    began = time.monotonic()
    assert solve(problem, ExactLimit.seconds(60.0), hint, 7) == Exact(None, 7)
    with depends_on_load():
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("solve", [cpsat.solve_cpsat, milp.solve_milp])
def test_the_time_limit_is_kept(solve: Solve) -> None:
    costs = [StageProfile(3 + s, 5 + s, 2 + s, 7 + 2 * s) for s in range(4)]
    failed = [Worker(0, 1), Worker(2, 3)]
    problem = Problem(Cluster.of(Shape(4, 4, 6), failed), Profile(tuple(costs)), Memory.microbatches((4, 4, 4, 4)))
    began = time.monotonic()
    exact = solve(problem, ExactLimit.seconds(1.0), serial(problem), 5)
    with depends_on_load():
        assert time.monotonic() - began < 20
    assert exact.bound_us >= 5


def test_a_search_that_finds_nothing_better_returns_no_worse_than_its_hint() -> None:
    problem = Problem(Cluster.of(Shape(4, 4, 8), [Worker(1, 2)]), Profile.uniform(4, 3, 4, 2))
    hint = serial(problem)
    exact = cpsat.solve_cpsat(problem, ExactLimit.seconds(1.0), hint, 0)
    assert exact.schedule is not None
    assert exact.schedule.period_us(problem) <= hint.period_us(problem)
    proven_us(problem, exact)
