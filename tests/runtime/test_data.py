"""Data of real runs: the same samples with loader processes or without, whoever dies, and after a resume at any step."""

import shutil
import time
from dataclasses import replace
from itertools import product
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from recycle import DataOptions, Padding
from recycle.core.errors import DataFailed
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from recycle.runtime.data.make_source import micro_batches_of
from tests.runtime.data_runs import (
    SAMPLES,
    SEED,
    Augmented,
    Broken,
    Counted,
    Sentences,
    Stateful,
    hugging_face,
    joined_rows,
    problem,
    run,
    sgd,
    token_loss,
    token_stages,
)

STEPS = 6


def at_step(folder, copy, num_steps):
    """A copy of a run folder as it was when it was killed after so many steps."""
    shutil.copytree(folder, copy)
    for found, path in find_checkpoints(copy / "checkpoints").items():
        if found > num_steps:
            shutil.rmtree(path)
    return copy


KINDS = {
    "map-style": (Augmented, {}),
    "stateful loader": (lambda: StatefulDataLoader(Augmented(), SAMPLES, shuffle=True, generator=torch.Generator().manual_seed(2)), {}),
    "stream without state": (Counted, {}),
    "stream with state": (Stateful, {}),
    "Hugging Face": (hugging_face, {"collate": joined_rows}),
    "stream that repeats": (lambda: Counted(50), {"repeats": True}),
}


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request, tmp_path_factory):
    """A run without loader processes, with a checkpoint of every step; and how to run on the same data."""
    make, options = KINDS[request.param]
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    trained = run(make(), steps=STEPS, out=folder, every=1, data=DataOptions(**options))
    assert len(trained.losses) == STEPS
    return trained, folder, make, options


def test_loader_processes_change_no_sample_and_neither_do_workers_that_die(undisturbed):
    twin, _, make, options = undisturbed
    trained = run(make(), "kill W0_0@2:first", "kill W1_1@4:reduce", steps=STEPS, data=DataOptions(2, **options))
    assert len([each for each in trained.recoveries if not each.joins]) == 2
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


@pytest.mark.parametrize("killed_after", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 3, 5)), 4])
def test_a_run_that_was_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path, killed_after):
    twin, folder, make, options = undisturbed
    copy = at_step(folder, tmp_path / "killed", killed_after)
    how = {"steps": STEPS, "out": copy, "resume": True, "data": DataOptions(1, **options)}
    trained = run(make(), "kill W1_0@5:last", **how)
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


@pytest.mark.slow
def test_a_job_whose_processes_are_all_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path):
    """They are killed within a step, in which one of them is late: loader processes have read ahead of the last checkpoint."""
    twin, _, make, options = undisturbed
    killed_in = 5 if options else 3
    how = {"steps": STEPS, "out": tmp_path / "run", "every": 1, "data": DataOptions(2, **options)}
    job = get_context("spawn").Process(target=run, args=(make(), f"slow W0_1@{killed_in}:last+3s"), kwargs=how)
    job.start()
    try:
        deadline = time.monotonic() + 120
        while killed_in - 2 not in find_checkpoints(tmp_path / "run" / "checkpoints"):
            assert time.monotonic() < deadline, "there is no checkpoint"
            time.sleep(0.05)
    finally:
        job.kill()
        job.join()
    trained = run(make(), **how, resume=True)
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


def test_a_checkpoint_has_the_positions_of_all_parts_of_a_stream(undisturbed):
    _, folder, make, _ = undisturbed
    found = read_checkpoint(folder / "checkpoints" / "step-00000003").positions
    parts = {"map-style": 0, "stateful loader": 0, "stream with state": 6, "Hugging Face": 6}.get(kind, 1)
    assert sorted(found) == [str(part) for part in range(parts)]


def test_micro_batches_of_different_lengths_pass_between_stages():
    """The losses are those of one process that trains the whole model on the same micro-batches; a death changes no bit."""
    data = DataOptions(padding=Padding(12))
    how = {"steps": 4, "model": token_stages, "loss": token_loss}
    whole = run(Sentences(), data=data, **how)
    assert whole.losses == pytest.approx(losses_of_one_process(data, 4), rel=1e-5)
    killed = run(Sentences(), "kill W1_1@2:first", data=replace(data, loader_processes=1), **how)
    assert killed.recoveries
    assert killed.weights_sha256 == whole.weights_sha256


def losses_of_one_process(data, steps):
    shape, model = problem().shape, nn.Sequential(*token_stages())
    source, optimizer = micro_batches_of(Sentences(), shape, SAMPLES, SEED, data), sgd(model.parameters())
    losses, lengths = [], set()
    for step in range(steps):
        own = []
        for pipeline, index in product(range(shape.num_pipelines), range(shape.num_microbatches)):
            inputs, targets = source.get(step, pipeline, index)
            lengths.add(inputs.shape[1])
            own.append(token_loss(model(inputs), targets))
        loss = torch.stack(own).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(lengths) > 2
    return losses


def test_a_sample_that_raises_ends_the_run_with_its_number():
    with pytest.raises(DataFailed, match=r"^sample \d+ of the dataset raised ZeroDivisionError in data_runs.py, line \d+: "):
        run(Broken(), data=DataOptions(1))


def test_a_stream_that_ends_early_ends_the_run_in_a_sentence():
    with pytest.raises(DataFailed, match=r"^part \d of 6 of the stream ended after 6 samples, 3 micro-batches: give more data"):
        run(Stateful(36), data=DataOptions(1))


def test_a_stream_without_state_that_must_be_skipped_is_told(tmp_path):
    run(Counted(), steps=6, out=tmp_path / "run", every=6)
    trained = run(Counted(), steps=8, out=tmp_path / "run", resume=True)
    assert any("72 samples of the stream are read again to get to step 7" in each for each in trained.warnings)
