"""What a trainer uses every day, on a GPU: nests over every transport, loaders, float16, recomputed and compiled layers.

Each training has a twin that loses a worker on the way: the weights of both are equal bit for bit.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Stepped
from recycle.planner.live_planner import Planner
from recycle.runtime.data.make_source import micro_batches_of
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import FailureOptions, TrainOptions
from tests.runtime.data_runs import SAMPLES, SEED, SHAPE, WIDTH, Sentences, problem, sgd
from tests.runtime.jobs import LEASE_S

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]
STEPS, TOKENS = 5, 20
PADDED = recycle.DataOptions(padding=recycle.Padding(12))
KILL = "kill W1_1@2"


class Embedded(nn.Module):
    """The first stage: a nest of states, a mask and positions, whose lengths are those of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        states = self.inner(self.table(ids)).tanh()
        return {"states": (states, states.sin()), "mask": ids > 2, "positions": torch.arange(ids.shape[1], device=ids.device)}


class Predicted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, given):
        left, right = given["states"]
        mixed = self.inner(left) * given["mask"][..., None] + right * given["positions"][:, None]
        return self.head(mixed)


def stages():
    torch.manual_seed(4)
    return [Embedded(), Predicted()]


def loss(made, targets):
    return nn.functional.cross_entropy(made.float().flatten(0, 1), targets.flatten())


def run(*lines, data=PADDED, **options):
    wanted = problem()
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, STEPS)
    failures = FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0)
    options = TrainOptions(SEED, True, device=DEVICE, data=data, failures=failures, **options)
    plan = recycle.solve(wanted, "greedy", effort=20_000)
    events = []
    trained = launch(Job(plan, stages(), Sentences(), loss, sgd, STEPS, SAMPLES, options=options), events.append)
    assert len(trained.recoveries) == len(lines)
    return trained, sum(isinstance(event, Stepped) and event.scale is None for event in events)


def weights(*lines, **options):
    return run(*lines, **options)[0].weights_sha256


@cache
def undisturbed():
    return run()[0]


@pytest.mark.parametrize("transport", ["gloo", "nccl", "ipc"])
def test_nests_of_varying_shapes_pass_over_every_transport(transport):
    assert weights(KILL, transport=transport) == undisturbed().weights_sha256


def test_loader_processes_and_pinned_memory_change_no_sample():
    assert weights(KILL, data=replace(PADDED, loader_processes=2)) == undisturbed().weights_sha256


def test_layers_that_are_computed_again_change_no_bit():
    assert weights(KILL, activation_checkpointing=True) == undisturbed().weights_sha256


def test_float16_with_a_loss_scale_that_overflows_changes_no_bit_when_a_worker_dies():
    scaled = {"autocast": torch.float16, "loss_scale": recycle.LossScale(initial=2.0**18, interval=2)}
    whole, num_skipped = run(**scaled)
    assert 0 < num_skipped < STEPS
    assert weights(KILL, **scaled) == whole.weights_sha256 != undisturbed().weights_sha256


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_change_no_bit_when_a_worker_dies(backend):
    whole, _ = run(compile_backend=backend)
    assert whole.losses == pytest.approx(undisturbed().losses, rel=1e-4)
    assert weights(KILL, compile_backend=backend) == whole.weights_sha256


def test_the_losses_are_those_of_plain_torch():
    """One process on the same device trains the whole model on the same micro-batches."""
    shape, model = problem().shape, nn.Sequential(*stages()).to(DEVICE)
    source, optimizer = micro_batches_of(Sentences(), shape, SAMPLES, SEED, PADDED), sgd(model.parameters())
    expected = []
    for step in range(STEPS):
        pairs = [(pipeline, index) for pipeline in range(SHAPE[0]) for index in range(SHAPE[2])]
        batches = [tuple(each.to(DEVICE) for each in source.get(step, *pair)) for pair in pairs]
        found = torch.stack([loss(model(inputs), targets) for inputs, targets in batches]).mean()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        expected.append(found.item())
    assert undisturbed().losses == pytest.approx(expected, rel=1e-5)
