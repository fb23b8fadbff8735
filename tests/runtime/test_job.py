"""`Job` and its options: refusals, the fingerprint in checkpoints, and the configurations derived for processes."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

import recycle
from recycle.control.net.handshake import Endpoint
from recycle.core.cluster import Shape
from recycle.core.errors import DatasetTooSmall, ForeignPlan, Uncuttable, UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import coordinator_config, worker_spec
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions
from recycle.runtime.worker.worker_spec import pickled
from tests.plans import make_1f1b_plan
from tests.runtime.jobs import Numbers, adamw, greedy_plan, loss, make_stages, tied_stages
from tests.runtime.random_cuts import cut_at_random

PAIRS = [(torch.ones(5, 16), torch.ones(5, 16))] * 12
ENDPOINT = Endpoint("127.0.0.1", 1, "secret", "a1b2")


def make_job(dataset=PAIRS, stages=None, **others):
    return Job(make_1f1b_plan(2, 2, 3), stages or make_stages(2), dataset, loss, adamw, 4, **{"samples": 2, **others})


def test_a_checkpoint_says_the_same_of_its_job_in_every_release():
    options = TrainOptions(7, True, 0.5, autocast=torch.bfloat16, checkpoint=CheckpointOptions(about={"model.layers": 2}))
    known = dict(make_job(stages=tied_stages(2), options=options).fingerprint())
    model, layers = known.pop("model"), known.pop("layers")
    assert known.pop("data_by_pipeline") is False
    assert [[len(names) for names in of_stage] for of_stage in layers["names"]] == [[12, 2], [12, 2]]
    assert layers["ties"] == [[(1, "weight"), (3, "weight")]]
    assert json.dumps(known) == (
        '{"pipelines": 2, "stages": 2, "microbatches": 3, "seed": 7, "exact": true, "max_norm": 0.5, "sums": "float32", '
        '"autocast": "bfloat16", "data": "micro-batches of 2 out of 12 samples, seed 7", '
        '"ties": [[[0, "1.weight"], [1, "1.weight"]]], "about": {"model.layers": 2}}'
    )
    assert [len(stage) for stage in model] == [14, 14]
    assert model[1]["1.weight"] == [16, 16, "float32"]


def test_micro_batches_come_from_a_dataset_by_the_seed_or_from_a_source_as_it_is():
    job = make_job(options=TrainOptions(3))
    assert isinstance(job.microbatches, MicroBatches)
    assert repr(job.microbatches) == "micro-batches of 2 out of 12 samples, seed 3"
    assert job.samples_per_step == 12
    source = Numbers()
    assert make_job(source).microbatches is source
    assert make_job(source).fingerprint()["data"] == "Numbers"


def test_a_dataset_that_does_not_fill_a_step_is_refused_when_the_job_is_made():
    with pytest.raises(DatasetTooSmall, match=r"one step needs 18 samples .* the dataset has 12"):
        make_job(samples=3)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: CheckpointOptions(every=-1), "the number of steps between checkpoints is -1, but it must be a whole number"),
        (lambda: CheckpointOptions(keep=0), "the number of checkpoints to keep is 0"),
        (lambda: TrainOptions(seed=True), "the seed is True"),
        (lambda: TrainOptions(device="tpu"), "the device is 'tpu', but it must be cpu or cuda"),
        (lambda: TrainOptions(transport="mpi"), "the transport is 'mpi', but it must be auto, gloo, nccl or ipc"),
        (lambda: FailureOptions(lease_s=0), "the lease is 0"),
        (lambda: make_job(options=TrainOptions(checkpoint=CheckpointOptions(resume=True))), "name it with out"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.fixture
def recorded(tmp_path):
    """A job with a run folder, checkpoints and failures."""
    plan_source = recycle.Planner(recycle.problem(2, 2, 3, costs=(1, 1, 1)))
    script = Script((Injection.parse(Action.KILL, "coordinator@2"), Injection.parse(Action.KILL, "W1_1@3")))
    failures = FailureOptions(plan_source, script, lease_s=3.0)
    return make_job(out=str(tmp_path), options=TrainOptions(checkpoint=CheckpointOptions(2, 5), failures=failures))


def test_a_worker_gets_the_options_of_the_job_but_no_planner(recorded, tmp_path):
    spec = worker_spec(recorded)
    assert spec.options == replace(recorded.options, failures=FailureOptions())
    assert b"planner" not in pickled(spec)
    assert spec.checkpoint_folder == tmp_path / "checkpoints"
    assert worker_spec(replace(recorded, out=None)).checkpoint_folder is None
    assert (spec.num_steps, spec.options.checkpoint.is_due(2, 4), spec.options.checkpoint.is_due(3, 4)) == (4, True, False)


def test_a_coordinator_gets_the_run_folder_and_its_own_failures(recorded, tmp_path):
    config = coordinator_config(recorded, ENDPOINT, 17, Path("elsewhere"))
    assert (config.folder, config.journal) == (tmp_path, tmp_path / "journal.jsonl")
    assert (config.job, config.token, config.begin_us) == ("a1b2", "secret", 17)
    assert (config.checkpoint.every, config.checkpoint.keep, config.lease_s) == (2, 5, 3.0)
    assert [str(injection) for injection in config.injections] == ["coordinator@2"]
    assert config.source is recorded.options.failures.plan_source
    assert (
        coordinator_config(replace(recorded, out=None), ENDPOINT, 17, tmp_path / "s").journal == tmp_path / "s" / "journal.jsonl"
    )


class Residual(nn.Sequential):
    """A Sequential with a forward of its own, which its modules alone do not compute."""

    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x):
        return x + super().forward(x)


class Forgetful(Residual):
    def split_into_layers(self):
        return list(self)


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def in_place(num_behind):
    """A stage whose second layer works in place, with so many layers from there on."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), *(nn.Linear(16, 16) for _ in range(num_behind)))


