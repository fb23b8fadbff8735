"""Data of real runs: the same samples with loader processes or without, whoever dies, and after a resume at any step."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from recycle import DataOptions, Padding
from recycle.core.errors import DataFailed, NoCheckpoint
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from recycle.runtime.data.make_source import micro_batches_of
from tests.processes import wait_for
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
    packed,
    packed_stages,
    problem,
    run,
    sgd,
    token_loss,
    token_stages,
)

STEPS = 6


def at_step(folder, copy, num_steps, every=1):
    """A copy of a run folder as it was when it was killed after so many steps, with a checkpoint `every` so many."""
    shutil.copytree(folder, copy)
    for found, path in find_checkpoints(copy / "checkpoints").items():
        if found > num_steps or found % every:
            shutil.rmtree(path)
    return copy


@dataclass(frozen=True)
class Kind:
    """Data of one kind, in so many parts of a stream, how they are read, and what trains on them."""

    make: Callable[[], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    num_parts: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)

    def run(self, *lines, loader_processes=0, **how):
        data = DataOptions(loader_processes, **self.options)
        return run(self.make(), *lines, steps=STEPS, data=data, **self.model, **how)


def stateful_loader():
    return StatefulDataLoader(Augmented(), SAMPLES, shuffle=True, generator=torch.Generator().manual_seed(2))


TOKENS = {"model": token_stages, "loss": token_loss}
KINDS = {
    "map-style": Kind(Augmented),
    "stateful loader": Kind(stateful_loader),
    "stream without state": Kind(Counted, num_parts=1),
    "stream with state": Kind(Stateful, num_parts=6),
    "Hugging Face": Kind(hugging_face, {"collate": joined_rows}, 6),
    "stream that repeats": Kind(partial(Counted, 50), {"repeats": True}, 1),
    "padded": Kind(Sentences, {"padding": Padding(12)}, model=TOKENS),
    "packed": Kind(packed, {"repeats": True}, 2, {"model": packed_stages, "loss": token_loss}),
}


@pytest.fixture(scope="module", params=KINDS)
def undisturbed(request, tmp_path_factory):
    """A run without loader processes, with a checkpoint of every step; its folder, and the kind of its data."""
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    trained = kind.run(out=folder, every=1)
    assert len(trained.losses) == STEPS
    return trained, folder, kind


def test_loader_processes_change_no_sample_and_neither_do_workers_that_die(undisturbed):
    twin, _, kind = undisturbed
    trained = kind.run("kill W0_0@2:first", "kill W1_1@4:reduce", loader_processes=2)
    assert len([each for each in trained.recoveries if not each.joins]) == 2
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


@pytest.mark.parametrize("killed_after", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 3, 4, 5))])
def test_a_run_that_was_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path, killed_after):
    twin, folder, kind = undisturbed
    copy = at_step(folder, tmp_path / "killed", killed_after)
    trained = kind.run("kill W1_0@5:last", out=copy, resume=True, loader_processes=1)
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


def test_a_run_that_was_killed_between_two_checkpoints_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path):
    """There is one of step 3 only, and the run was in step 6: loader processes have read far ahead of it."""
    twin, folder, kind = undisturbed
    copy = at_step(folder, tmp_path / "killed", 5, every=3)
    trained = kind.run("kill W1_1@5:first", out=copy, resume=True, every=3, loader_processes=1)
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_with_the_samples_of_its_twin(undisturbed, tmp_path):
    twin, folder, kind = undisturbed
    copy = at_step(folder, tmp_path / "killed", 0)
    with pytest.raises(NoCheckpoint, match="start the run anew, without resuming"):
        kind.run(out=copy, resume=True)
    assert kind.run(out=copy).losses == twin.losses


@pytest.mark.slow
@pytest.mark.parametrize(("every", "killed_in"), [(1, 3), (1, 5), (3, 2), (3, 5)])
def test_a_job_whose_processes_are_all_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path, every, killed_in):
    """They are killed within a step, in which one of them is late: loader processes have read ahead of the last checkpoint."""
    twin, _, kind = undisturbed
    how = {"out": tmp_path / "run", "every": every, "loader_processes": 2}
    job = get_context("spawn").Process(target=kind.run, args=(f"slow W0_1@{killed_in}:last+10s",), kwargs=how)
    job.start()
    try:
        run, step = tmp_path / "run", killed_in - 2
        wait_for(lambda: num_steps_recorded(run) >= step and has_checkpoint(run, step, every), 120, "the step does not come")
    finally:
        job.kill()
        job.join()
    saved = find_checkpoints(tmp_path / "run" / "checkpoints")
    assert max(saved, default=0) < STEPS
    trained = kind.run(**how, resume=bool(saved))
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


def num_steps_recorded(folder):
    path = folder / "record.jsonl"
    return path.read_text().count('"event":"step"') if path.exists() else -1


def has_checkpoint(folder, num_steps, every):
    """Whether the last checkpoint that is due at this step is there."""
    due = num_steps // every * every
    return not due or due in find_checkpoints(folder / "checkpoints")


def test_a_checkpoint_has_the_positions_of_all_parts_of_a_stream(undisturbed):
    _, folder, kind = undisturbed
    found = read_checkpoint(folder / "checkpoints" / "step-00000003").positions
    assert sorted(found) == [str(part) for part in range(kind.num_parts)]


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
