"""Costs by stage, the links, and the profile on disk."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.errors import FileProblem, UserError
from recycle.core.op import Kind
from recycle.core.profile import FORMAT, VERSION, Link, Profile, Spread, StageProfile, Taken

MICROS, BYTES = st.integers(1, 10**7), st.integers(0, 10**12)


@st.composite
def stage_profiles(draw):
    forward, split, weight = draw(MICROS), draw(MICROS), draw(MICROS)
    activation = draw(BYTES)
    return StageProfile(
        forward,
        split,
        weight,
        fused_us=split + draw(st.integers(0, 10**7)),
        optimizer_us=draw(MICROS),
        activation_bytes=activation,
        weight_held_bytes=draw(st.integers(0, activation)),
        static_bytes=draw(BYTES),
        gradient_bytes=draw(BYTES),
        output_bytes=draw(BYTES),
        spread=draw(st.builds(Spread, *[st.integers(0, 10**7)] * 4)),
    )


LINKS = st.builds(Link, st.integers(0, 10**6), st.floats(1e-3, 1e9))
COUNTS = st.integers(1, 1000)
TAKEN = st.builds(Taken, st.text(), st.text(), st.text(), COUNTS, COUNTS, st.text())
PROFILES = st.builds(
    Profile,
    st.lists(stage_profiles(), min_size=1, max_size=4).map(tuple),
    LINKS,
    LINKS,
    st.none() | st.integers(1, 10**13),
    st.text(),
    st.none() | TAKEN,
    st.lists(st.floats(0.1, 10), max_size=4).map(tuple),
    st.lists(st.floats(0.1, 10), max_size=4).map(tuple),
)


@given(PROFILES)
def test_a_profile_survives_json(profile):
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_survives_its_file(tmp_path):
    profile = Profile.uniform(3, 10, 12, 8, comm_us=2)
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_json()))
    assert Profile.load(tmp_path / "profile.json") == profile


def test_every_kind_has_its_own_cost():
    stage = StageProfile(1, 2, 3, fused_us=4)
    assert [stage.duration_us(kind) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [1, 2, 3, 4]


def test_three_costs_make_equal_stages_whose_backward_is_the_sum_of_its_halves():
    profile = Profile.uniform(4, 10, 12, 8, comm_us=5)
    assert len(set(profile.stages)) == 1
    assert profile.stages[0].fused_us == 20
    assert [profile.comm_us(stage) for stage in range(3)] == [5, 5, 5]


def test_a_message_takes_latency_plus_size_over_bandwidth_rounded_up():
    link = Link(latency_us=7, bytes_per_us=1000)
    assert [link.time_us(size) for size in (0, 1, 1000, 1001)] == [7, 8, 8, 9]


def test_a_ring_of_peers_moves_the_gradients_almost_twice():
    stage = replace(StageProfile(1, 1, 1, 2), gradient_bytes=12_000)
    profile = Profile((stage,), peer_link=Link(latency_us=3, bytes_per_us=100))
    # 4 peers: 6 steps of 3000 bytes, 30 µs each, and 3 µs of latency a step.
    assert profile.reduce_us(0, num_live=4) == 6 * 30 + 6 * 3
    assert profile.reduce_us(0, num_live=2) == 2 * 60 + 2 * 3
    assert profile.reduce_us(0, num_live=1) == 0


@pytest.mark.parametrize("field", ["forward_us", "input_us", "weight_us", "fused_us"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "10", None, True])
def test_a_cost_is_a_whole_number_of_at_least_one(field, value):
    costs = {"forward_us": 1, "input_us": 1, "weight_us": 1, "fused_us": 2, field: value}
    with pytest.raises(UserError, match=rf"{field} is .* must be a whole number of at least 1"):
        StageProfile(**costs)


@pytest.mark.parametrize("field", ["optimizer_us", "activation_bytes", "static_bytes", "gradient_bytes", "output_bytes"])
def test_a_size_is_not_negative(field):
    with pytest.raises(UserError, match=rf"{field} is -1, but it must be a whole number of at least 0"):
        StageProfile(1, 1, 1, 2, **{field: -1})


def test_a_weight_gradient_cannot_keep_more_than_the_forward_stored():
    with pytest.raises(UserError, match="weight_held_bytes is 11, more than activation_bytes 10"):
        StageProfile(1, 1, 1, 2, activation_bytes=10, weight_held_bytes=11)


def test_a_whole_backward_is_not_shorter_than_its_first_half():
    with pytest.raises(UserError, match="fused_us is 4, less than input_us 5"):
        StageProfile(1, 5, 1, fused_us=4)


@pytest.mark.parametrize("bandwidth", [0, -1, float("inf"), float("nan"), "fast", 10**400])
def test_a_link_needs_a_finite_bandwidth(bandwidth):
    with pytest.raises(UserError, match=r"bytes_per_us is .* must be a finite number above 0"):
        Link(0, bandwidth)


@pytest.mark.parametrize("latency", [-1, 0.5, "1"])
def test_a_link_needs_a_whole_latency(latency):
    with pytest.raises(UserError, match=r"latency_us is .* must be a whole number of at least 0"):
        Link(latency, 1.0)


def test_a_profile_has_a_stage_and_a_device_has_memory():
    with pytest.raises(UserError, match="the profile has no stage"):
        Profile(())
    with pytest.raises(UserError, match="device_bytes is 0"):
        Profile((StageProfile(1, 1, 1, 2),), device_bytes=0)


JSON_TAKEN = {"device": "cpu", "machine": "m", "torch": "2.11", "pipelines": 2, "samples": 2, "model": "GPT"}


def broken(change):
    data = json.loads(json.dumps(Profile.uniform(2, 1, 1, 1).to_json()))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("stages"), "the profile has no list of stages"),
        (lambda data: data.update(stages={}), "the profile has no list of stages"),
        (lambda data: data.update(stages=[]), "the profile has no stage"),
        (lambda data: data["stages"].__setitem__(1, None), "stage 1 is missing"),
        (lambda data: data["stages"][1].pop("input_us"), "stage 1 lacks input_us"),
        (lambda data: data["stages"][1].update(speed=3), "stage 1 has unknown keys speed"),
        (lambda data: data["stages"][1].update(weight_us=0), "stage 1: weight_us is 0"),
        (lambda data: data["stage_link"].update(color="red"), "links are malformed.*color"),
        (lambda data: data.update(peer_link=[1, 2]), "links are malformed"),
        (lambda data: data["peer_link"].update(latency_us=-1), "latency_us is -1"),
        (lambda data: data["stages"][1].update(spread={"forward_us": -1}), "stage 1: the spread forward_us is -1"),
        (lambda data: data["stages"][1].update(spread={"forwards_us": 1}), "stage 1: its spread is malformed.*forwards_us"),
        (lambda data: data["stages"][1].update(spread=7), "stage 1: its spread is malformed"),
        (lambda data: data.update(contention=[0.9, -0.1]), "contention cannot be read: each must be a finite number above 0"),
        (lambda data: data.update(contention={"share": 0.1}), "contention cannot be read: give a list of numbers"),
        (lambda data: data.update(factors=[1.0, 0]), "factors cannot be read: each must be a finite number above 0"),
        (lambda data: data.update(factors=1.0), "factors cannot be read: give a list of numbers"),
        (lambda data: data.update(taken={"device": "cpu"}), "what it was taken on are malformed.*machine"),
        (lambda data: data.update(taken={**JSON_TAKEN, "pipelines": 0}), "taken with 0 pipelines"),
        (lambda data: data.update(taken={**JSON_TAKEN, "model": 3}), "taken on a model of 3"),
    ],
)
def test_a_broken_profile_file_is_explained_and_named(tmp_path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(broken(change)))
    with pytest.raises(UserError, match=rf"profile .*profile\.json: .*{message}"):
        Profile.load(path)


def test_a_foreign_file_is_no_profile(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps({"format": "recycle-plan", "version": VERSION}))
    with pytest.raises(FileProblem, match=f"is not a {FORMAT} file"):
        Profile.load(tmp_path / "profile.json")


def test_what_was_not_measured_is_not_in_the_file():
    data = Profile.uniform(2, 1, 1, 1).to_json()
    assert not {"taken", "factors", "contention"} & set(data)
    assert all("spread" not in stage for stage in data["stages"])


def test_jitter_is_the_deviation_of_a_normal_distribution_with_the_median_spread():
    # Half of what is between the quartiles of a normal distribution is 0.6745 of its deviation.
    stage = StageProfile(1000, 2000, 500, 2000, spread=Spread(10, 20, 50, 20))
    assert Profile((stage,)).jitter == pytest.approx(0.01 / 0.6745)
    assert Profile.uniform(2, 1, 1, 1).jitter == 0


def test_ops_take_longer_the_more_others_compute_and_no_more_than_with_the_most_that_were_seen():
    profile = replace(Profile.uniform(2, 1, 1, 1), contention=(0.9, 1.0, 1.2))
    assert [profile.held_up(num) for num in range(5)] == [0.9, 1.0, 1.2, 1.2, 1.2]
    assert Profile.uniform(2, 1, 1, 1).held_up(7) == 1
