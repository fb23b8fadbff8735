"""Emulated devices: how long ops take on them, in a whole plan that real workers run."""

from dataclasses import replace
from functools import partial

import pytest

import recycle
from recycle.core.op import Kind, Op
from recycle.core.plans.row_programs import row_programs
from recycle.evaluate.hardware.contenders import Contender, ContenderTurn
from recycle.evaluate.hardware.race import run_trial
from recycle.evaluate.hardware.setup import ELASTIC, EMULATED
from recycle.profiling.emulated_device import EmulatedDevice
from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse
from recycle.profiling.worker_pool import worker_pool
from tests.evaluate.hardware.tiny_setup import TINY
from tests.processes import depends_on_load

SETUP = replace(TINY, backend=EMULATED, study=ELASTIC, layers=8)
DEVICE = EmulatedDevice(10_000, 13_000, 9_000, num_layers=4)
ITERATIONS = 4


def test_an_op_takes_the_time_of_its_layers() -> None:
    assert [DEVICE.op_us(kind, 3) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [30_000, 39_000, 27_000, 66_000]


@pytest.mark.timeout(120)
def test_every_op_of_a_run_takes_the_time_of_the_layers_that_its_plan_gives_it() -> None:
    """Ops on more layers take longer, and all of a slow worker; on a busy machine some iterations take longer still."""
    wanted = recycle.problem(2, 2, 2, costs="40000,52000,36000", layers=8, shared_layers=1, speeds="W0_1=0.5")
    plan = recycle.solve(wanted, "greedy", effort=10_000)
    assert plan.cuts
    boundaries = SETUP.job(plan).boundaries()
    turn = ContenderTurn(1, "cut", ITERATIONS, plan, range(2), wanted.speeds)
    with worker_pool(list(SETUP.shape.workers()), partial(Contender, SETUP, boundaries)) as pool:
        _, results = run_trial(pool, turn, 0)
    for worker, program in row_programs(plan).items():
        speed = 0.5 if str(worker) == "W0_1" else 1
        iterations = [[span for span in spans if span.is_op] for spans in results[worker].run.spans]
        assert {len(ops) for ops in iterations} == {len(program.kinds)}
        for number, (kind, first, end) in enumerate(zip(program.kinds, program.first_layers, program.end_layers, strict=True)):
            least_us = DEVICE.op_us(Kind(kind), end - first) / speed
            took_us = [ops[number].end_us - ops[number].start_us for ops in iterations]
            assert {Op.parse(ops[number].label, 0).kind.value for ops in iterations} == {kind}
            assert least_us <= min(took_us)
            if number < len(program.kinds) - 1:  # sums begin within the last op, and it may wait for them
                with depends_on_load():
                    assert min(took_us) < 2 * least_us


@pytest.mark.timeout(120)
def test_a_rehearsal_finds_the_times_of_the_device() -> None:
    job = SETUP.job(rehearsal_plan(SETUP.shape, is_split=True))
    found = rehearse(job, SETUP.model, Patience(least_rounds=1, most_rounds=1), device=SETUP.emulated).profile
    for stage in found.stages:
        with depends_on_load():
            assert (stage.forward_us, stage.input_us, stage.weight_us) == pytest.approx((40_000, 52_000, 36_000), rel=0.2)
    assert found.layers == ()
