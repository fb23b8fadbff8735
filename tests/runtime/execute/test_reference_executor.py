"""The mathematics does not change: whoever is dead, whatever the schedule, the weights come out the same."""

import copy
import fractions
import itertools
import math
from functools import cache

import pytest
import torch
from torch import nn

import recycle
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.optimizer_step import StepVerdict, judge_step, norm_squared
from tests.runtime.jobs import Explodes, Numbers, adamw, greedy_plan, loss, make_stages, sgd, small_stages, tie, tied_stages
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
STEPS = 3


@cache
def plan(shape, fail="", techniques="adaptive,decoupled,staggered", memory=None):
    return greedy_plan(shape, fail, techniques, comm=1, memory=memory)


def trained(made, stages, optimizer=adamw, steps=STEPS, **options):
    job = ReferenceExecutor(made, stages, Numbers(), loss, optimizer, seed=5, **options)
    losses = [job.iterate(step) for step in range(steps)]
    return job, losses


def alone(shape, stages, optimizer=adamw, max_norm=None):
    """The same training by torch alone: one model, all micro-batches of a step, mean loss, one backward."""
    model = nn.Sequential(*copy.deepcopy(stages))
    step_with, losses = optimizer(list(model.parameters())), []
    for step in range(STEPS):
        pairs = [Numbers().get(step, pipeline, index) for pipeline in range(shape[0]) for index in range(shape[2])]
        mean = torch.stack([loss(model(given), targets) for given, targets in pairs]).mean()
        mean.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        step_with.step()
        step_with.zero_grad()
        losses.append(float(mean.detach()))
    return model, losses


SHAPE = (3, 4, 4)
CASES = {
    "1F1B": {"techniques": "none", "memory": "4,3,2,1"},
    "zero bubble": {"memory": 8},
    "one dead": {"fail": "W1_2"},
    "one dead, synchronous": {"fail": "W1_2", "techniques": "adaptive,decoupled"},
    "one dead, whole backward passes": {"fail": "W0_0", "techniques": "adaptive"},
    "one dead in every stage": {"fail": "W0_0,W1_1,W2_2,W0_3"},
    "two dead in one stage": {"fail": "W0_1,W2_1"},
}


@pytest.mark.parametrize(("case", "optimizer"), [*((case, adamw) for case in CASES), ("zero bubble", sgd), ("one dead", sgd)])
def test_losses_and_weights_are_those_of_one_model_trained_by_torch_alone(case, optimizer):
    stages = make_stages(4)
    job, losses = trained(plan(SHAPE, **CASES[case]), stages, optimizer)
    model, expected = alone(SHAPE, stages, optimizer)
    assert losses == pytest.approx(expected, rel=1e-5)
    for worker, executor in job.workers.items():
        theirs = model[worker.stage].state_dict()
        for name, value in executor.stage.module.state_dict().items():
            torch.testing.assert_close(value, theirs[name], rtol=2e-4, atol=2e-5)


def test_clipping_is_that_of_torch_over_the_whole_model():
    stages = make_stages(4)
    job, losses = trained(plan(SHAPE, fail="W1_2"), stages, sgd, max_norm=0.05)
    model, expected = alone(SHAPE, stages, sgd, max_norm=0.05)
    assert losses == pytest.approx(expected, rel=1e-5)
    _, unclipped = alone(SHAPE, stages, sgd)
    assert losses[-1] != pytest.approx(unclipped[-1], rel=1e-5)
    value = job.workers[recycle.Worker(0, 3)].stage.module[1].weight
    torch.testing.assert_close(value, model[3][1].weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_tied_parameters_train_like_one_that_is_shared(max_norm):
    job, losses = trained(plan(SHAPE, fail="W1_2"), tied_stages(4), sgd, max_norm=max_norm)
    model, expected = alone(SHAPE, tied_stages(4), sgd, max_norm)
    assert model[0][-1].weight is model[3][-1].weight
    assert losses == pytest.approx(expected, rel=1e-5)
    for stage in (0, 3):
        torch.testing.assert_close(job.workers[recycle.Worker(0, stage)].stage.module[-1].weight, model[0][-1].weight)


# Two micro-batches of a dead worker are enough to be shared by its peers, and there are many runs.
SMALL = (3, 4, 2)
SINGLE = [{"fail": f"W{pipeline}_{stage}"} for pipeline in range(3) for stage in range(4)]
SETTINGS = {
    "plain": {"stages": make_stages(4)},
    "clipping": {"max_norm": 0.02},
    "clipping that never clips": {"max_norm": 1e6},
    "dropout": {"stages": make_stages(4, 0.2)},
    "tied": {"stages": tie(small_stages(4)), "max_norm": 0.02},  # and clipped
    "an infinite step": {"samples": Explodes(1)},
}


# Twelve runs more, one for every worker, take long.
@pytest.mark.parametrize("setting", [pytest.param(name, marks=[pytest.mark.slow] * (name == "tied")) for name in SETTINGS])
def test_in_exact_mode_the_weights_are_equal_bit_for_bit_whoever_is_dead(setting):
    options = {"stages": small_stages(4), "samples": Numbers(), **SETTINGS[setting]}
    found = {}
    for case in [*CASES.values(), *(SINGLE if setting == "tied" else ())]:
        job = ReferenceExecutor(
            plan(SMALL, **case), options["stages"], options["samples"], loss, adamw, 5, True, options.get("max_norm")
        )
        # Two steps, of which the second uses the optimizer's state; one more after a step that was not applied.
        losses = [job.iterate(step) for step in range(3 if setting == "an infinite step" else 2)]
        found[job.weights_sha256(), str(losses)] = case
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "setting",
    [
        "clipping",
        pytest.param("dropout", marks=pytest.mark.slow),
        "tied",
        pytest.param("an infinite step", marks=pytest.mark.slow),
    ],
)
def test_so_are_they_with_two_dead_in_one_stage_of_four_pipelines(setting):
    options = {"stages": small_stages(4), "samples": Numbers(), **SETTINGS[setting]}
    dead = ["", "W0_1,W2_1", "W1_3,W3_3", "W0_0,W1_0,W2_2,W3_2"]
    found = set()
    for fail in dead:
        job = ReferenceExecutor(
            plan((4, 4, 2), fail), options["stages"], options["samples"], loss, adamw, 5, True, options.get("max_norm")
        )
        losses = [job.iterate(step) for step in range(3)]
        found.add((job.weights_sha256(), str(losses)))
    assert len(found) == 1


