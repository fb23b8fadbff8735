"""Uneven stages with nobody dead: cuts level them, further than any static cut of the same layers could."""

import pytest

import recycle
from recycle.core.cluster import Cluster, Shape
from recycle.core.layer_shares import LayerShare
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile, StageProfile
from recycle.evaluate.hardware.static_cuts import best_static_cut, layer_work_us, static_cuts

# What a layer costs in F, I and W; the head, in the last layer, costs as much as two and a half.
LAYER, HEAD = (20, 26, 18), 2.5


def profile_of(numbers: tuple[int, ...], embedding: float = 0.0) -> Profile:
    """Stages of so many layers, with an embedding in the first layer and a head in the last."""
    extra = {0: embedding, sum(numbers) - 1: HEAD}
    weights = [1 + extra.get(layer, 0.0) for layer in range(sum(numbers))]
    stages, layers, start = [], [], 0
    for number in numbers:
        own, start = weights[start : start + number], start + number
        forward, split, weight = (round(cost * sum(own)) for cost in LAYER)
        stages.append(StageProfile(forward, split, weight, split + weight, activation_bytes=10, weight_held_bytes=5))
        layers.append(tuple(LayerShare(each, each, each) for each in own))
    return Profile(tuple(stages), layers=tuple(layers))


def plan_of(profile: Profile, shape: Shape, shared: int) -> recycle.Plan:
    memory = Memory.microbatches([2 * shape.num_stages] * shape.num_stages)
    return recycle.solve(Problem(Cluster(shape), profile, memory, shared_layers=shared), "greedy", effort=300_000)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(12, 4), (16, 4), (9, 3)])
def test_cuts_beat_every_static_cut(num_layers: int, num_stages: int) -> None:
    shape = Shape(2, num_stages, 16)
    work_us = layer_work_us(profile_of((num_layers,)))
    numbers = best_static_cut(work_us, num_stages)
    profile = profile_of(numbers)
    uncut, cut = plan_of(profile, shape, 0), plan_of(profile, shape, 1)
    # A worker computes its stage of all 16 micro-batches of its pipeline: with any static cut an iteration takes that at least.
    loads = [max(stage_work_us(work_us, other)) for other in static_cuts(num_layers, num_stages)]
    assert cut.cuts
    assert not uncut.cuts
    assert cut.period_us < 16 * min(loads) <= uncut.period_us
    busy_us = [cut.busy_us(row) for row in cut.rows]
    assert max(busy_us) * len(busy_us) / sum(busy_us) < 1.03 < max(stage_work_us(work_us, numbers)) * num_stages / sum(work_us)


def stage_work_us(work_us: list[int], numbers: tuple[int, ...]) -> list[int]:
    """The work of each stage of a static cut."""
    stops = [sum(numbers[: stage + 1]) for stage in range(len(numbers))]
    return [sum(work_us[stop - number : stop]) for stop, number in zip(stops, numbers, strict=True)]


def test_an_embedding_is_levelled_too() -> None:
    profile, shape = profile_of((3, 3, 3), embedding=1.5), Shape(2, 3, 16)
    assert plan_of(profile, shape, 2).period_us < 0.9 * plan_of(profile, shape, 0).period_us


def test_equal_stages_are_not_cut() -> None:
    """With nobody dead and equal stages a plan without cuts has no more work at any worker."""
    problem = recycle.problem(3, 4, 24, costs=(40, 52, 36), memory=8, layers=24, shared_layers=2)
    plan = recycle.solve(problem, "greedy", effort=300_000)
    assert max(plan.busy_us(row) for row in plan.rows) == min(plan.busy_us(row) for row in plan.rows)


@pytest.mark.parametrize(
    ("work_us", "num_stages", "best"),
    [
        ([1, 1, 1, 1, 1, 5], 2, (5, 1)),
        ([1, 1, 1, 1, 1, 1], 3, (2, 2, 2)),
        ([5, 1, 1, 1], 2, (1, 3)),
        ([2, 1, 1, 1, 3], 3, (1, 3, 1)),
    ],
)
def test_the_best_static_cut_of_a_few_layers(work_us: list[int], num_stages: int, best: tuple[int, ...]) -> None:
    assert best_static_cut(work_us, num_stages) == best


def test_in_a_v_the_two_stages_of_a_worker_count_together() -> None:
    first, second, third, fourth = stage_work_us(work := [1, 1, 1, 1, 1, 3], best_static_cut(work, 4, is_v=True))
    assert first + fourth == second + third == 4


def test_all_static_cuts_are_tried() -> None:
    assert sorted(static_cuts(4, 3)) == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]
    assert len(list(static_cuts(16, 8))) == 6435  # 15 over 7
