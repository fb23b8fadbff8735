"""Data of real runs: the same samples with loader processes or without, whoever dies, and after a resume at any step."""

import shutil

import pytest

from recycle import DataOptions
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from tests.runtime.data_runs import Augmented, Counted, Stateful, hugging_face, joined_rows, run

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


@pytest.mark.parametrize("killed_after", [1, 4])
def test_a_run_that_was_killed_goes_on_with_the_samples_of_its_twin(undisturbed, tmp_path, killed_after):
    twin, folder, make, options = undisturbed
    copy = at_step(folder, tmp_path / "killed", killed_after)
    how = {"steps": STEPS, "out": copy, "resume": True, "data": DataOptions(1, **options)}
    trained = run(make(), "kill W1_0@5:last", **how)
    assert trained.weights_sha256 == twin.weights_sha256
    assert trained.losses == twin.losses


def test_a_checkpoint_has_the_positions_of_all_parts_of_a_stream(undisturbed):
    _, folder, make, _ = undisturbed
    found = read_checkpoint(folder / "checkpoints" / "step-00000003").positions
    parts = {Stateful: 6, hugging_face: 6, Augmented: 0}.get(make, 1)
    assert sorted(found) == [str(part) for part in range(parts)]
