"""A stage steps its own layers before the sums of its guests are there: the weights are those of a run that waits for all."""

import time
from collections import Counter
from random import Random

import pytest
import torch
from torch import nn

import recycle
from recycle.core.cluster import Shape
from recycle.core.plans.plan import Plan
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.state_digests import digest
from recycle.runtime.execute.executor import Executor
from recycle.runtime.execute.gradient_reduction import GradientReduction
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from recycle.runtime.transport.message_queue import MessageQueue
from tests.runtime.jobs import WIDTH, Explodes, Numbers, adamw, loss
from tests.runtime.random_cuts import cut_at_random
from tests.runtime.reference_executor import ReferenceExecutor
from tests.runtime.transport.worker_threads import train_in_threads

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
LAYERS, STEPS, SEED, SHARED = 9, 4, 5, 2
# Between the norms of the first steps: some are clipped, some are not.
CLIPPING = 0.02345


class CountingAdamW(torch.optim.AdamW):
    """An optimizer that is not torch's own: it may count its steps."""


def stages() -> list[nn.Module]:
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return recycle.cut(nn.Sequential(*layers), [3, 6])


def plan_of(fail: str, seed: int | None) -> Plan:
    """A plan with random cuts; without a seed, the planner's own."""
    if seed is None:
        problem = recycle.problem(2, 3, 4, costs=(10, 13, 9), comm=1, fail=fail, layers=LAYERS, shared_layers=SHARED)
        return recycle.solve(problem, "greedy", effort=1000)
    plain = recycle.solve(recycle.problem(2, 3, 4, costs=(10, 13, 9), comm=1, fail=fail), "greedy", effort=1000)
    return cut_at_random(plain, LAYERS, SHARED, Random(seed))


@pytest.fixture
def num_ahead(monkeypatch) -> Counter[int]:
    """How many steps each stage has begun ahead of its guests' sums."""
    found: Counter[int] = Counter()
    plain = StageState.step_ahead

    def counted(state: StageState, parameters) -> None:
        found[state.stage.number] += 1
        plain(state, parameters)

    monkeypatch.setattr(StageState, "step_ahead", counted)
    return found


def assert_like_the_reference(
    plan: Plan, samples: Numbers | None = None, lean_steps: bool = False, max_norm: float | None = None
):
    samples, options = samples or Numbers(), TrainOptions(SEED, True, max_norm, lean_steps=lean_steps)
    found = train_in_threads(Job(plan, stages(), samples, loss, adamw, STEPS, options=options))
    parts = elastic_stages(stages(), SHARED)
    reference = ReferenceExecutor(plan, parts, samples, loss, adamw, seed=SEED, is_exact=True, max_norm=max_norm)
    for step in range(STEPS):
        reference.iterate(step)
    assert found == [digest(reference.workers[row.worker].stage.module) for row in plan.rows]


