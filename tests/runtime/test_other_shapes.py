"""A run that goes on in other shapes comes to the weights of plain torch in one process, bit for bit in exact mode."""

import math
import multiprocessing
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import recycle
from recycle.core.cluster import Worker
from recycle.core.errors import ForeignRun
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.state_digests import stage_digest, whole_digest
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, TrainOptions
from tests.runtime.jobs import WIDTH, adamw, greedy_plan, loss

pytestmark = pytest.mark.timeout(300)
LAYERS, NUM_CHAINS, SAMPLES, SEED, MAX_NORM, SCALE = 7, 12, 2, 5, 0.05, 2.0**40


class Waves(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        given = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        return given, given.roll(1, -1).tanh()


def model() -> nn.Sequential:
    """Seven layers, of which the third and the last are tied."""
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS - 1)]
    last = nn.Linear(WIDTH, WIDTH)
    last.weight = layers[2][0].weight  # type: ignore[assignment]
    return nn.Sequential(*layers, last)


@cache
def plain_torch(num_steps: int) -> tuple[str, dict[str, Tensor]]:
    """The hash and the weights of one process with one model and one optimizer, without anything of the runtime but its data.

    The gradient of each micro-batch and use is rounded as exact mode says, and added in whole numbers.
    """
    net = model()
    parameters = list(net.parameters())
    optimizer = adamw(parameters)
    data = MicroBatches(Waves(), recycle.Shape(1, 1, NUM_CHAINS), SAMPLES, SEED)
    for step in range(num_steps):
        sums = [torch.zeros(parameter.shape, dtype=torch.int64) for parameter in parameters]
        for index in range(NUM_CHAINS):
            inputs, targets = data.get(step, 0, index)
            for total, gradient in zip(sums, _contributions(net, inputs, targets), strict=True):
                for part in gradient:
                    total += (part.double() * SCALE).round().to(torch.int64)
        means = [(total.double() * (1.0 / (SCALE * NUM_CHAINS))).float() for total in sums]
        squares = [float(torch.linalg.vector_norm(mean, 2, dtype=torch.float64).square()) for mean in means]
        norm = math.sqrt(math.fsum(squares))
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean if norm <= MAX_NORM else mean * (MAX_NORM / norm)
        optimizer.step()
    assert norm > MAX_NORM, "no step is clipped"
    return whole_digest({Worker(0, 0): stage_digest(net, is_by_layer=True)}), {
        name: value.clone() for name, value in net.state_dict().items()
    }


def _contributions(net: nn.Sequential, inputs: Tensor, targets: Tensor) -> list[list[Tensor]]:
    """The gradients of one micro-batch, apart for each use of a tied weight: a copy of the model has it untied."""
    apart = model()
    apart.load_state_dict(net.state_dict())
    apart[-1].weight = nn.Parameter(apart[-1].weight.detach().clone())
    loss(apart(inputs), targets).backward()
    found: list[list[Tensor]] = []
    for name, _ in net.named_parameters():
        names = [name, f"{LAYERS - 1}.weight"] if name == "2.0.weight" else [name]
        gradients = [apart.get_parameter(each).grad for each in names]
        found.append([gradient for gradient in gradients if gradient is not None])
    return found


def run(
    shape: tuple[int, int],
    cuts: Sequence[int],
    steps: int,
    out: Path,
    shared: int = 0,
    is_exact: bool = True,
    first: bool = False,
) -> str:
    stages = recycle.cut(model(), cuts)
    options = {}
    if shared:
        sizes = [len(layers) for layers in find_layer_names(stages).stages]
        profile = recycle.Profile.uniform(shape[1], 10, 13, 9).with_layers(sizes)
        options = {"shared_layers": shared, "profile": profile, "costs": None, "fail": "W0_1"}
    plan = greedy_plan((*shape, NUM_CHAINS // shape[0]), **options)
    assert any(map(any, plan.cuts)) == bool(shared), "only a dead worker moves the cuts"
    checkpoint = CheckpointOptions(resume=not first)
    trained = launch(
        Job(
            plan, stages, Waves(), loss, adamw, steps, SAMPLES, out, TrainOptions(SEED, is_exact, MAX_NORM, checkpoint=checkpoint)
        ),
        lambda event: None,
    )
    assert not multiprocessing.active_children()
    return trained.weights_sha256


def test_a_run_in_shape_after_shape_comes_to_the_weights_of_plain_torch_bit_for_bit(tmp_path: Path) -> None:
    assert run((3, 4), [2, 3, 5], 2, tmp_path, first=True) == plain_torch(2)[0]
    assert run((2, 2), [5], 4, tmp_path) == plain_torch(4)[0]
    assert run((4, 3), [1, 3], 5, tmp_path) == plain_torch(5)[0]
    assert run((1, 1), [], 7, tmp_path) == plain_torch(7)[0]
    assert run((2, 3), [2, 4], 9, tmp_path, shared=2) == plain_torch(9)[0]
    assert run((3, 2), [4], 10, tmp_path, shared=1) == plain_torch(10)[0]
    weights = plain_torch(10)[1]
    exported = recycle.export_model(tmp_path, tmp_path / "model.safetensors")
    found = load_file(exported.path)
    assert (exported.num_steps, exported.num_tensors) == (10, len(weights))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    fresh = model()
    assert recycle.load(recycle.cut(fresh, [1, 2, 6]), tmp_path) == 10
    assert all(torch.equal(value, weights[name]) for name, value in fresh.state_dict().items())


def test_without_exact_sums_the_weights_agree_up_to_rounding(tmp_path: Path) -> None:
    run((2, 3), [2, 4], 2, tmp_path, is_exact=False, first=True)
    run((3, 1), [], 4, tmp_path, is_exact=False)
    fresh = model()
    recycle.load([fresh], tmp_path)
    for name, wanted in plain_torch(4)[1].items():
        torch.testing.assert_close(fresh.state_dict()[name], wanted, rtol=1e-3, atol=1e-5)


def test_a_model_without_layers_is_refused_in_another_shape(tmp_path: Path) -> None:
    whole = [Opaque(), Opaque()]
    options = TrainOptions(is_exact=True)
    plan = greedy_plan((1, 2, NUM_CHAINS))
    launch(Job(plan, whole, Waves(), loss, adamw, 1, SAMPLES, tmp_path, options), lambda event: None)
    options = TrainOptions(is_exact=True, checkpoint=CheckpointOptions(resume=True))
    job = Job(greedy_plan((1, 1, NUM_CHAINS)), [Opaque()], Waves(), loss, adamw, 2, SAMPLES, tmp_path, options)
    with pytest.raises(ForeignRun, match=r"has 2 stages, but this job has 1, and a stage .* does not say what its layers are"):
        launch(job, lambda event: None)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made
