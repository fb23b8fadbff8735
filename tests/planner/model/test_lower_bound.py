"""The bound: each of its terms worked out by hand, the worked example, and what must never raise or lower it."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.strategies import problems

MANY = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SYNCHRONOUS = "adaptive,decoupled"


def bound_us(*shape: int, **words: object) -> int:
    """The bound of a problem in the words of `recycle.problem`. A plan reaches it, so that no case is too low either."""
    problem = recycle.problem(*shape, **words)  # type: ignore[arg-type]
    return reached_us(problem)


def reached_us(problem: Problem) -> int:
    bound = lower_bound(problem)
    assert recycle.solve(problem, time_limit_s=20).period_us == bound
    return bound


def test_a_worker_is_busy_for_all_its_micro_batches() -> None:
    assert bound_us(1, 1, 4, costs=(2, 3, 4)) == 4 * (2 + 3 + 4)


def test_live_peers_share_the_micro_batches_and_the_busiest_counts() -> None:
    assert bound_us(2, 1, 3, fail="W1_0", costs=(2, 3, 4)) == 6 * 9
    assert bound_us(3, 1, 1, fail="W1_0", costs=(2, 3, 4)) == 2 * 9


def test_live_workers_share_whole_layers_and_the_busiest_counts() -> None:
    # Eight layers of 16 micro-batches on three workers: one of them computes 43 layers at least, of 32 µs each.
    problem = recycle.problem(2, 2, 8, fail="W1_0", costs=(40, 52, 36), layers=8, shared_layers=2)
    assert 43 * 32 <= lower_bound(problem) <= recycle.solve(problem, effort=1_000_000).period_us


def test_the_first_stage_idles_until_its_first_gradient_is_back() -> None:
    # F0 F1 I1 I0 W0: stage 0 is busy for three slots of the five.
    assert bound_us(1, 2, 1, costs=(1, 1, 1)) == 5
    assert bound_us(1, 2, 1, costs=(1, 1, 1), comm=10) == 5 + 2 * 10


def test_with_one_place_in_memory_micro_batches_take_turns() -> None:
    # Each holds its place from F to W, five slots as above.
    assert bound_us(1, 2, 3, costs=(1, 1, 1), memory=1) == 3 * 5


def test_with_two_places_in_memory_the_second_follows_the_first_in_every_turn() -> None:
    # Of three stages, a place is held for seven slots; six micro-batches are three turns, and the very last starts a slot later.
    # What happens inside a turn is not part of the bound: the optimum is 25.
    assert lower_bound(recycle.problem(1, 3, 6, costs=(1, 1, 1), memory="2,9,9")) == 3 * 7 + 1


def test_a_place_that_its_input_gradient_frees_is_taken_again_before_its_weight_gradient() -> None:
    stage = StageProfile(1, 1, 1, fused_us=2, activation_bytes=4, weight_held_bytes=0)
    problem = Problem(Cluster(Shape(1, 2, 3)), Profile((stage, stage)), Memory.bytes((4, 4)))
    # Turns of four, from F to I, and one last W.
    assert reached_us(problem) == 3 * 4 + 1


def test_the_last_gradient_still_travels_up_to_the_first_stage() -> None:
    # W0_1 runs four micro-batches one by one, F I W; its last I ends after 11 slots. Stage 0 had one F before, and I and W after.
    assert bound_us(2, 2, 2, fail="W1_1", costs=(1, 1, 1), memory="9,1") == 1 + 11 + 1 + 1


def test_staggered_each_stage_adds_its_own_step_and_synchronous_the_slowest() -> None:
    stages = StageProfile(1, 1, 1, 2, optimizer_us=5), StageProfile(1, 1, 1, 2, optimizer_us=9)
    staggered = Problem(Cluster(Shape(1, 2, 1)), Profile(stages))
    # Stage 0: five slots and its step. Stage 1: three slots and its step.
    assert reached_us(staggered) == max(5 + 5, 3 + 9)
    assert reached_us(replace(staggered, techniques=Techniques(staggered=False))) == 5 + 9


def test_a_reduction_over_fewer_peers_is_shorter() -> None:
    stage = StageProfile(1, 1, 1, 2, gradient_bytes=8)
    profile = Profile((stage,), peer_link=Link(latency_us=3, bytes_per_us=2.0))
    # A ring of two: two steps of 3 µs and 4 bytes.
    assert reached_us(Problem(Cluster(Shape(2, 1, 1)), profile)) == 3 + 2 * (3 + 2)
    assert reached_us(Problem(Cluster(Shape(2, 1, 1), frozenset({Worker(1, 0)})), profile)) == 6


@pytest.mark.parametrize(("fused_us", "split", "whole"), [(5, 14, 14), (7, 18, 18), (9, 18, 22)])
def test_a_backward_pass_is_at_least_as_long_as_the_cheaper_of_its_forms(fused_us: int, split: int, whole: int) -> None:
    problem = Problem(Cluster(Shape(1, 1, 2)), Profile((StageProfile(2, 3, 4, fused_us),)))
    assert reached_us(problem) == split
    assert reached_us(replace(problem, techniques=Techniques(decoupled=False))) == whole


@pytest.mark.parametrize(
    ("fail", "techniques", "memory", "slots"),
    [
        ("", "none", "4,3,2,1", 27),
        ("W1_2", "adaptive", "4,3,2,1", 36),
        ("W1_2", "adaptive", 6, 33),
        ("W1_2", SYNCHRONOUS, 6, 29),
        ("W1_2", "adaptive,decoupled,staggered", 6, 27),
    ],
)
def test_the_bound_alone_proves_the_worked_example(fail: str, techniques: str, memory: str | int, slots: int) -> None:
    problem = recycle.problem(3, 4, 6, fail=fail, costs=(1, 1, 1), memory=memory, techniques=techniques)
    assert lower_bound(problem) == slots


@MANY
@given(problems(), st.data())
def test_more_memory_never_raises_the_bound(problem: Problem, data: st.DataObject) -> None:
    assume(problem.memory.unit != "unlimited")
    more = tuple(limit + data.draw(st.integers(0, 6)) for limit in problem.memory.limits)
    roomier = replace(problem, memory=Memory(problem.memory.unit, more))
    boundless = replace(problem, memory=Memory.unlimited())
    assert lower_bound(boundless) <= lower_bound(roomier) <= lower_bound(problem)


@MANY
@given(problems(), st.data())
def test_one_more_failure_never_lowers_the_bound_where_reductions_are_free(problem: Problem, data: st.DataObject) -> None:
    stages = tuple(replace(stage, gradient_bytes=0) for stage in problem.profile.stages)
    before = replace(problem, profile=replace(problem.profile, stages=stages, peer_link=Link()))
    before = replace(before, techniques=replace(before.techniques, adaptive=True))
    mortal = [worker for worker in problem.cluster.live_workers() if problem.cluster.num_live(worker.stage) > 1]
    assume(mortal)
    one_more = problem.cluster.failed | {data.draw(st.sampled_from(mortal))}
    assert lower_bound(replace(before, cluster=Cluster(problem.shape, one_more))) >= lower_bound(before)


@MANY
@given(problems())
def test_no_technique_raises_the_bound(problem: Problem) -> None:
    for name in ("decoupled", "staggered"):
        without = replace(problem, techniques=replace(problem.techniques, **{name: False}))
        with_it = replace(problem, techniques=replace(problem.techniques, **{name: True}))
        assert lower_bound(with_it) <= lower_bound(without)
