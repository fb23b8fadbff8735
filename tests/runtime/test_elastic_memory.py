"""The memory of workers that share layers: what real processes hold, beside what the plan says."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.plans.memory_use import memory_use
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.profiling.rehearsal import rehearsal_plan
from recycle.profiling.stage_times import measure_stages
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.elastic_stage import elastic_stages
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import TrainOptions
from tests.runtime.jobs import adamw
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(240)
SHAPE = Shape(2, 3, 4)
CONFIG = GptConfig(context=16, width=32, num_heads=2, num_layers=9, vocabulary=512)
LAYERS = (3, 3, 3)


def job_of(plan: recycle.Plan, steps: int = 3, is_exact: bool = False) -> Job:
    stages = gpt_stages(CONFIG, 3, seed=1, layers=LAYERS)
    return Job(plan, stages, Text(16), next_byte_loss, adamw, steps, samples=2, options=TrainOptions(3, is_exact))


def measured(is_exact: bool = False) -> Profile:
    torch.set_num_threads(1)
    return measure_stages(job_of(rehearsal_plan(SHAPE, is_split=True), is_exact=is_exact), num_repeats=1)


def plan_of(profile: Profile, shared: int, fail: str = "W1_1") -> recycle.Plan:
    failed = [Worker.parse(name) for name in fail.split(",") if name]
    return recycle.solve(Problem(Cluster.of(SHAPE, failed), profile, shared_layers=shared), "greedy", effort=20_000)


@pytest.mark.parametrize(("shared", "is_exact"), [(0, False), (1, True), (2, False)])
def test_workers_hold_exactly_the_state_that_the_plan_says_and_about_its_activations(shared: int, is_exact: bool) -> None:
    plan = plan_of(measured(is_exact), shared)
    trained = launch(job_of(plan, is_exact=is_exact))
    planned = {str(worker): used for worker, used in memory_use(plan).items()}
    assert len(planned) == SHAPE.num_workers - 1
    assert trained.static_bytes == trained.planned_static_bytes == {name: used.static_bytes for name, used in planned.items()}
    assert (sum(used.guest_bytes for used in planned.values()) > 0) == bool(shared)
    assert bool(plan.cuts) == bool(shared)
    assert trained.activation_bytes == pytest.approx(trained.planned_activation_bytes, rel=0.1)
    assert trained.planned_activation_bytes == pytest.approx({name: used.activation_bytes for name, used in planned.items()})


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("fail", ["", "W0_0", "W1_1", "W0_2"])
def test_activations_at_their_peak_are_about_those_of_the_plan_wherever_chains_are_cut(shared: int, fail: str) -> None:
    plan = plan_of(measured(), shared, fail)
    job = job_of(plan)
    made = ReferenceExecutor(plan, elastic_stages(job.stages, shared), job.microbatches, job.loss, partial(adamw))
    for executor in made.workers.values():
        executor.stage.meter = ActivationMeter(executor.stage.module)
    made.iterate(0)
    found = {worker: executor.stage.meter.peak_bytes for worker, executor in made.workers.items() if executor.stage.meter}
    planned = {worker: used.activation_bytes for worker, used in memory_use(plan, job.memory_profile()).items()}
    assert found == pytest.approx(planned, rel=0.1)


def test_the_bytes_of_a_job_without_shared_layers_have_no_layers() -> None:
    plan = plan_of(replace(measured(), layers=()), 0, "")
    assert job_of(plan).memory_profile().layers == ()
