"""Shares of layers: those that a clock in their own hands makes known, bytes that add up, and stages that cannot be split."""

import random

import pytest
import torch
from torch import nn

from recycle.core.cluster import Shape
from recycle.core.layer_shares import EQUAL
from recycle.core.layer_sums import LayerSums
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.profiling.layer_times import measure_layers
from recycle.profiling.rehearsal import rehearsal_plan
from recycle.profiling.stage_times import measure_stages
from recycle.runtime.compute.stage_bytes import measure_bytes
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from tests.runtime.jobs import WIDTH, Numbers, adamw, loss

torch.set_num_threads(1)


class Clock:
    """A clock that only layers advance."""

    now_us = 0.0
    noise = random.Random(0)

    @classmethod
    def pass_by(cls, cost_us, jitter):
        cls.now_us += cost_us * (1 + jitter * cls.noise.random())

    def __call__(self):
        return Clock.now_us


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, costs, jitter):
        ctx.costs, ctx.jitter = costs, jitter
        Clock.pass_by(costs[0], jitter)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Clock.pass_by(ctx.costs[1], ctx.jitter)
        return gradient, None, None


class Takes(nn.Module):
    """A layer whose forward and backward pass take these times, and a little more now and then."""

    def __init__(self, forward_us, input_us, jitter=0.0, width=WIDTH):
        super().__init__()
        self.costs, self.jitter = (forward_us, input_us), jitter
        self.part = nn.Linear(width, width)

    def forward(self, x):
        return _Takes.apply(self.part(x), self.costs, self.jitter)


def job_of(stages, **options):
    plan = rehearsal_plan(Shape(1, len(stages), 1), is_split=True)
    return Job(plan, stages, Numbers(), loss, adamw, steps=1, options=TrainOptions(**options))


def gpt_job(layers, ties=False):
    config = GptConfig(context=8, width=16, num_heads=2, num_layers=sum(layers), ties_embeddings=ties)
    plan = rehearsal_plan(Shape(1, len(layers), 1), is_split=True)
    return Job(plan, gpt_stages(config, len(layers), 1, layers), Text(8), next_byte_loss, adamw, 1, samples=2)


def test_shares_are_the_times_of_layers_beside_a_usual_one():
    stages = [nn.Sequential(Takes(30, 10), Takes(10, 20)), nn.Sequential(Takes(10, 20), Takes(10, 20), Takes(5, 90))]
    found = measure_layers(job_of(stages), num_repeats=3, clock_us=Clock())
    assert [[layer.forward for layer in own] for own in found] == [[3.0, 1.0], [1.0, 1.0, 0.5]]
    assert [[layer.input for layer in own] for own in found] == [[0.5, 1.0], [1.0, 1.0, 4.5]]


def test_layers_that_are_built_alike_are_equal_though_their_times_vary():
    stages = [nn.Sequential(*(Takes(10, 20, jitter=0.9) for _ in range(3))) for _ in range(2)]
    found = measure_layers(job_of(stages), num_repeats=8, clock_us=Clock())
    # The last one is built otherwise: it has the loss.
    assert [(layer.forward, layer.input) for own in found for layer in own][:-1] == [(1.0, 1.0)] * 5


def test_a_layer_that_is_built_alike_but_takes_much_longer_is_not_equal():
    stages = [nn.Sequential(Takes(10, 20), Takes(10, 20), Takes(10, 20)), nn.Sequential(Takes(10, 20), Takes(25, 20))]
    found = measure_layers(job_of(stages), num_repeats=1, clock_us=Clock())
    assert [layer.forward for layer in found[1]] == [1.0, 2.5]


@pytest.mark.parametrize("is_exact", [False, True])
def test_the_state_of_layers_adds_up_to_that_of_their_stage(is_exact):
    stages = [nn.Sequential(nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, WIDTH)) for _ in range(2)]
    profile = measure_stages(job_of(stages, is_exact=is_exact), num_repeats=1)
    sums = LayerSums(profile)
    for number, layer in enumerate(layer for stage in stages for layer in stage):
        parameters = list(layer.parameters())
        gradients = sum(-(-parameter.numel() * (8 if is_exact else 4) // 256) * 256 for parameter in parameters)
        state = sum(2 * (3 * parameter.nbytes + 4) for parameter in parameters)
        assert sums.total("static_bytes", range(number, number + 1)) == state + gradients * (1 if is_exact else 2)


def test_the_embedding_is_in_the_first_layer_and_the_head_in_the_last():
    job = gpt_job([2, 2, 2])
    first, middle, last = measure_layers(job, num_repeats=1)
    assert {layer.parameters for layer in (first[1], *middle, last[0])} == {layer.activation for layer in middle} == {1.0}
    assert first[0].parameters > 1.2
    assert last[1].parameters > 1.2
    assert last[1].activation > 1.2  # the logits


def test_activations_of_layers_add_up_to_those_of_any_cut():
    """The layers of a stage, as the profile adds them up, hold what a stage of these layers really holds."""
    profile = measure_stages(gpt_job([2, 2, 2]), num_repeats=1)
    sums = LayerSums(profile)
    for layers in ([1, 3, 2], [3, 1, 2], [3, 2, 1], [1, 1, 4], [2, 3, 1]):
        job = gpt_job(layers)
        held = measure_bytes(job.stages, job.microbatches, job.loss)
        start = 0
        for number, own in zip(layers, held, strict=True):
            counted = sums.total("activation_bytes", range(start, start + number))
            assert counted == pytest.approx(own.activation_bytes, rel=0.1)
            start += number


class Numbered(nn.Module):
    """Returns a dict whose keys are numbers, which is no nest."""

    def forward(self, x):
        return {0: x}


class Whole(nn.Module):
    """A stage that does not say what its layers are."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.part(x)


@pytest.mark.parametrize(
    "stage",
    [
        Whole(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Hardtanh(inplace=True)),
        nn.Sequential(Numbered(), Whole()),
        nn.Sequential(),
    ],
    ids=["no layers named", "in place", "no nest between", "no layer"],
)
def test_stages_that_cannot_be_split_have_no_layers(stage):
    assert measure_layers(job_of([nn.Sequential(Whole()), stage]), num_repeats=1) == ()


def test_a_stage_without_parameters_has_equal_shares_of_nothing():
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.GELU(), nn.Tanh(), nn.GELU())]
    found = measure_layers(job_of(stages), num_repeats=1, clock_us=Clock())
    assert [layer.parameters for layer in found[1]] == [1.0, 1.0, 1.0]
    assert found[0][0].weight == EQUAL.weight  # this clock stands still: times that nobody has are equal
