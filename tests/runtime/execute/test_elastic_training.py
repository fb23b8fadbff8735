"""Cuts do not change the mathematics: whichever stage computes a shared layer, the weights come out the same."""

import copy
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import Uncuttable
from recycle.core.plans.cuts import make_cuts
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.runtime.compute.elastic_stage import elastic_stages, layers_of, own_module
from recycle.runtime.compute.optimizer_step import MakeOptimizer
from recycle.runtime.compute.tied_parameters import find_ties
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
PIPELINES, STAGES, MICROBATCHES, LAYERS, STEPS = 2, 3, 4, 6, 2
CONFIG = GptConfig(vocabulary=16, context=6, width=8, num_heads=2, num_layers=LAYERS, ties_embeddings=True)
adamw = partial(torch.optim.AdamW, lr=0.01)


class Tokens:
    """Micro-batches of random tokens, by their address."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(10_000 * step + 100 * pipeline + index)
        tokens = torch.randint(0, 16, (2, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


@cache
def plan_of(fail: str, shared: int) -> recycle.Plan:
    made = recycle.solve(recycle.problem(PIPELINES, STAGES, MICROBATCHES, costs="10,13,9", fail=fail), "greedy", effort=1000)
    profile = made.problem.profile.with_equal_layers(LAYERS)
    return replace(made, problem=replace(made.problem, profile=profile, shared_layers=shared))


def job_of(
    fail: str, shared: int, seed: int | None, dropout: float = 0.0, make_optimizer: MakeOptimizer = adamw, **options: Any
) -> ReferenceExecutor:
    """A job; with a seed, its chains are cut at random."""
    plan = plan_of(fail, shared)
    if seed is not None:
        random, some = Random(seed), range(-shared, shared + 1)
        # Every stage computes a layer at least.
        legal = [(first, last) for first in some for last in some if first >= -1 and last <= 1 and last - first >= -1]
        plan = replace(plan, cuts=make_cuts(zip(*random.choices(legal, k=PIPELINES * MICROBATCHES), strict=True)))
    stages: list[nn.Module] = gpt_stages(replace(CONFIG, dropout=dropout), STAGES, 5, layers=[2, 2, 2])
    if shared:
        stages = list(elastic_stages(stages, shared))
    return ReferenceExecutor(plan, stages, Tokens(), next_byte_loss, make_optimizer, seed=5, **options)


def trained(fail: str, shared: int, seed: int | None, dropout: float = 0.0, **options: Any) -> str:
    """The hash of the weights after training with exact sums."""
    job = job_of(fail, shared, seed, dropout, is_exact=True, **options)
    for step in range(STEPS):
        job.iterate(step)
    return job.weights_sha256()


@pytest.mark.parametrize("fail", ["", "W1_1", "W0_0,W1_2"])
@pytest.mark.parametrize("shared", [1, 2])
def test_weights_are_the_same_with_cuts_with_shared_layers_and_without(fail: str, shared: int) -> None:
    without = trained("", 0, None)
    assert trained(fail, shared, None) == without
    assert {trained(fail, shared, seed) for seed in range(4)} == {without}


def test_without_exact_sums_they_are_the_same_up_to_rounding() -> None:
    """Sums in another order round otherwise; a step of SGD does not make that larger than it is."""

    def outcome(fail: str, shared: int, seed: int | None) -> tuple[list[float], list[torch.Tensor]]:
        job = job_of(fail, shared, seed, make_optimizer=partial(torch.optim.SGD, lr=0.1))
        losses = [job.iterate(step) for step in range(STEPS)]
        firsts = {worker.stage: executor.stage.module for worker, executor in sorted(job.workers.items(), reverse=True)}
        return losses, [each for stage in range(STAGES) for each in own_module(firsts[stage]).parameters()]

    losses, weights = outcome("", 0, None)
    for fail, seed in (("", 0), ("W1_1", 1), ("W0_0,W1_2", 2)):
        cut_losses, cut_weights = outcome(fail, 2, seed)
        assert cut_losses == pytest.approx(losses, rel=1e-6)
        for own, cut in zip(weights, cut_weights, strict=True):
            torch.testing.assert_close(cut, own, rtol=1e-5, atol=1e-7)


def test_a_clipped_step_is_the_same_since_a_gradient_counts_once_and_at_the_same_stage() -> None:
    without = trained("", 0, None, max_norm=0.5)
    assert without != trained("", 0, None)
    assert {trained("W1_1", 2, seed, max_norm=0.5) for seed in (None, 1, 2)} == {without}


def test_dropout_depends_on_the_layer_and_not_on_the_stage_that_computes_it() -> None:
    found = {trained("", 2, seed, dropout=0.3) for seed in (None, 1, 2, 3)}
    assert len(found) == 1
    assert found != {trained("", 2, None)}


def test_guests_have_no_names_of_their_own_stage_and_all_parameters_of_a_boundary_are_one_tie() -> None:
    stages = gpt_stages(CONFIG, STAGES, 5, layers=[2, 2, 2])
    elastic = elastic_stages(stages, 1)
    assert [[*each.guests] for each in elastic] == [["2"], ["1", "4"], ["3"]]
    assert sorted(tie.stages for tie in find_ties(elastic)) == [(0, 1), (0, 2), (1, 2)]
    x = Tokens().get(0, 0, 0)[0]
    for own, each in zip(stages, elastic, strict=True):
        made = each(x)
        assert torch.equal(made, own(x))
        assert torch.equal(made, copy.deepcopy(each)(x))
        x = made


def test_a_stage_that_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(Uncuttable, match="a stage of type Linear cannot share layers"):
        layers_of(nn.Linear(2, 2))
