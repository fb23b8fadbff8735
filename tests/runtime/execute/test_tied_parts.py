"""Sums of shared layers: all workers begin them in one order, and what the runtime waits for never makes a plan longer."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

import recycle
from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import RowProgram, row_programs
from recycle.core.plans.sum_order import OWN_SUM
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.tied_parameters import find_ties
from recycle.runtime.execute.row_program import compile_row
from recycle.runtime.execute.tied_parts import TiedPart, tied_parts
from recycle.sim.replay import replay as replaying
from recycle.sim.replay.op_graph import OpGraph
from recycle.sim.replay.shared_layers import LayerStep
from tests.runtime.random_cuts import cut_at_random

Parts = dict[Worker, tuple[list[TiedPart], list[TiedPart]]]
# The planner's plans, and with a seed some that are cut at random: shape, layers, shared layers, dead workers, seed.
CASES = [
    ((3, 4, 6), 24, 2, "", None),
    ((3, 4, 6), 24, 2, "W1_2", None),
    ((3, 4, 6), 24, 2, "W0_2,W1_2", None),
    ((3, 4, 12), 24, 1, "W0_0,W1_1,W2_2,W0_3", None),
    ((2, 3, 4), 9, 2, "W1_1", None),
    *[((2, 3, 4), 9, 2, "", seed) for seed in range(6)],
    *[((2, 3, 4), 9, 2, "W0_0", seed) for seed in range(6)],
]


def plan_of(shape: tuple[int, int, int], layers: int, shared: int, fail: str, seed: int | None) -> Plan:
    if seed is None:
        problem = recycle.problem(*shape, costs=(60, 78, 54), fail=fail, layers=layers, shared_layers=shared, memory=2 * shape[1])
        return recycle.solve(problem, "greedy", effort=3000)
    plain = recycle.solve(recycle.problem(*shape, costs=(60, 78, 54), fail=fail), "greedy", effort=1000)
    return cut_at_random(plain, layers, shared, Random(seed))


def parts_of(plan: Plan, layers: int, shared: int) -> Parts:
    """The parts of all workers, from real stages of small layers."""
    num_stages = plan.problem.shape.num_stages
    cuts = [layers // num_stages * stage for stage in range(1, num_stages)]
    modules = elastic_stages(recycle.cut(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))), cuts), shared)
    ties = find_ties(modules)
    found: Parts = {}
    for worker, program in row_programs(plan).items():
        module = modules[worker.stage]
        sums = make_sums(module.parameters(), plan.problem.shape.num_chains, is_exact=False, dtype=torch.float32)
        instructions = compile_row(RowProgram.parse(program.dumps()), plan.problem.shape)
        found[worker] = tied_parts(Stage(module, sums, worker.stage, None), ties, instructions, program.sum_order)
    return found


@pytest.mark.parametrize("case", CASES)
def test_all_workers_begin_the_sums_that_they_share_in_one_order(case):
    plan = plan_of(*case)
    orders = []
    for worker, (before, after) in parts_of(plan, *case[1:3]).items():
        own = [(worker.stage, OWN_SUM)]
        orders.append([*((part.tie.stages, part.layers) for part in before), *own, *((p.tie.stages, p.layers) for p in after)])
    # There is an order of all sums in which every worker's are, if and only if their pairs make no cycle.
    follows: dict[object, set[object]] = {}
    for order in orders:
        for one, other in pairwise(order):
            follows.setdefault(one, set()).add(other)
    done: set[object] = set()

    def visit(one: object, above: frozenset[object]) -> None:
        assert one not in above, f"workers would wait for each other at {one}"
        if one not in done:
            for other in follows.get(one, ()):
                visit(other, above | {one})
            done.add(one)

    for one in list(follows):
        visit(one, frozenset())


@pytest.mark.parametrize("case", CASES)
def test_the_waits_of_the_runtime_keep_the_period_of_the_plan(case, monkeypatch):
    plan = plan_of(*case)
    parts, programs, held = parts_of(plan, *case[1:3]), row_programs(plan), plan.problem.held_layers
    assert held is not None

    def waits(graph: OpGraph) -> Iterator[LayerStep]:
        """For each sum, the ops at which workers begin it, and the ops before which they wait for it."""
        firsts: dict[tuple[object, object], list[int]] = {}
        lasts: dict[tuple[object, object], list[int]] = {}
        for number, row in enumerate(plan.rows):
            begin, program, end = int(graph.bounds[number]), programs[row.worker], len(row) - 1
            before, after = parts[row.worker]
            for part in before:  # it begins behind the warm-up and those before it, and all of the next iteration waits for it
                lasts.setdefault((part.tie, part.layers), []).append(begin + max(part.complete_at, program.warm_up))
                firsts.setdefault((part.tie, part.layers), []).append(begin)
            first_use = min(program.warm_up, end)
            for part in reversed(after):  # whoever waits for one has waited for those before it
                assert part.layers is not None
                used = [plan.costs.layers(row.worker.stage, chain) for chain in row.chains[: first_use + 1]]
                first_use = next((at for at, layers in enumerate(used) if not part.layers.isdisjoint(layers)), first_use)
                lasts.setdefault((part.tie, part.layers), []).append(begin + end)
                firsts.setdefault((part.tie, part.layers), []).append(begin + first_use)
        for key, first in firsts.items():
            finish = max(held.finish_of_layer_us[layer] for layer in key[1])  # type: ignore[attr-defined]
            yield LayerStep(tuple(first), tuple(lasts[key]), finish)

    found = [replaying.replay(plan, recycle.Conditions(num_iterations=10, eager=True)).steady_period_us]
    monkeypatch.setattr(replaying, "layer_steps", lambda graph: list(waits(graph)))
    found.append(replaying.replay(plan, recycle.Conditions(num_iterations=10, eager=True)).steady_period_us)
    assert found[1] == pytest.approx(found[0], abs=1)
