"""Costs of runs of layers: whole stages cost what the profile says, and a micro-batch costs the same wherever it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.layer_sums import LayerSums
from recycle.core.op import Kind
from recycle.core.profile import Profile, StageProfile

TIMES = {Kind.F: "forward_us", Kind.I: "input_us", Kind.W: "weight_us", Kind.B: "fused_us"}
weights = st.floats(0.1, 10)
layers = st.builds(LayerShare, weights, weights, weights, weights, weights)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        forward, split, weight = (draw(st.integers(1, 50)) for _ in range(3))
        stages.append(
            StageProfile(forward, split, weight, split + draw(st.integers(0, 60)), activation_bytes=draw(st.integers(0, 99)))
        )
    shares = tuple(tuple(draw(st.lists(layers, min_size=1, max_size=5))) for _ in stages)
    return Profile(tuple(stages), layers=shares)


@given(profiles())
def test_a_whole_stage_costs_what_its_profile_says(profile: Profile) -> None:
    sums = LayerSums(profile)
    for stage, costs in enumerate(profile.stages):
        whole = range(sums.bounds[stage], sums.bounds[stage + 1])
        assert {kind: sums.duration_us(kind, whole) for kind in Kind} == {kind: costs.duration_us(kind) for kind in Kind}
        assert sums.total("activation_bytes", whole) == costs.activation_bytes


@given(profiles(), st.data())
def test_a_micro_batch_costs_the_same_wherever_it_is_cut(profile: Profile, data: st.DataObject) -> None:
    sums = LayerSums(profile)
    cut = data.draw(st.integers(0, sums.num_layers))
    for name in TIMES.values():
        parts = sums.total(name, range(cut)) + sums.total(name, range(cut, sums.num_layers))
        assert parts == sum(getattr(stage, name) for stage in profile.stages)


def test_equal_layers_differ_by_a_microsecond_at_most() -> None:
    sums = LayerSums(Profile.uniform(8, 10, 13, 9).with_equal_layers(32))
    assert sorted({sums.total("forward_us", range(layer, layer + 1)) for layer in range(32)}) == [2, 3]


def test_a_fused_backward_equals_input_and_weight_everywhere_if_it_does_in_the_stage() -> None:
    sums = LayerSums(Profile.uniform(3, 10, 13, 9).with_equal_layers(15))
    for layer in range(15):
        one = range(layer, layer + 1)
        assert sums.total("fused_us", one) == sums.total("input_us", one) + sums.total("weight_us", one)


def test_layers_survive_the_file_of_a_profile() -> None:
    uneven = ((LayerShare(forward=2.5, parameters=0), LayerShare()), (LayerShare(),) * 3)
    profile = Profile(Profile.uniform(2, 10, 13, 9).stages, layers=uneven)
    assert profile.to_json()["layers"] == [[{"forward": 2.5, "parameters": 0}, {}], 3]
    assert Profile.from_json(profile.to_json()) == profile


def test_a_profile_without_layers_is_written_as_before() -> None:
    assert "layers" not in Profile.uniform(2, 10, 13, 9).to_json()


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ("x", "give a list"),
        ([2], "layers for 1 stages"),
        ([0, 2], "number of at least 1"),
        ([[{}], [{"size": 1}]], "unknown keys size"),
        ([[{}], [{"forward": -1}]], "at least 0"),
        ([[{}], [{"forward": 0}]], "no share of its cost 'forward'"),
    ],
)
def test_layers_that_cannot_be_used_are_refused(entries: object, complaint: str) -> None:
    data = Profile.uniform(2, 10, 13, 9).to_json() | {"layers": entries}
    with pytest.raises(UserError, match=complaint):
        Profile.from_json(data)


def test_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="30 layers cannot be divided equally over 8 stages"):
        Profile.uniform(8, 10, 13, 9).with_equal_layers(30)
