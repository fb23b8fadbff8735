"""Rehearsals in a race: what ops cost is measured anew in every round, and once."""

from dataclasses import replace

import pytest

from recycle.core.profile import Link, Profile, StageProfile, Taken
from recycle.evaluate.hardware.race import run_race
from recycle.evaluate.hardware.round_profiles import round_path, round_profiles
from recycle.evaluate.hardware.variants import variants
from tests.evaluate.hardware.tiny_setup import TINY, save_plans

pytestmark = pytest.mark.timeout(120)
TAKEN = Taken("cpu", "a machine", "2.13.0", TINY.pipelines, TINY.samples, TINY.model)
# Costs that no machine has: whoever keeps them has not measured.
KNOWN = Profile(
    tuple(
        StageProfile(
            1, 1, 1, 2, activation_bytes=40 + stage, weight_held_bytes=30, static_bytes=20, gradient_bytes=1000, output_bytes=10
        )
        for stage in range(TINY.stages)
    ),
    stage_link=Link(3, 1.0),
    taken=TAKEN,
)


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raced")
    save_plans(folder)
    run_race(folder, TINY, variants(TINY)[:1], 2, 1, lambda trial, done, of: None, KNOWN)
    return folder


def test_every_round_has_a_profile_of_its_own(raced):
    assert sorted(round_profiles(raced)) == [0, 1]
    one, other = round_profiles(raced).values()
    assert one.stages != other.stages


def test_times_are_measured_and_sizes_are_as_they_were_known(raced):
    for profile in round_profiles(raced).values():
        assert profile.taken == TAKEN
        for made, known in zip(profile.stages, KNOWN.stages, strict=True):
            assert min(made.forward_us, made.input_us, made.weight_us, made.optimizer_us) > 5
            sizes = ("activation_bytes", "weight_held_bytes", "static_bytes", "gradient_bytes", "output_bytes")
            assert [getattr(made, name) for name in sizes] == [getattr(known, name) for name in sizes]


def test_a_round_that_was_rehearsed_is_not_rehearsed_again(raced):
    before = round_path(raced, 1).read_bytes()
    (raced / "measured.jsonl").unlink()
    run_race(raced, TINY, variants(TINY)[:1], 2, 1, lambda trial, done, of: None, replace(KNOWN, name="another"))
    assert round_path(raced, 1).read_bytes() == before


def test_without_a_profile_nobody_rehearses(raced, tmp_path):
    save_plans(tmp_path)
    run_race(tmp_path, TINY, variants(TINY)[:1], 1, 1, lambda trial, done, of: None)
    assert round_profiles(tmp_path) == {}


def test_a_round_of_which_only_the_rehearsal_is_missing_gets_it(raced):
    round_path(raced, 1).unlink()
    turns = []
    run_race(raced, TINY, variants(TINY)[:1], 2, 1, lambda trial, done, of: turns.append(trial), KNOWN)
    assert round_path(raced, 1).exists()
    assert turns == []
