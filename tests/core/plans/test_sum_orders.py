"""The order in which stages sum the gradients of the layers that they share, and which of them are summed in one go."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

import recycle
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.core.plans.rules import layer_windows, stage_windows
from recycle.core.plans.sum_order import OWN_SUM
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


def done_us(plan: Plan, found: list[list[tuple[int, ...]]]) -> list[int]:
    """By stage, when its sums are done if its workers do them in this order, each when all of its holders are there."""
    held, windows, of_layers = plan.problem.held_layers, stage_windows(plan), layer_windows(plan)
    assert held is not None
    left, free_us = [list(order) for order in found], [0] * len(found)
    while any(left):
        before = sum(map(len, left))
        for stage in range(len(found)):
            if not left[stage]:
                continue
            layers = left[stage][0]
            own = [layer for layer in held.ranges[stage] if held.holders[layer] == (stage,)]
            holders = held.holders[layers[0]] if layers else (stage,)
            if any(not left[other] or left[other][0] != layers for other in holders):
                continue
            ready_us = max(of_layers.get(layer, (0, 0))[1] for layer in layers) if layers else windows[stage][1]
            begin_us = max(ready_us, *(free_us[other] for other in holders))
            for other in holders:
                left[other].pop(0)
                free_us[other] = begin_us + held.sum_us(layers or own)
        assert sum(map(len, left)) < before, "workers wait for each other for ever"
    return free_us


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("seed", range(5))
def test_no_order_lets_workers_wait_for_each_other_for_ever_and_no_stage_waits_for_sums_that_end_after_it(seed, link):
    plan = plan_of(seed, link)
    found, windows = orders(plan), stage_windows(plan)
    assert all(done > end for done, (_, end) in zip(done_us(plan, found), windows, strict=True)) or link == "free"
    for order, (_, end_us) in zip(found, windows, strict=True):
        before = order[: order.index(OWN_SUM)]
        assert all(layer_windows(plan).get(layer, (0, 0))[1] < end_us for layers in before for layer in layers)


def test_sums_of_a_deep_pipeline_do_not_wait_for_each_other_along_all_of_it():
    """In the order in which their use ends, the sum of each boundary waits for that of the boundary before it."""
    problem = recycle.problem(4, 16, 32, costs=(40, 52, 36), layers=64, shared_layers=2, fail="W1_5")
    stages = tuple(replace(stage, gradient_bytes=20, optimizer_us=10) for stage in problem.profile.stages)
    slow = replace(problem, profile=replace(problem.profile, stages=stages, peer_link=Link(0, 1.0)))
    plan = recycle.solve(slow, "greedy", effort=3000)
    found, held, of_layers = orders(plan), plan.problem.held_layers, layer_windows(plan)
    assert held is not None
    ends_us = [end for _, end in stage_windows(plan)]

    def by_end(stage: int) -> list[tuple[int, ...]]:
        def end_us(layers: tuple[int, ...]) -> int:
            return max(of_layers[layer][1] for layer in layers) if layers else ends_us[stage]

        return sorted(found[stage], key=lambda layers: (end_us(layers), layers))

    def longest_us(of_stages: list[list[tuple[int, ...]]]) -> int:
        return max(done - end for done, end in zip(done_us(plan, of_stages), ends_us, strict=True))

    assert longest_us(found) < 0.7 * longest_us([by_end(stage) for stage in range(len(found))])
