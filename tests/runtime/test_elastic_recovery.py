"""Stages with shared layers in real processes: kills, re-joins and checkpoints change no weight, wherever chains are cut."""

import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Event, Recovered
from recycle.core.plans.plan import Plan
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, adamw, loss
from tests.runtime.random_cuts import RandomCuts
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(240)
SHAPE, LAYERS, STEPS, SEED, MAX_NORM = (3, 3, 3), 9, 8, 5, 0.5


def stages() -> list[nn.Module]:
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return recycle.cut(nn.Sequential(*layers), [3, 6])


def problem() -> recycle.Problem:
    return recycle.problem(*SHAPE, costs=(10, 13, 9), comm=1)


@cache
def undisturbed(steps: int = STEPS) -> str:
    """The weights of stages without shared layers, in one process."""
    plan = recycle.solve(problem(), "greedy", effort=1000)
    job = ReferenceExecutor(plan, stages(), Numbers(), loss, adamw, seed=SEED, is_exact=True, max_norm=MAX_NORM)
    for step in range(steps):
        job.iterate(step)
    return job.weights_sha256()


def run(
    *lines: str, shared: int, steps: int = STEPS, out: Path | None = None, resume: bool = False, plan: Plan | None = None
) -> tuple[str, list[Recovered]]:
    """The hash of the weights of a run by a script, and its recoveries."""
    source = RandomCuts(problem(), LAYERS, shared) if shared else recycle.Planner(problem())
    plan = plan or source.answer(frozenset()).plan
    injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
    failures = FailureOptions(source, Script.of(injections, plan.problem.shape, steps), lease_s=LEASE_S)
    checkpoint = CheckpointOptions(2 if out is not None else 0, resume=resume)
    options = TrainOptions(SEED, True, MAX_NORM, checkpoint=checkpoint, failures=failures)
    events: list[Event] = []
    trained = launch(Job(plan, stages(), Numbers(), loss, adamw, steps, out=out, options=options), events.append)
    assert not multiprocessing.active_children()
    return trained.weights_sha256, [event for event in events if isinstance(event, Recovered)]


def test_kills_and_a_return_change_nothing() -> None:
    lines = ("kill W0_1@2", "kill W1_1@3:last", "kill W2_0@4:reduce", "rejoin W0_1@5", "kill W1_2@6:step")
    weights, recoveries = run(*lines, shared=2)
    assert weights == undisturbed()
    assert len([each for each in recoveries if not each.joins]) == 4
    # The worker that comes back may do so while the last one dies: then that recovery serves both.
    assert len(recoveries) <= 5
    assert recoveries[-1].num_live == 9 - 4 + 1


def test_a_stage_that_is_lost_entirely_comes_back_from_a_checkpoint_with_its_guests(tmp_path: Path) -> None:
    lines = [f"kill W{pipeline}_1@5" for pipeline in range(3)]
    weights, recoveries = run(*lines, shared=1, out=tmp_path)
    assert weights == undisturbed()
    assert sorted(worker for each in recoveries for worker in each.workers) == ["W0_1", "W1_1", "W2_1"]
    # Not the fifth, but that of a checkpoint: the last one, unless it was still being written.
    assert min(each.iteration for each in recoveries) in (2, 4)


def test_a_run_resumes_with_more_or_fewer_shared_layers(tmp_path: Path) -> None:
    for shared, steps in ((2, 4), (0, 6), (1, 8)):
        weights, _ = run(shared=shared, steps=steps, out=tmp_path, resume=steps > 4)
        assert weights == undisturbed(steps)
