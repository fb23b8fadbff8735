"""Data of real runs: the same samples with loader processes or without, whoever dies, and after a resume at any step."""

import shutil

import pytest

from recycle import DataOptions
from recycle.runtime.checkpoint.files import find_checkpoints
from tests.runtime.data_runs import Augmented, run

STEPS = 6


def at_step(folder, copy, num_steps):
    """A copy of a run folder as it was when it was killed after so many steps."""
    shutil.copytree(folder, copy)
    for found, path in find_checkpoints(copy / "checkpoints").items():
        if found > num_steps:
            shutil.rmtree(path)
    return copy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run without loader processes, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return run(Augmented(), steps=STEPS, out=folder, every=1), folder


def test_loader_processes_change_no_sample_and_neither_do_workers_that_die(undisturbed):
    twin, _ = undisturbed
    trained = run(Augmented(), "kill W0_0@2:first", "kill W1_1@4:reduce", steps=STEPS, data=DataOptions(2))
    assert trained.recoveries
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


@pytest.mark.parametrize("killed_after", [1, 4])
def test_a_run_that_was_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path, killed_after):
    twin, folder = undisturbed
    copy = at_step(folder, tmp_path / "killed", killed_after)
    trained = run(Augmented(), "kill W1_0@5:last", steps=STEPS, out=copy, resume=True, data=DataOptions(1))
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses
