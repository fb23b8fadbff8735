"""The layers that stages compute by a plan, counted op by op in the programs of its workers."""

from collections import defaultdict

import pytest

import recycle
from recycle.core.plans.carried_layers import carried_by_stage
from recycle.core.plans.row_programs import row_programs

SHAPE = (3, 4, 6)


@pytest.mark.parametrize("given", [{"fail": "W1_2"}, {"speeds": "W0_1=0.6"}, {"fail": "W0_0,W1_3"}])
def test_it_is_the_mean_over_the_forward_ops_of_a_stage(given: dict[str, str]) -> None:
    plan = recycle.solve(recycle.problem(*SHAPE, costs="40,52,36", layers=16, shared_layers=1, **given), "greedy", effort=100_000)
    assert plan.cuts
    computed: dict[int, list[int]] = defaultdict(list)
    for worker, program in row_programs(plan).items():
        for kind, first, end in zip(program.kinds, program.first_layers, program.end_layers, strict=True):
            if kind == "F":
                computed[worker.stage].append(end - first)
    means = [sum(own) / len(own) for _, own in sorted(computed.items())]
    assert carried_by_stage(plan) == pytest.approx(means, abs=0.005)
    assert sum(carried_by_stage(plan)) == pytest.approx(16, abs=0.02)


def test_a_stage_that_lost_a_worker_computes_less() -> None:
    plan = recycle.solve(
        recycle.problem(*SHAPE, costs="40,52,36", layers=16, shared_layers=1, fail="W1_2"), "greedy", effort=100_000
    )
    assert carried_by_stage(plan)[2] < 4
    assert min(carried_by_stage(plan)) == carried_by_stage(plan)[2]


def test_without_shared_layers_there_is_nothing_to_say() -> None:
    assert carried_by_stage(recycle.solve(recycle.problem(*SHAPE, costs="40,52,36", layers=16), "greedy", effort=1000)) == ()


def test_shared_layers_that_no_micro_batch_uses_are_carried_by_their_stages() -> None:
    plan = recycle.solve(recycle.problem(2, 2, 2, costs="40,52,36", layers=8, shared_layers=1), "greedy", effort=1000)
    assert carried_by_stage(plan) == (4, 4)
