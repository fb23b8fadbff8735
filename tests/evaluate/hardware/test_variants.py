"""The variants: with any dead worker or dropped pipeline, an iteration trains on the same micro-batches."""

from collections import Counter

import pytest

from recycle.core.cluster import Cluster, Worker
from recycle.core.problem import Techniques
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.torch_contender import TORCH
from recycle.evaluate.hardware.variants import variants
from tests.evaluate.hardware.tiny_setup import TINY

SETUPS = [Setup.usual("cpu-cores", 12), Setup.usual("cpu-cores", 8), Setup.usual("gpu-slices", 16), TINY]
CASES = [
    pytest.param(setup, variant, id=f"{setup.num_workers}-{variant.name}") for setup in SETUPS for variant in variants(setup)
]


def dead_of(variant):
    return [Worker.parse(name) for name in variant.dead.split(",")] if variant.dead else []


@pytest.mark.parametrize(("setup", "variant"), CASES)
def test_an_iteration_has_all_micro_batches_in_every_variant(setup, variant):
    assert variant.shape(setup).num_chains == setup.shape.num_chains
    assert variant.shape(setup).num_stages == setup.stages
    assert variant.num_samples(setup) == setup.pipelines * setup.microbatches * setup.samples


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_where_a_pipeline_is_dropped_the_others_share_its_micro_batches(setup):
    (dropped,) = [variant for variant in variants(setup) if variant.dropped is not None]
    left = dropped.pipelines(setup)
    assert set(left) | {dropped.dropped} == set(range(setup.pipelines))
    assert dropped.dropped not in left
    shape = dropped.shape(setup)
    assert shape.num_pipelines == len(left) == setup.pipelines - 1
    assert shape.num_microbatches - setup.microbatches == setup.microbatches / len(left)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_the_dropped_pipeline_is_that_of_the_dead_worker(setup):
    by_name = {variant.name: variant for variant in variants(setup)}
    (dead,) = dead_of(by_name["adaptive"])
    assert by_name["dropped"].dropped == dead.pipeline
    assert by_name["dropped"].dead == by_name["decoupled"].dead == by_name["staggered"].dead == str(dead)


@pytest.mark.parametrize(("setup", "variant"), CASES)
def test_the_dead_are_distinct_workers_of_the_cluster_and_never_all_of_a_stage(setup, variant):
    dead = dead_of(variant)
    assert len(set(dead)) == len(dead)
    assert set(dead) <= set(setup.shape.workers())
    assert all(num < setup.pipelines for num in Counter(worker.stage for worker in dead).values())
    assert Cluster.of(setup.shape, dead).failed == set(dead)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_in_the_last_row_every_stage_has_one_dead(setup):
    assert sorted(worker.stage for worker in dead_of(variants(setup)[-1])) == list(range(setup.stages))


@pytest.mark.parametrize(("setup", "variant"), CASES)
def test_a_row_is_torchs_or_has_techniques_that_can_bear_its_dead(setup, variant):
    assert variant.is_torch == (variant.name in TORCH)
    if variant.is_torch:
        assert (variant.dead, variant.dropped) == ("", None)
    elif variant.dead and variant.dropped is None:
        assert Techniques.parse(variant.techniques).adaptive


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_every_row_has_a_name_and_a_title_of_its_own(setup):
    rows = variants(setup)
    assert len({row.name for row in rows}) == len({row.title for row in rows}) == len(rows)
