"""The memory of workers by a plan, against hand-made rows and a count of every micro-batch in flight."""

from array import array
from dataclasses import replace
from random import Random

import pytest

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.layer_shares import LayerShare
from recycle.core.layer_sums import LayerSums
from recycle.core.plans.memory_use import memory_use, memory_use_of
from recycle.core.plans.plan import Plan, Quality, Row
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile, StageProfile
from tests.runtime.random_cuts import cut_at_random

STAGE = StageProfile(10, 13, 9, 22, activation_bytes=100, weight_held_bytes=30, static_bytes=10**6)


@pytest.mark.parametrize(
    ("kinds", "peak_bytes"),
    [
        ("", 0),
        ("FB", 100),
        ("FFBB", 200),
        ("FBFB", 100),
        ("FFIIWW", 200),
        ("FIFIFIFWWWW", 100 + 3 * 30),
        ("FFIFBIWWB", 230),
    ],
)
def test_without_cuts_the_peak_is_that_of_the_memory_model(kinds: str, peak_bytes: int) -> None:
    numbers = array("q", range(len(kinds)))
    row = Row(Worker(0, 0), kinds, numbers, numbers)
    problem = Problem(Cluster(Shape(1, 1, 1)), Profile((STAGE,)), Memory.microbatches([3]))
    used = memory_use(Plan(problem, (row,), 1, Quality(0, "feasible", "", 0.0)))[Worker(0, 0)]
    assert used == (10**6, 0, peak_bytes)
    assert used.total_bytes == 10**6 + peak_bytes


def uneven_profile() -> Profile:
    """Three stages of three layers, of which no two are equal."""
    layers = tuple(tuple(LayerShare(activation=1 + 3 * s + k, parameters=2 + k) for k in range(3)) for s in range(3))
    stages = (replace(STAGE, static_bytes=900 * (s + 1)) for s in range(3))
    return Profile(tuple(stages), layers=layers)


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_with_cuts_every_micro_batch_counts_by_its_own_layers_and_every_layer_that_is_held(shared: int) -> None:
    plan = recycle.solve(recycle.problem(2, 3, 5, costs=(10, 13, 9), fail="W1_1"), "greedy", effort=1000)
    plan = cut_at_random(plan, 9, shared, Random(shared))
    profile, bounds = uneven_profile(), (0, 3, 6, 9)
    sums = LayerSums(profile)
    found = memory_use(plan, profile)
    assert set(found) == {row.worker for row in plan.rows}
    for row in plan.rows:
        stage, held, peak = row.worker.stage, dict[int, int](), 0
        for kind, chain in zip(row.kinds, row.chains, strict=True):
            cut = [0, *(plan.cuts[boundary][chain] for boundary in range(2)), 0]
            layers = range(bounds[stage] + cut[stage], bounds[stage + 1] + cut[stage + 1])
            whole, rest = (sums.total(name, layers) for name in ("activation_bytes", "weight_held_bytes"))
            if kind == "F":
                held[chain] = whole
            elif kind == "I":
                held[chain] = min(whole, rest)
            else:
                del held[chain]
            peak = max(peak, sum(held.values()))
        layers = range(max(0, bounds[stage] - shared), min(9, bounds[stage + 1] + shared))
        used = found[row.worker]
        assert used.activation_bytes == peak
        assert used.own_bytes == 900 * (stage + 1)
        assert used.static_bytes == sum(sums.total("static_bytes", range(layer, layer + 1)) for layer in layers)
        assert memory_use_of(row.worker, plan, profile) == used
    assert memory_use_of(Worker(1, 1), plan, profile) is None