def sequential(*widths):
    return [nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(each))) for each in widths]


@pytest.mark.parametrize(
    ("stages", "shared", "error", "words"),
    [
        (sequential((16, 16, 16), (16, 16, 16)), 1, None, ""),
        (sequential((16, 8, 16), (16, 16, 16)), 1, Uncuttable, "stage 0 cannot be shared: .*16.* and .*8"),
        (sequential((16, 16, 16), (16, 8, 16)), 1, Uncuttable, "stage 1 cannot be shared"),
        (sequential((16, 8, 16, 16), (16, 16, 16)), 1, None, ""),
        (sequential((16, 16, 16), (16, 16, 8)), 2, None, ""),
        (sequential((16, 16, 16), (16, 16, 16)), 3, Uncuttable, "3 layers cannot be shared: stage 0 has only 2"),
        ([nn.Linear(16, 16), nn.Linear(16, 16)], 1, Uncuttable, "a stage of type Linear cannot share layers"),
        ([Residual(), Residual()], 1, Uncuttable, "a stage of type Residual cannot share layers"),
        ([Forgetful(), Forgetful()], 1, Uncuttable, "stage 0, one after the other, do not compute what the stage does"),
        ([in_place(0), in_place(0)], 1, Uncuttable, "layer 1 of stage 0 .* changes its input in place"),
        ([in_place(1), in_place(1)], 1, Uncuttable, "layer 1 of stage 1 .* changes its input in place"),
        ([in_place(1), sequential((16, 16, 16))[0]], 1, None, ""),
        (
            [nn.Sequential(Pair(), First()), sequential((16, 16, 16))[0]],
            1,
            Uncuttable,
            "stage 0 cannot be shared: what passes between them differs",
        ),
        ([*sequential((16, 16, 16)), nn.Sequential(nn.Linear(16, 16), Pair())], 1, None, ""),
    ],
)
def test_layers_are_shared_only_where_every_cut_passes_on_the_same_kind_of_tensor(stages, shared, error, words):
    def specs():
        options = TrainOptions(shared_layers=shared)
        return Job(
            Shape(2, 2, 3), stages, Numbers(), lambda made, targets: made[0].mean(), adamw, 2, options=options
        ).boundaries()

    if error is None:
        assert [spec.shape for spec in specs()[0].tensors] == [(2, 5, 16)]
        return
    with pytest.raises(error, match=words):
        specs()


def test_a_plan_for_other_layers_is_refused():
    plan = cut_at_random(greedy_plan((2, 2, 3)), 6, 1, Random(1))
    with pytest.raises(ForeignPlan, match="the stages have 2, 2 layers, but those of the plan 3, 3"):
        Job(plan, sequential((16, 16, 16), (16, 16, 16)), Numbers(), loss, adamw, 2)
