"""Workers that share a GPU: the same weights bit for bit whoever is dead, and what they hold is what the plan says."""

import pytest
import torch

import recycle
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from tests.runtime.jobs import adamw

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
MODEL = GptConfig(context=32, width=32, num_layers=3, dropout=0.1)


def trained(fail, techniques="adaptive,decoupled,staggered", **options):
    plan = recycle.solve(recycle.problem(2, 3, 4, fail=fail, costs=(10, 13, 9), techniques=techniques), "greedy")
    stages = gpt_stages(MODEL, 3, seed=1)
    return recycle.train(
        plan, stages, Text(32), next_byte_loss, adamw, steps=3, samples=2, options=recycle.TrainOptions(device="cuda", **options)
    )


def test_exact_sums_make_the_weights_equal_bit_for_bit_on_a_gpu_too():
    runs = [trained("", is_exact=True), trained("W1_1", is_exact=True), trained("W0_2", "adaptive,decoupled", is_exact=True)]
    assert len({(run.weights_sha256, run.losses) for run in runs}) == 1


def test_activations_in_low_precision_are_held_as_planned():
    run = trained("W1_1", autocast=torch.bfloat16)
    assert run.losses[-1] < run.losses[0]
    assert run.activation_bytes == pytest.approx(run.planned_activation_bytes, rel=0.1)