CASES = {
    "exact": {},
    "clipped": {"max_norm": CLIPPING},
    "a step that is skipped": {"samples": Explodes(2)},
    "computed again after the verdict": {"lean_steps": True},
    "clipped after a lean step": {"lean_steps": True, "max_norm": CLIPPING},
    "a lean step that is skipped": {"lean_steps": True, "samples": Explodes(2)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("fail", "seed"), [("", None), ("W1_1", None), ("W0_0", 1), ("", 2), ("W1_2", 3)])
def test_weights_are_those_of_the_reference(case, fail, seed, num_ahead):
    assert_like_the_reference(plan_of(fail, seed), **CASES[case])
    assert {0, 1} <= set(num_ahead)  # and the last stage, where the one before it uses its layers longest


@pytest.mark.parametrize("options", [{}, {"max_norm": CLIPPING}, {"samples": Explodes(2)}], ids=["right", "clipped", "skipped"])
@pytest.mark.parametrize(("fail", "seed"), [("", None), ("W1_1", 1)])
def test_a_lean_step_may_get_its_verdict_before_the_first_message(options, fail, seed, monkeypatch):
    passed_over, plain = [], Executor.pass_over

    def counted(executor, first, stop):
        passed_over.append(stop - first)
        plain(executor, first, stop)

    def late(queue, seconds, message):
        time.sleep(seconds)  # every message comes after the verdict
        return False

    monkeypatch.setattr(Executor, "pass_over", counted)
    monkeypatch.setattr(MessageQueue, "comes_within", late)
    assert_like_the_reference(plan_of(fail, seed), lean_steps=True, **options)
    assert any(passed_over) == bool(options)  # if the step was wrong


@pytest.mark.parametrize("lean_steps", [False, True])
def test_a_worker_that_waits_for_its_first_message_steps_what_is_summed(lean_steps, num_ahead, monkeypatch):
    """Nobody goes backward before all have voted, and a worker votes when it has stepped all of its layers."""
    left, plain = Counter[bool](), GradientReduction.num_due

    def counted(reduction, instruction):
        left[instruction.receives is not None and instruction.receives.made_at == 0] += reduction.num_late
        return plain(reduction, instruction)

    def late(queue, seconds, message):
        time.sleep(0.05)  # every message comes after the sums
        return False

    monkeypatch.setattr(GradientReduction, "num_due", counted)
    monkeypatch.setattr(MessageQueue, "comes_within", late)
    assert_like_the_reference(plan_of("", None), lean_steps=lean_steps)
    assert num_ahead[1]
    assert left[False]
    assert not left[True]


def test_an_optimizer_of_ones_own_steps_a_stage_as_a_whole(num_ahead):
    def own(parameters):
        return CountingAdamW(parameters, lr=0.01)

    plan = plan_of("W1_1", None)
    found = train_in_threads(Job(plan, stages(), Numbers(), loss, own, STEPS, options=TrainOptions(SEED, True)))
    assert not num_ahead
    usual = train_in_threads(
        Job(
            plan,
            stages(),
            Numbers(),
            loss,
            lambda each: torch.optim.AdamW(each, lr=0.01),
            STEPS,
            options=TrainOptions(SEED, True),
        )
    )
    assert found == usual
    assert num_ahead


def test_a_step_ahead_is_taken_back_when_the_worker_is_stopped():
    module = stages()[0]
    sums = make_sums(module.parameters(), 4, is_exact=True)
    stage = Stage(module, sums, 0, None)
    state = StageState(stage, Stepper(stage.parameters(), adamw), Shape(1, 2, 4), (), None)
    sums.add(stage.parameters(), [torch.ones_like(each) for each in stage.parameters()])
    before = digest(module)
    state.step_ahead([*stage.parameters()][:2])
    assert digest(module) != before
    assert state.progress().num_reduced == 0
    assert digest(module) == before
    state.resume_at(0, None, lambda *applied: None)
    assert state.num_steps == 0


def test_a_worker_with_one_op_after_its_warm_up_sums_in_the_order_of_its_peers():
    """A slow worker has a forward pass, its warm-up, and a backward pass: buckets must not come before its guests' sums."""
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(6)]
    problem = recycle.problem(3, 2, 4, costs=(9000, 9000, 100), layers=6, shared_layers=1, speeds="W1_1=0.29")
    plan = recycle.solve(problem, "greedy", effort=10_000)
    assert min(len(row) for row in plan.rows) == 2
    cut = recycle.cut(nn.Sequential(*layers), [3])
    found = train_in_threads(Job(plan, cut, Numbers(), loss, adamw, STEPS, options=TrainOptions(SEED, True)))
    reference = ReferenceExecutor(plan, elastic_stages(cut, 1), Numbers(), loss, adamw, seed=SEED, is_exact=True)
    for step in range(STEPS):
        reference.iterate(step)
    assert found == [digest(reference.workers[row.worker].stage.module) for row in plan.rows]
