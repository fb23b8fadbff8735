"""Losses that layers add to that of their micro-batch: losses and weights are those of plain torch, whoever is dead."""

from functools import cache

import pytest
import torch
from torch import nn

import recycle
from recycle.core.errors import LossNotScalar
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Recovered
from recycle.planner.live_planner import Planner
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import EvaluationOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, greedy_plan, loss, sgd
from tests.runtime.recovery_runs import ALL, SYNCHRONOUS, problem
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(240)
SHAPE, STEPS, NUM_LAYERS = (3, 3, 2), 5, 9


class Mixture(nn.Module):
    """A mixture of experts. Its router adds a loss that balances the experts, and one that keeps its logits small."""

    def __init__(self, num_experts=3):
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(num_experts)])

    def forward(self, x):
        logits = self.router(x)
        shares = logits.softmax(-1)
        recycle.add_loss(0.5 * shares.mean((0, 1)).square().sum() * len(self.experts))
        recycle.add_loss(1e-2 * logits.logsumexp(-1).square().mean())
        made = torch.stack([expert(x).tanh() for expert in self.experts], -1)
        return x + (made * shares.unsqueeze(-2)).sum(-1)


class Always(nn.Module):
    """A layer without parameters that adds a loss of what it is given."""

    def forward(self, x):
        recycle.add_loss(1e-2 * x.square().mean())
        return x * 1.0


def layers(is_shared=False):
    torch.manual_seed(3)
    made = [(nn.Linear(WIDTH, WIDTH), Mixture(), Always())[number % 3] for number in range(NUM_LAYERS)]
    if is_shared:
        made[4] = made[1]
    return made


def stages(num_stages=SHAPE[1], is_shared=False):
    return recycle.cut(nn.Sequential(*layers(is_shared)), stages=num_stages)


@cache
def in_plain_torch(is_shared=False):
    """The losses and the weights of the whole model, by a plain loop."""
    model, samples, losses = nn.Sequential(*layers(is_shared)), Numbers(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        found = []
        for pipeline in range(SHAPE[0]):
            for index in range(SHAPE[2]):
                x, y = samples.get(step, pipeline, index)
                with recycle.collect_losses() as added:
                    found.append(loss(model(x), y))
                found[-1] = found[-1] + sum(added)
        mean = torch.stack(found).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def in_one_process(fail="", shared=0, is_exact=False, is_shared=False, **options):
    held = stages(is_shared=is_shared)
    options = {"layers": NUM_LAYERS, "shared_layers": shared, **options} if shared else options
    plan = greedy_plan(SHAPE, fail, **options)
    given = elastic_stages(held, shared) if shared else held
    job = ReferenceExecutor(plan, given, Numbers(), loss, sgd, is_exact=is_exact, carries_loss=True)
    return [job.iterate(step) for step in range(STEPS)], job


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("fail", ["", "W0_1,W2_0"])
def test_losses_and_weights_are_those_of_plain_torch(fail, is_exact, is_shared):
    losses, job = in_one_process(fail, is_exact=is_exact, is_shared=is_shared)
    plain, weights = in_plain_torch(is_shared)
    assert losses == pytest.approx(plain, rel=1e-5)
    firsts = [next(each for each in job.workers if each.stage == number) for number in range(SHAPE[1])]
    found = [parameter for worker in firsts for parameter in job.workers[worker].stage.module.parameters()]
    if not is_shared:  # else a matrix is in two stages
        for one, other in zip(weights, found, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_shared", [False, True])
def test_one_hash_and_the_same_losses_with_cuts_and_dead_workers(is_shared):
    runs = [
        in_one_process(is_exact=True, is_shared=is_shared),
        in_one_process("W0_1,W2_0", is_exact=True, is_shared=is_shared),
        in_one_process("W1_2", shared=2, is_exact=True, is_shared=is_shared),
    ]
    assert len({job.weights_sha256() for _, job in runs}) == 1
    assert runs[0][0] == runs[1][0] == runs[2][0]


def in_processes(*lines, techniques=ALL, shared=0, **options):
    wanted = problem(SHAPE, techniques)
    if shared:
        wanted = recycle.problem(
            *SHAPE, costs=(10, 13, 9), comm=1, techniques=techniques, layers=NUM_LAYERS, shared_layers=shared
        )
    script = Script.of([Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines], wanted.shape, STEPS)
    options = TrainOptions(0, True, failures=FailureOptions(Planner(wanted), script, lease_s=LEASE_S, restarts=0), **options)
    events = []
    job = Job(recycle.solve(wanted, "greedy"), stages(), Numbers(), loss, sgd, STEPS, options=options)
    return launch(job, events.append), sum(isinstance(event, Recovered) for event in events)


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ((), {}),
        (("kill W0_1@2", "kill W2_0@4:step"), {}),
        pytest.param(("kill W1_2@3",), {"shared": 2}, marks=pytest.mark.slow),
        (("kill W1_1@2:reduce",), {"techniques": SYNCHRONOUS}),
    ],
)
def test_workers_that_die_change_nothing(lines, options):
    trained, num_recoveries = in_processes(*lines, **options)
    losses, job = in_one_process(is_exact=True)
    assert num_recoveries == len(lines)
    assert trained.weights_sha256 == job.weights_sha256()
    assert list(trained.losses) == losses


class Samples:
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return tuple(each[0] for each in Numbers().get(100, 0, number))


def test_an_evaluation_has_what_layers_add_as_in_plain_torch(tmp_path):
    wanted = problem(SHAPE, ALL)
    options = TrainOptions(evaluation=EvaluationOptions(Samples()), failures=FailureOptions(Planner(wanted)))
    parts = stages()
    job = Job(recycle.solve(wanted, "greedy"), parts, Numbers(), loss, sgd, 1, samples=2, out=tmp_path, options=options)
    (evaluation,) = launch(job).evaluations
    recycle.load(parts, tmp_path)
    found = []
    for first in range(0, 8, 2):
        x, y = (torch.stack(each) for each in zip(*(Samples()[first + number] for number in range(2)), strict=True))
        with torch.no_grad(), recycle.collect_losses() as added:
            found.append(float(loss(nn.Sequential(*parts)(x), y)))
        found[-1] += float(sum(added))
    assert evaluation.loss == pytest.approx(sum(found) / len(found), rel=1e-6)


@pytest.mark.parametrize("value", [torch.ones(2), 1.0, torch.ones((), dtype=torch.int64), None])
def test_something_else_than_a_scalar_is_refused(value):
    with pytest.raises(LossNotScalar, match=r"add_loss was given a .*, but what is added to the loss must be a scalar tensor"):
        recycle.add_loss(value)


def test_nothing_collects_in_plain_torch():
    recycle.add_loss(torch.ones(()))
    with recycle.collect_losses() as added:
        pass
    assert added == []
