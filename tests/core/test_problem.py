"""What makes a problem: techniques, memory, and what cannot be planned at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.op import Kind
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from tests.builders import make_problem

HEAVY = StageProfile(
    10, 12, 8, 20, optimizer_us=4, activation_bytes=100, weight_held_bytes=40, static_bytes=1000, gradient_bytes=600
)


def heavy_problem(limit_bytes, pipelines=2):
    return Problem(Cluster(Shape(pipelines, 1, 3)), Profile((HEAVY,), peer_link=Link(5, 10.0)), Memory.bytes([limit_bytes]))


@st.composite
def problems(draw):
    shape = Shape(draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    spare = [Worker(p, s) for s in range(shape.num_stages) for p in range(1, shape.num_pipelines)]
    failed = draw(st.sets(st.sampled_from(spare))) if spare else set()
    costs = [draw(st.integers(1, 20)) for _ in range(3)]
    limits = st.lists(st.integers(1, 9), min_size=shape.num_stages, max_size=shape.num_stages)
    memory = draw(st.one_of(st.just(Memory.unlimited()), limits.map(Memory.microbatches)))
    techniques = Techniques(bool(failed) or draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    return Problem(Cluster.of(shape, failed), Profile.uniform(shape.num_stages, *costs), memory, techniques)


@given(problems())
def test_a_problem_survives_json(problem):
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@given(st.builds(Techniques, st.booleans(), st.booleans(), st.booleans()))
def test_techniques_survive_their_text_form(techniques):
    assert Techniques.parse(str(techniques)) == techniques


def test_no_technique_is_written_none():
    assert str(Techniques(False, False, False)) == "none"
    assert Techniques.parse("none").names == ()
    assert Techniques.parse("") == Techniques.parse("none")
    assert Techniques.parse(" staggered , adaptive ").names == ("adaptive", "staggered")


def test_an_unknown_technique_is_refused_by_name():
    with pytest.raises(UserError, match="'magic' is not a technique: choose from adaptive, decoupled, staggered, or none"):
        Techniques.parse("adaptive,magic")


def test_a_failure_needs_adaptive_pipelining():
    with pytest.raises(UserError, match="W1_0 failed, but only the technique 'adaptive'"):
        make_problem(2, 2, 2, failed=["W1_0"], techniques="decoupled,staggered")


def test_the_profile_must_describe_every_stage():
    with pytest.raises(UserError, match="the profile describes 3 stages, but the cluster has 2"):
        Problem(Cluster(Shape(1, 2, 2)), Profile.uniform(3, 1, 1, 1))


def test_memory_must_be_given_for_every_stage():
    with pytest.raises(UserError, match="memory is given for 3 stages, but there are 2"):
        make_problem(1, 2, 2, memory=Memory.microbatches([1, 1, 1]))


def test_memory_is_a_whole_number():
    with pytest.raises(UserError, match=r"the memory of stage 1 is 1.5, but it must be a whole number of at least 1"):
        Memory.microbatches([1, 1.5])


@pytest.mark.parametrize("limit", [0, -1])
def test_memory_for_nothing_says_the_least_that_works(limit):
    with pytest.raises(MemoryTooSmall, match=rf"the memory of stage 1 is {limit} microbatches.*the least that works is 1"):
        Memory.microbatches([1, limit])


def test_an_unknown_unit_of_memory_is_refused():
    with pytest.raises(UserError, match="'pages' is not a unit of memory"):
        Memory("pages", (1,))


def test_memory_for_one_micro_batch_is_the_least_that_works():
    assert heavy_problem(1100).capacity(0) == 100
    with pytest.raises(MemoryTooSmall, match=r"stage 0 has .* the least that works is .*\(1100 bytes: .* 1000, .* 100\)"):
        heavy_problem(1099)


def test_static_bytes_that_do_not_fit_are_refused_even_without_activations():
    stage = StageProfile(1, 1, 1, 2, static_bytes=10)
    with pytest.raises(MemoryTooSmall, match="stage 0"):
        Problem(Cluster(Shape(1, 1, 1)), Profile((stage,)), Memory.bytes([9]))


def test_bytes_are_released_in_two_steps_and_counts_in_one():
    by_bytes = heavy_problem(5000)
    assert [by_bytes.memory_delta(0, kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [100, -60, -40, -100]
    by_count = make_problem(1, 1, 3, memory=Memory.microbatches([2]))
    assert [by_count.memory_delta(0, kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [1, 0, -1, -1]
    assert (by_count.capacity(0), make_problem(1, 1, 1).capacity(0)) == (2, None)


def test_a_stage_finishes_with_a_reduction_over_its_live_peers_and_a_step():
    # Two peers: two steps of 300 bytes over 10 bytes/µs with 5 µs latency each, then 4 µs of optimizer.
    assert heavy_problem(5000).finish_us(0) == 2 * (30 + 5) + 4
    assert heavy_problem(5000, pipelines=1).finish_us(0) == 4
