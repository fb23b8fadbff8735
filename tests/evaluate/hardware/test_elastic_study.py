"""The study of elastic cuts: its variants run the same mathematics, and moved layers are as even as brute force makes them."""

import json
from dataclasses import replace
from itertools import product

import pytest

from recycle.core.errors import UserError
from recycle.core.profile import Profile, StageProfile
from recycle.evaluate.hardware.race import read_trials, run_race
from recycle.evaluate.hardware.setup import ELASTIC, Setup
from recycle.evaluate.hardware.variants import chosen_variants, layers_by_capacity, profile_of, variants
from recycle.evaluate.results.cluster_page import read_results
from recycle.evaluate.variant_plans import make_plans
from tests.evaluate.hardware.tiny_setup import TINY
from tests.processes import depends_on_load

TINY_ELASTIC = replace(TINY, pipelines=2, layers=8, study=ELASTIC)
PROFILE = Profile((StageProfile(40_000, 52_000, 36_000, 88_000, 90, 4000, 1000, 8000, 2000, 64),) * TINY.stages, name="made up")


@pytest.mark.parametrize("num_live", [(3, 3, 2, 3), (2, 1), (4, 4, 1, 3)])
@pytest.mark.parametrize("num_layers", [8, 11])
def test_moved_layers_are_as_even_as_any_others(num_layers, num_live):
    def slowest(layers):
        return max(own / live for own, live in zip(layers, num_live, strict=True))

    found = layers_by_capacity(num_layers, num_live)
    every = product(range(1, num_layers), repeat=len(num_live))
    assert sum(found) == num_layers
    assert slowest(found) == min(slowest(layers) for layers in every if sum(layers) == num_layers)


def test_a_stage_with_half_of_its_layers_costs_half_and_sends_as_much():
    (moved,) = [variant for variant in variants(TINY_ELASTIC) if variant.layers]
    stage = TINY.stages // 2
    assert moved.layers[stage] < 4
    made = profile_of(replace(moved, layers=(6, 2)), TINY_ELASTIC, PROFILE)
    assert made.stages[1] == replace(
        PROFILE.stages[1],
        forward_us=20_000,
        input_us=26_000,
        weight_us=18_000,
        fused_us=44_000,
        optimizer_us=45,
        activation_bytes=2000,
        weight_held_bytes=500,
        static_bytes=4000,
        gradient_bytes=1000,
    )
    assert made.stages[0].forward_us == 60_000
    assert list(map(len, made.layers)) == [6, 2]


def test_some_variants_can_be_chosen_and_the_baseline_is_among_them():
    assert [variant.name for variant in chosen_variants(TINY_ELASTIC, "cut, moved")] == ["all", "moved", "cut"]
    assert [variant.name for variant in chosen_variants(TINY, "dropped")] == ["1f1b", "dropped"]
    with pytest.raises(UserError, match="'cuts' is no variant of the study elastic: the variants are all, shared, rerouted"):
        chosen_variants(TINY_ELASTIC, "cuts")


def test_an_unknown_study_is_refused():
    with pytest.raises(UserError, match="the study is 'plastic', but it must be one of techniques, elastic"):
        Setup.usual("cpu-cores", study="plastic")


@pytest.mark.timeout(240)
def test_all_variants_come_to_the_same_losses_and_a_slow_worker_is_predicted_slow(tmp_path):
    rows = variants(TINY_ELASTIC)
    (tmp_path / "plans").mkdir()
    make_plans(tmp_path, TINY_ELASTIC, rows, PROFILE, lambda text: None)
    run_race(tmp_path, TINY_ELASTIC, rows, 1, 2, lambda trial, done, of: None)
    trials = {trial.variant: trial for trial in read_trials(tmp_path)}
    assert set(trials) == {variant.name for variant in rows}
    assert len({tuple(round(loss, 4) for loss in trial.losses) for trial in trials.values()}) == 1
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE.to_json()))
    found = {result.name: result for result in read_results(tmp_path, TINY_ELASTIC, rows).variants}
    alone = {name: result.predictions[0].ops_us for name, result in found.items()}
    with depends_on_load():
        assert alone["slow"] > 1.2 * alone["all"]
        assert alone["slow-cut"] < alone["slow"]
