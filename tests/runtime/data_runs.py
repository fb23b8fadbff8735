"""Runs of real processes on data of many kinds: undisturbed, with workers that die, and killed and resumed."""

import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.planner.live_planner import Planner
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions

SHAPE, SAMPLES, WIDTH = (2, 2, 3), 2, 8


class Augmented:
    """A map-style dataset whose samples are drawn at random."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        x = number + torch.rand(WIDTH)
        return x / 50, x.roll(1).sin()


def stages():
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()), nn.Linear(16, WIDTH)]


def problem():
    return recycle.problem(*SHAPE, costs=(10, 13, 9), comm=1)


def run(dataset, *lines, steps=6, data=None, out=None, resume=False, every=0, shape_of_plan=None, samples=SAMPLES, watch=None):
    """Train on `dataset` with workers that fail by the script `lines`; return the summary."""
    wanted = problem()
    injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
    failures = FailureOptions(Planner(wanted), Script.of(injections, wanted.shape, steps), lease_s=5.0, restarts=0)
    options = TrainOptions(
        7,
        True,
        data=data or recycle.DataOptions(),
        checkpoint=CheckpointOptions(every, keep=50, resume=resume),
        failures=failures,
    )
    optimizer = torch.optim.SGD
    plan = recycle.solve(wanted, "greedy", effort=20_000)
    job = Job(plan, stages(), dataset, nn.functional.mse_loss, lambda p: optimizer(p, lr=0.05), steps, samples, out, options)
    return launch(job, watch or (lambda event: None))
