"""Whole layers move between stages at recoveries of real processes: no weight changes, whatever is killed and when."""

import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Event, Recovered
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from tests.runtime.jobs import LEASE_S, WIDTH, Numbers, adamw, loss
from tests.runtime.random_layers import RandomLayers
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(240)
SHAPE, LAYERS, STEPS, SEED, MAX_NORM = (3, 3, 3), 9, 8, 5, 0.5


def stages(cuts: tuple[int, ...] = (3, 6)) -> list[nn.Module]:
    """Nine layers, of which the second and the last share a matrix."""
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)) for _ in range(LAYERS)]
    layers[-1][0].weight = layers[1][0].weight
    return recycle.cut(nn.Sequential(*layers), cuts)


def problem(shared: int = 0) -> recycle.Problem:
    profile = recycle.Profile.uniform(SHAPE[1], 10, 13, 9, 1).with_equal_layers(LAYERS)
    return recycle.problem(*SHAPE, profile=profile, shared_layers=shared)


@cache
def undisturbed(steps: int = STEPS) -> str:
    plan = recycle.solve(problem(), "greedy", effort=1000)
    job = ReferenceExecutor(plan, stages(), Numbers(), loss, adamw, seed=SEED, is_exact=True, max_norm=MAX_NORM)
    for step in range(steps):
        job.iterate(step)
    return job.weights_sha256()


def run(
    *lines: str,
    shared: int = 0,
    seed: int = 0,
    may_move: bool = False,
    steps: int = STEPS,
    out: Path | None = None,
    resume: bool = False,
) -> tuple[str, list[Recovered]]:
    """The hash of the weights of a run by a script, and its recoveries."""
    source = RandomLayers(problem(shared), seed, may_move)
    plan = source.answer(frozenset()).plan
    injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
    # `Script.of` knows only copies to workers that rejoin.
    failures = FailureOptions(source, Script(tuple(injections)), lease_s=LEASE_S)
    checkpoint = CheckpointOptions(2 if out is not None else 0, keep=9, resume=resume)
    options = TrainOptions(SEED, True, MAX_NORM, checkpoint=checkpoint, failures=failures)
    events: list[Event] = []
    trained = launch(Job(plan, stages(), Numbers(), loss, adamw, steps, out=out, options=options), events.append)
    assert not multiprocessing.active_children()
    return trained.weights_sha256, [event for event in events if isinstance(event, Recovered)]


@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_layers_move_at_every_recovery_and_no_weight_changes(shared: int) -> None:
    lines = ("kill W0_1@2", "kill W1_1@3:last", "kill W2_0@4:reduce", "rejoin W0_1@5", "kill W1_2@6:step")
    weights, recoveries = run(*lines, shared=shared)
    assert weights == undisturbed()
    # On a busy machine the worker that comes back may do so in the recovery from the last kill: then there are four recoveries,
    # after two of which the stages may have the same layers.
    assert {name for each in recoveries if not each.joins for name in each.workers} >= {"W0_1", "W1_1", "W2_0", "W1_2"}
    assert len({each.layers for each in recoveries}) >= 3


def test_checkpoints_after_a_move_are_resumed_with_the_stages_of_the_job(tmp_path: Path) -> None:
    weights, recoveries = run("kill W0_1@3", steps=4, out=tmp_path)
    assert weights == undisturbed(4)
    assert recoveries[0].layers not in ((), (3, 3, 3))
    checkpoint = read_checkpoint(find_checkpoints(tmp_path / "checkpoints")[4])
    assert checkpoint.layers is not None
    assert tuple(map(len, checkpoint.layers.stages)) == recoveries[0].layers
    assert run(steps=6, out=tmp_path, resume=True)[0] == undisturbed(6)
    fresh = stages(())
    assert recycle.load(fresh, tmp_path) == 6


@pytest.mark.parametrize("killed", [("W1_0",), pytest.param(("W2_2", "W0_0"), marks=pytest.mark.slow)])
def test_workers_that_are_killed_while_layers_move_are_survived(killed: tuple[str, ...]) -> None:
    weights, recoveries = run("kill W0_1@3", *(f"kill {worker}@1:transfer" for worker in killed), shared=1, seed=3)
    assert weights == undisturbed()
    assert sorted(worker for each in recoveries for worker in each.workers) == sorted(["W0_1", *killed])
    assert recoveries[-1].layers != ()


def test_layers_whose_holders_are_all_dead_come_back_from_a_checkpoint_of_other_layers(tmp_path: Path) -> None:
    lines = ("kill W0_0@3", *(f"kill W{pipeline}_1@6" for pipeline in range(3)))
    weights, recoveries = run(*lines, out=tmp_path, seed=1)
    assert weights == undisturbed()
    # Not the sixth, but that of a checkpoint: the last one, unless it was still being written.
    assert min(each.iteration for each in recoveries[1:]) in (2, 4)
    assert recoveries[0].layers not in ((), (3, 3, 3))


def test_a_coordinator_that_takes_over_knows_which_layers_stages_have(tmp_path: Path) -> None:
    weights, recoveries = run("kill W0_1@2", "kill coordinator@4", "kill W2_0@6", "rejoin W0_1@7", out=tmp_path, seed=3)
    assert weights == undisturbed()
    assert len({each.layers for each in recoveries}) == 3


def test_with_workers_that_move_too_no_weight_changes() -> None:
    lines = ("kill W0_1@2", "kill W1_1@3", "kill W2_1@4", "rejoin W0_1@6", "rejoin W1_1@7")
    weights, _ = run(*lines, may_move=True, seed=4, shared=1)
    assert weights == undisturbed()
