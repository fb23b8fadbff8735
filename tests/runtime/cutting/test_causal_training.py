"""Causal language models train in stages as they would as a whole: the same losses, and one hash whoever is dead."""

from functools import cache, partial

import pytest
import torch

import recycle
from recycle.core.cluster import Shape
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Recovered
from recycle.core.plans.library import without_failures
from recycle.runtime.compute.microbatches import MicroBatches
from tests.runtime.cutting.causal_models import Lines, Sentences, make_model
from tests.runtime.jobs import LEASE_S, greedy_plan
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(300)
SHAPE, STEPS, SAMPLES, SEED = (2, 2, 2), 20, 2, 4
TWO_DEAD = "W1_0,W0_1"
adamw = partial(torch.optim.AdamW, lr=1e-3)
FIVE = ["gpt2", "llama", "mistral", "qwen", "gemma"]


@cache
def in_plain_torch(name, dataset, shape=SHAPE):
    """The losses of the whole model, by the loop that everybody writes."""
    model, losses = make_model(name), []
    batches, optimizer = MicroBatches(dataset(), Shape(*shape), SAMPLES, SEED), adamw(model.parameters())
    for step in range(STEPS):
        pairs = [batches.get(step, pipeline, index) for pipeline in range(shape[0]) for index in range(shape[2])]
        given = [{**x, "labels": y} if isinstance(x, dict) else {"input_ids": x, "labels": y} for x, y in pairs]
        mean = torch.stack([model(**each).loss for each in given]).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


@cache
def by_plan(name, dataset, fail, shape=SHAPE):
    """The losses and the hash of stages that run by a plan in one process."""
    stages = recycle.cut(make_model(name), stages=2)
    data = MicroBatches(dataset(), Shape(*shape), SAMPLES, SEED)
    job = ReferenceExecutor(greedy_plan(shape, fail), stages, data, stages[-1].make_loss(), adamw, seed=SEED, is_exact=True)
    return [job.iterate(step) for step in range(STEPS)], job.weights_sha256()


CASES = [(name, dataset) for dataset in (Sentences, Lines) for name in FIVE]
QUICK = [("gpt2", Sentences), ("gemma", Lines)]


@pytest.mark.parametrize(
    ("name", "dataset"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_losses_are_those_of_the_whole_model_whoever_is_dead(name, dataset):
    whole, weights = by_plan(name, dataset, "")
    two_dead, same_weights = by_plan(name, dataset, TWO_DEAD)
    assert whole == pytest.approx(in_plain_torch(name, dataset), rel=1e-5)
    assert whole[-1] < whole[0]
    assert two_dead == whole
    assert weights == same_weights


def in_processes(name, plan, *kills, **given):
    """A run of real processes, and its stages; every kill makes one recovery."""
    script = Script(tuple(Injection.parse(Action.KILL, kill) for kill in kills))
    failures = recycle.FailureOptions(recycle.Planner(without_failures(plan.problem)), script, lease_s=LEASE_S, restarts=0)
    options, events = recycle.TrainOptions(SEED, is_exact=True, quiet=True, failures=failures), []
    stages = recycle.cut(make_model(name), stages=2)
    how = {"steps": STEPS, "samples": SAMPLES, "options": options, "watch": events.append, **given}
    made = recycle.train(plan, stages, Sentences(), None, adamw, **how)
    assert sum(isinstance(event, Recovered) for event in events) == len(kills)
    return made, stages


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE)
def test_two_dead_workers_and_two_kills_on_the_way_change_nothing(name):
    shape = (3, 2, 2)
    made, _ = in_processes(name, greedy_plan(shape, TWO_DEAD), "W2_0@5", "W2_1@12", out=None)
    losses, weights = by_plan(name, Sentences, "", shape)
    assert list(made.losses) == losses == pytest.approx(in_plain_torch(name, Sentences, shape), rel=1e-5)
    assert made.weights_sha256 == weights


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gemma", marks=pytest.mark.slow)])
def test_kills_on_the_way_change_nothing(name, tmp_path):
    made, stages = in_processes(name, greedy_plan(SHAPE), "W1_0@5", "W0_1@12", out=tmp_path)
    losses, weights = by_plan(name, Sentences, "")
    assert list(made.losses) == losses
    assert made.weights_sha256 == weights
    # The trained weights are those of the model itself, under its own names.
    recycle.load(stages, tmp_path)
    whole = make_model(name).state_dict()
    trained = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert set(trained) == set(whole)
    assert not any(torch.equal(trained[key], whole[key]) for key in whole if whole[key].dim() == 2)
