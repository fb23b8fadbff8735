"""Activation checkpointing and compiled layers: the same weights, less memory, and a planner that knows both."""

from functools import partial

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.profile import Profile
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.planner.live_planner import Planner
from recycle.planner.problem_from_text import unsplit_costs
from recycle.profiling.stage_times import measure_stages
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import EvaluationOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, adamw, greedy_plan, loss, make_stages, sgd
from tests.runtime.recovery_runs import ALL, problem
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")]
SHAPE, STEPS, LAYERS = (3, 2, 2), 3, 6
CONFIG = GptConfig(context=16, width=16, num_heads=2, num_layers=LAYERS - 2, dropout=0.2, ties_embeddings=True)
RECOMPUTED, COMPILED = {"recomputes": True}, {"backend": "aot_eager"}


def gpt():
    return gpt_stages(CONFIG, SHAPE[1], seed=1)


def in_one_process(fail="", shared=0, is_exact=True, autocast=None, **how):
    """The losses and the hash of a GPT with dropout and tied embeddings."""
    profile = Profile.uniform(SHAPE[1], 10, 13, 9).with_layers([len(stage.split_into_layers()) for stage in gpt()])
    plan = greedy_plan(SHAPE, fail, costs=None, profile=profile, shared_layers=shared)
    stages = elastic_stages(gpt(), shared) if shared else gpt()
    samples = MicroBatches(Text(16), plan.problem.shape, microbatch=2, seed=1)
    job = ReferenceExecutor(
        plan, stages, samples, next_byte_loss, adamw, seed=3, is_exact=is_exact, autocast=autocast, max_norm=0.5, **how
    )
    return [job.iterate(step) for step in range(STEPS)], job.weights_sha256()


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_activation_checkpointing_changes_no_bit_of_exact_sums(autocast):
    plain = in_one_process(autocast=autocast)
    assert in_one_process(autocast=autocast, **RECOMPUTED) == plain
    assert in_one_process("W0_1,W2_0", autocast=autocast, **RECOMPUTED) == plain


def test_activation_checkpointing_changes_no_bit_with_cuts():
    assert in_one_process("W1_1", shared=1, **RECOMPUTED) == in_one_process()


def test_activation_checkpointing_comes_to_the_same_losses_without_exact_sums():
    assert in_one_process(is_exact=False, **RECOMPUTED)[0] == pytest.approx(in_one_process(is_exact=False)[0], rel=1e-5)


def test_compiled_layers_come_to_the_same_weights_whoever_is_dead():
    losses, weights = in_one_process(**COMPILED)
    assert losses == pytest.approx(in_one_process()[0], rel=1e-5)
    assert in_one_process("W0_1,W2_0", **COMPILED, **RECOMPUTED) == (losses, weights)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layers_that_inductor_compiles_come_to_the_same_weights_whoever_is_dead():
    stages, plans = partial(make_stages, SHAPE[1]), [greedy_plan(SHAPE, fail) for fail in ("", "W0_1,W2_0")]
    jobs = [ReferenceExecutor(plan, stages(), Numbers(), loss, sgd, is_exact=True, backend="inductor") for plan in plans]
    one, other = ([job.iterate(step) for step in range(STEPS)] for job in jobs)
    plain = ReferenceExecutor(plans[0], stages(), Numbers(), loss, sgd)
    assert one == pytest.approx([plain.iterate(step) for step in range(STEPS)], rel=1e-5)
    assert (one, jobs[0].weights_sha256()) == (other, jobs[1].weights_sha256())


def job(*lines, stages=None, plan=None, **options):
    wanted = problem(SHAPE, ALL)
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, STEPS)
    options = TrainOptions(0, True, failures=FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0), **options)
    plan = plan or recycle.solve(wanted, "greedy")
    return Job(plan, stages or make_stages(SHAPE[1], 0.1), Numbers(), loss, sgd, STEPS, samples=2, options=options)


class Samples:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return tuple(each[0] for each in Numbers().get(100, 0, number))


def test_workers_with_activation_checkpointing_hold_less_and_what_the_plan_says():
    evaluation = EvaluationOptions(Samples())
    plain = launch(job(evaluation=evaluation))
    again = launch(job(evaluation=evaluation, activation_checkpointing=True))
    killed = launch(job("kill W1_0@2", evaluation=evaluation, activation_checkpointing=True))
    assert again.weights_sha256 == killed.weights_sha256 == plain.weights_sha256
    assert [each.evaluations[0].loss for each in (again, killed)] == [plain.evaluations[0].loss] * 2
    # With a message come some bytes more than those of its tensor: when it was sent.
    assert again.activation_bytes == pytest.approx(again.planned_activation_bytes, abs=64)
    assert all(again.activation_bytes[worker] < 0.5 * plain.activation_bytes[worker] for worker in plain.activation_bytes)


@pytest.mark.slow
def test_workers_compile_their_layers_and_go_on_after_a_death():
    plain, killed = launch(job(compile_backend="aot_eager")), launch(job("kill W1_0@2", compile_backend="aot_eager"))
    assert plain.weights_sha256 == killed.weights_sha256
    assert plain.losses == pytest.approx(launch(job()).losses, rel=1e-5)


class Slow(nn.Module):
    """A layer that takes 100 µs by the clock below."""

    now_us = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        Slow.now_us += 100
        return self.inner(x)


def test_a_measured_profile_knows_that_layers_are_run_again():
    stages = [nn.Sequential(Slow(), Slow(), Slow()), nn.Sequential(Slow(), Slow())]
    plain, again = (
        measure_stages(job(stages=stages, activation_checkpointing=each), 2, lambda: Slow.now_us) for each in (False, True)
    )
    assert [(stage.forward_us, stage.input_us, stage.fused_us) for stage in plain.stages] == [(300, 1, 1), (200, 1, 1)]
    assert [(stage.forward_us, stage.input_us, stage.fused_us) for stage in again.stages] == [(300, 300, 300), (200, 200, 200)]
    assert all(stage.weight_held_bytes == 0 for stage in again.stages)
    wide = make_stages(2)
    held = [job(stages=wide, activation_checkpointing=each).memory_profile().stages[0].activation_bytes for each in (False, True)]
    # What the two layers of the stage were given, and what it returns.
    assert held[1] == 3 * 2 * 5 * WIDTH * 4 < held[0] / 3


def test_costs_of_a_backward_pass_that_is_not_split():
    assert unsplit_costs("10,13,9", recomputes=False) == (10, 21, 1)
    assert unsplit_costs((10, 13, 9), recomputes=True) == (10, 31, 1)


def test_a_backend_that_torch_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"compile_backend is 'fast', but torch has only .*inductor"):
        TrainOptions(compile_backend="fast")
