"""Exact mode in one process: the weights do not depend on pipelines, stages and shared layers, whatever the layers have."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.cutting.cut import recut
from tests.runtime.jobs import adamw, greedy_plan
from tests.runtime.reference_executor import ReferenceExecutor

LAYERS, NUM_CHAINS = 5, 12
CONFIG = GptConfig(context=16, width=16, num_heads=2, num_layers=LAYERS, dropout=0.1, ties_embeddings=True)


class Looked(nn.Module):
    """Token vectors, and the logits by the same matrix: neither of them is a Linear."""

    def __init__(self, matrix: nn.Parameter, is_head: bool) -> None:
        super().__init__()
        self.matrix, self.is_head = matrix, is_head

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.t() if self.is_head else nn.functional.embedding(x, self.matrix)


def gpt(num_stages: int) -> list[nn.Module]:
    return gpt_stages(CONFIG, num_stages, seed=1)


def repeated(num_stages: int) -> list[nn.Module]:
    """One block for all layers, as in ALBERT, between two that share a matrix."""
    torch.manual_seed(1)
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))
    matrix = nn.Parameter(0.1 * torch.randn(256, 16))
    whole = nn.Sequential(Looked(matrix, is_head=False), block, block, block, Looked(matrix, is_head=True))
    return recut([whole], num_stages)


def weights(
    make: Callable[[int], list[nn.Module]],
    shape: tuple[int, int],
    shared: int,
    autocast: torch.dtype | None,
    max_norm: float | None,
) -> tuple[str, tuple[float, ...]]:
    """The hash of the weights after three steps, and the losses."""
    stages = make(shape[1])
    plan = greedy_plan((*shape, NUM_CHAINS // shape[0]))
    held = elastic_stages(stages, shared) if shared else stages
    samples = MicroBatches(Text(16), plan.problem.shape, microbatch=2, seed=1)
    options = {"is_exact": True, "max_norm": max_norm, "autocast": autocast}
    job = ReferenceExecutor(plan, held, samples, next_byte_loss, adamw, seed=3, **options)
    losses = tuple(job.iterate(step) for step in range(3))
    return job.weights_sha256(), losses


@pytest.mark.parametrize("make", [gpt, repeated])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_the_shape_changes_no_bit(make: Callable[[int], list[nn.Module]], autocast: torch.dtype | None) -> None:
    shapes = [(3, 4, 0), (1, 1, 0), (2, 2, 1)]
    if autocast is None:  # in bfloat16 many processors take ten times as long
        shapes += [(2, 2, 0), (4, 3, 0), (3, 4, 1)]
    found = {weights(make, (pipelines, stages), shared, autocast, 0.05) for pipelines, stages, shared in shapes}
    assert len(found) == 1


def test_clipping_and_dropout_take_part_in_it() -> None:
    clipped, free = (weights(gpt, (2, 2), 0, None, max_norm)[0] for max_norm in (0.05, None))
    assert clipped != free
    without = gpt_stages(GptConfig(16 * 16, 16, 16, 2, LAYERS, 0.0, True), 2, seed=1)
    assert weights(lambda num_stages: without, (2, 2), 0, None, None)[0] != free
