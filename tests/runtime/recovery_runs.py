"""Runs of real processes in which workers fail, and the undisturbed twin that they are compared with."""

import multiprocessing
import time
from functools import cache

from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Recovered
from recycle.planner.live_planner import Planner
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import Numbers, adamw, loss, small_stages
from tests.runtime.reference_executor import ReferenceExecutor

ALL, SYNCHRONOUS = "adaptive,decoupled,staggered", "adaptive,decoupled"
STEPS, SEED = 10, 5


class Unhurried(nn.Module):
    """A layer that takes its time, so that a worker has loaded before the run is over."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def problem(shape, techniques):
    return recycle.problem(*shape, costs=(10, 13, 9), comm=1, techniques=techniques)


def unhurried_stages(num_stages, seconds):
    return [nn.Sequential(stage, Unhurried(seconds)) for stage in small_stages(num_stages)]


@cache
def undisturbed(shape, steps=STEPS, max_norm=None):
    """The weights and losses of the synchronous reference, in one process."""
    plan = recycle.solve(problem(shape, ALL), "greedy")
    reference = ReferenceExecutor(
        plan, unhurried_stages(shape[1], 0), Numbers(), loss, adamw, seed=SEED, is_exact=True, max_norm=max_norm
    )
    losses = [reference.iterate(step) for step in range(steps)]
    return reference.weights_sha256(), losses


class Run:
    """A run of real processes by a script, and what was seen of it."""

    def __init__(
        self,
        shape,
        *lines,
        techniques=ALL,
        steps=STEPS,
        max_norm=None,
        lease_s=5.0,
        pause_s=0.0,
        out=None,
        every=0,
        watch=None,
        compare_every=10,
        restarts=0,
        lean_steps=None,
    ):
        self.events = []
        wanted = problem(shape, techniques)
        injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
        script = Script.of(injections, wanted.shape, steps)
        self.stages = stages = unhurried_stages(shape[1], pause_s)
        failures = FailureOptions(Planner(wanted), script, lease_s=lease_s, compare_every=compare_every, restarts=restarts)
        checkpoint = CheckpointOptions(every)
        options = TrainOptions(SEED, True, max_norm, lean_steps=lean_steps, checkpoint=checkpoint, failures=failures)
        job = Job(recycle.solve(wanted, "greedy"), stages, Numbers(), loss, adamw, steps, out=out, options=options)

        def observe(event):
            self.events.append(event)
            if watch is not None:
                watch(event)

        self.trained = launch(job, observe)
        assert not multiprocessing.active_children()

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def recoveries(self):
        return self.of(Recovered)

    @property
    def lost(self):
        return [worker for recovery in self.recoveries if not recovery.joins for worker in recovery.workers]
