"""The order in which stages sum the gradients of the layers that they share, and which of them are summed in one go."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

import recycle
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import OWN_SUM, row_programs
from recycle.core.plans.rules import layer_windows, stage_windows
from recycle.core.profile import Link
from tests.runtime.random_cuts import cut_at_random

SHAPE, LAYERS, SHARED = (2, 4, 5), 16, 2
LINKS = {"free": Link(0, 1e12), "quick": Link(1, 40.0), "slow": Link(50, 0.2)}


def plan_of(seed: int, link: str) -> Plan:
    plain = recycle.solve(recycle.problem(*SHAPE, costs=(10, 13, 9), comm=1), "greedy", effort=1000)
    plan = cut_at_random(plain, LAYERS, SHARED, Random(seed))
    profile = plan.problem.profile
    stages = tuple(replace(stage, gradient_bytes=400) for stage in profile.stages)
    return replace(plan, problem=replace(plan.problem, profile=replace(profile, stages=stages, peer_link=LINKS[link])))


def orders(plan: Plan) -> list[list[tuple[int, ...]]]:
    """By stage, the sums in their order."""
    by_stage = {worker.stage: program.sum_order for worker, program in row_programs(plan).items()}
    return [list(map(tuple, by_stage[stage])) for stage in sorted(by_stage)]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("seed", range(5))
def test_each_layer_is_summed_once_with_others_of_the_same_stages_in_one_order_for_all(seed, link):
    plan = plan_of(seed, link)
    held, found = plan.problem.held_layers, orders(plan)
    assert held is not None
    for stage, order in enumerate(found):
        assert sorted(layer for layers in order for layer in layers) == [one for one in held.ranges[stage] if one in held.shared]
        assert order.count(OWN_SUM) == 1
        for layers in filter(None, order):
            assert {held.holders[layer] for layer in layers} == {held.holders[layers[0]]}
    for one, other in combinations(found, 2):
        common = set(one) & set(other) - {OWN_SUM}
        assert [layers for layers in one if layers in common] == [layers for layers in other if layers in common]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("seed", range(5))
def test_a_layer_waits_for_others_no_longer_than_its_own_sum_takes(seed, link):
    plan = plan_of(seed, link)
    held, windows, of_layers = plan.problem.held_layers, stage_windows(plan), layer_windows(plan)
    assert held is not None

    def end_us(layer: int) -> int:
        home = next(stage for stage in held.holders[layer] if held.sums.bounds[stage] <= layer < held.sums.bounds[stage + 1])
        return of_layers.get(layer, windows[home])[1]

    together = {layers for order in orders(plan) for layers in order if layers}
    for layers in together:
        ends = sorted((end_us(layer), layer) for layer in layers)
        assert ends[-1][0] - ends[0][0] <= held.sum_us([ends[0][1]])
    for one, other in combinations(sorted(together, key=lambda layers: min(map(end_us, layers))), 2):
        if held.holders[one[0]] == held.holders[other[0]]:
            assert min(map(end_us, other)) - min(map(end_us, one)) > held.sum_us([min(one, key=end_us)])


def test_slow_sums_are_few():
    numbers = [len({layers for order in orders(plan_of(1, link)) for layers in order}) for link in LINKS]
    assert numbers[0] > numbers[-1] == 1 + 3  # the own ones, and those of each boundary