def test_without_exact_mode_sums_depend_on_who_ran_what():
    stages = small_stages(4)
    hashes = {trained(plan(SHAPE, **case), stages)[0].weights_sha256() for case in CASES.values()}
    assert len(hashes) > 1


def test_exact_sums_are_as_good_as_floating_point_ones():
    stages = make_stages(4)
    _, exact = trained(plan(SHAPE, fail="W1_2"), stages, is_exact=True)
    _, expected = alone(SHAPE, stages)
    assert exact == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_step_with_infinite_gradients_is_skipped_at_every_stage(is_exact):
    stages = make_stages(4)
    job = ReferenceExecutor(plan(SHAPE, fail="W1_2"), stages, Explodes(1), loss, adamw, is_exact=is_exact)
    job.iterate(0)
    before = job.weights_sha256()
    job.iterate(1)
    assert job.weights_sha256() == before
    job.iterate(2)
    assert job.weights_sha256() != before


def test_every_worker_holds_no_more_micro_batches_than_its_plan_says():
    made = plan(SHAPE, fail="W1_2", memory=6)
    job = ReferenceExecutor(made, make_stages(4), Numbers(), loss, adamw)
    peaks = dict.fromkeys(job.workers, 0)
    for executor in job.workers.values():
        stage, forward = executor.stage, executor.stage.forward

        def counted(*args, worker=executor.worker, stage=stage, forward=forward, **kwargs):
            result = forward(*args, **kwargs)
            peaks[worker] = max(peaks[worker], stage.num_in_flight)
            return result

        stage.forward = counted
    job.iterate(0)
    assert max(peaks.values()) <= 6
    assert all(executor.stage.num_in_flight == 0 for executor in job.workers.values())


def test_a_verdict_follows_from_the_stages_norms():
    assert judge_step([9.0, 16.0], None) == StepVerdict(5.0, 1.0)
    assert judge_step([9.0, 16.0], 5.0) == StepVerdict(5.0, 1.0)
    assert judge_step([9.0, 16.0], 1.0) == StepVerdict(5.0, 0.2)
    assert judge_step([9.0, float("inf")], 1.0).scale is None
    assert judge_step([float("nan"), 1.0], None).scale is None
    assert norm_squared([torch.tensor([3.0, 4.0]), None]) == (25.0, 0.0, 0.0)
    assert norm_squared([]) == (0.0, 0.0, 0.0)
    assert not math.isfinite(norm_squared([torch.tensor([float("inf")]), torch.tensor([float("nan")])])[0])
    assert judge_step(norm_squared([torch.tensor([float("inf")])]), 1.0).scale is None


def test_the_norm_of_all_stages_does_not_depend_on_which_gradients_are_in_one_stage():
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(7, generator=generator) * 10.0**power for power in (-9, 3, -4, 8, 0, -1, 5, -7)]
    squares = [fractions.Fraction(value) for (value, *_) in (norm_squared([gradient]) for gradient in gradients)]
    exact = float(sum(squares))
    for bounds in itertools.chain.from_iterable(itertools.combinations(range(1, 8), count) for count in range(8)):
        stages = [gradients[start:stop] for start, stop in itertools.pairwise([0, *bounds, 8])]
        parts = [part for stage in stages for part in norm_squared(stage)]
        assert judge_step(parts, None).norm == math.sqrt(exact)


def test_a_small_gpt_learns_real_text_the_same_whoever_is_dead():
    config = GptConfig(context=32, width=32, num_heads=2, num_layers=3, dropout=0.1)
    runs = set()
    for dead in ("", "W1_1", "W0_0,W1_2"):
        made = plan((2, 3, 4), fail=dead)
        samples = MicroBatches(Text(32), made.problem.shape, microbatch=2, seed=1)
        job = ReferenceExecutor(made, gpt_stages(config, 3, seed=1), samples, next_byte_loss, adamw, is_exact=True, max_norm=1.0)
        losses = [job.iterate(step) for step in range(4)]
        assert losses[0] == pytest.approx(math.log(256), rel=0.05)
        assert losses[-1] < losses[0] - 0.2
        runs.add((job.weights_sha256(), tuple(losses)))
    assert len(runs) == 1
