"""A measured profile in a simulated job: cut anew it costs what an estimate of that cut costs, else what was measured."""

from dataclasses import fields
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.profile import Profile, Taken
from recycle.planner.profiles.catalog import parse_gpu, parse_model
from recycle.planner.profiles.estimate import estimate, layer_costs
from recycle.sim.job import SimulatedJob
from recycle.sim.measured_model import MeasuredModel, even_cut

MODEL, GPU = parse_model("llama-3.2-1b,tied=no,sequence=2048"), parse_gpu("a100-80")
GIB = 1 << 30


def measured(num_stages=4):
    """An estimated profile stands for a measured one: how it is cut otherwise is known from another estimate."""
    return MeasuredModel(estimate(MODEL, GPU, num_stages), 1)


def test_cut_as_it_was_measured_a_profile_is_the_measured_one():
    model = measured()
    assert model.profile_with(4) is model.profile
    assert model.profile_of(tuple(map(len, model.profile.layers))) is model.profile


@pytest.mark.parametrize("layers", [(16,), (8, 8), (5, 4, 4, 3), (1, 7, 7, 1), (3, 3, 3, 3, 2, 2)])
def test_another_cut_costs_what_the_estimate_of_that_cut_costs(layers):
    found, wanted = measured().profile_of(layers), estimate(MODEL, GPU, len(layers), layers=layers)
    assert [len(own) for own in found.layers] == list(layers)
    for ours, theirs in zip(found.stages, wanted.stages, strict=True):
        for field in fields(theirs):
            # The last stage sends nothing.
            if field.name not in ("spread", "output_bytes"):
                assert getattr(ours, field.name) == pytest.approx(getattr(theirs, field.name), rel=2e-3, abs=3), field.name
    assert [found.comm_us(stage) for stage in range(len(layers) - 1)] == [
        wanted.comm_us(stage) for stage in range(len(layers) - 1)
    ]


def test_layers_are_those_of_the_estimate_with_embedding_and_head_beside_them():
    found, wanted = measured().layer_costs(), layer_costs(MODEL, GPU)
    assert len(found) == len(wanted) == MODEL.num_layers + 2
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.forward_us == pytest.approx(theirs.forward_us, rel=5e-3, abs=3)
        assert ours.backward_us == pytest.approx(theirs.backward_us, rel=5e-3, abs=3)
        assert ours.num_parameters == pytest.approx(theirs.num_parameters, rel=1e-3, abs=10)


def test_the_number_of_parameters_follows_from_the_gradients():
    assert measured().num_parameters == pytest.approx(MODEL.num_parameters, rel=1e-3)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=9), st.integers(1, 9))
def test_an_even_cut_has_the_fastest_slowest_stage_of_all_cuts(times, num_stages):
    num_stages = min(num_stages, len(times))

    def slowest(bounds):
        return max(sum(times[start:end]) for start, end in pairwise(bounds))

    found = even_cut(tuple(times), num_stages)
    assert len(found) == num_stages
    assert min(found) >= 1
    bounds = [0]
    for number in found:
        bounds.append(bounds[-1] + number)
    assert bounds[-1] == len(times)
    every = ([0, *inner, len(times)] for inner in combinations(range(1, len(times)), num_stages - 1))
    assert slowest(bounds) == pytest.approx(min(map(slowest, every)))


def test_a_job_of_a_profile_has_the_same_fault_free_step_as_the_job_of_its_numbers(tmp_path):
    shape = Shape(2, 4, 8)
    estimated = SimulatedJob.of("llama-3.2-1b,tied=no,sequence=2048", "a100-80", shape)
    ours = SimulatedJob.of_profile(estimated.profile(), shape, GPU.memory_bytes)
    assert ours.problem() == estimated.problem()
    assert ours.samples_per_step == estimated.samples_per_step
    assert ours.layer_state_bytes == pytest.approx(estimated.layer_state_bytes, rel=1e-3)


def test_samples_of_a_micro_batch_are_those_of_the_measurement():
    taken = Taken("cuda", "NVIDIA H200", "2.11", 3, 2, "GPT")
    profile = Profile(measured().profile.stages, layers=measured().profile.layers, taken=taken)
    job = SimulatedJob.of_profile(profile, Shape(3, 4, 8), 80 * GIB)
    assert (job.samples_per_step, job.model.name, job.gpu.name) == (48, "GPT", "NVIDIA H200")


def test_a_profile_without_layers_is_refused_with_what_to_give():
    with pytest.raises(UserError, match="give --layers N"):
        SimulatedJob.of_profile(Profile.uniform(4, 10, 10, 10), Shape(2, 4, 8), GIB)


def test_more_stages_than_layers_and_too_little_memory_are_refused():
    with pytest.raises(UserError, match="more than the 16 layers of the profile"):
        SimulatedJob.of_profile(measured().profile, Shape(2, 17, 8), 80 * GIB)
    with pytest.raises(UserError, match="does not fit on"):
        SimulatedJob.of_profile(measured().profile, Shape(2, 4, 8), GIB)
