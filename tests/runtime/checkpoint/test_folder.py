"""The launcher's half: when a checkpoint is whole, when there will be none, and which ones are kept."""

import contextlib
import errno
import os
import shutil
from dataclasses import replace

import pytest

from recycle.core.errors import FileProblem, UserError
from recycle.runtime.checkpoint import folder as checkpoint_folder
from recycle.runtime.checkpoint.files import read_checkpoint
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointFolder, CheckpointIncomplete
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.checkpoint.resume import latest, load_stage
from recycle.runtime.checkpoint.writer import StageNotSaved
from tests.runtime.checkpoint.saved_stages import FINGERPRINT, decided_by, held, names_in, report_of, save_all, small_stage

pytestmark = pytest.mark.timeout(60)


def make(folder, num_stages=2, keep=2):
    return CheckpointFolder(folder, num_stages, keep, FINGERPRINT)


def reports(folder, num_steps, num_stages=2):
    return [report_of(folder, stage, num_steps, *small_stage(stage)) for stage in range(num_stages)]


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_is_whole_when_its_last_stage_is(tmp_path):
    checkpoints = make(tmp_path, num_stages=3)
    first, second, third = reports(tmp_path, 20, num_stages=3)
    assert decided_by(checkpoints, third) is None
    assert decided_by(checkpoints, first) is None
    assert names_in(tmp_path) == ["step-00000020.partial"]
    folder = tmp_path / "step-00000020"
    whole = decided_by(checkpoints, second)
    assert names_in(tmp_path) == ["step-00000020"]
    assert names_in(folder) == ["manifest.json", "stage-0.safetensors", "stage-1.safetensors", "stage-2.safetensors"]
    assert whole == CheckpointComplete(20, folder, sum(path.stat().st_size for path in folder.iterdir()))


def test_stages_may_be_an_iteration_apart(tmp_path):
    checkpoints = make(tmp_path)
    (early, late), (next_early, next_late) = reports(tmp_path, 20), reports(tmp_path, 21)
    assert decided_by(checkpoints, early) is None
    assert decided_by(checkpoints, next_early) is None
    assert decided_by(checkpoints, late).num_steps == 20
    assert decided_by(checkpoints, next_late).num_steps == 21
    assert names_in(tmp_path) == ["step-00000020", "step-00000021"]


@pytest.mark.parametrize(("keep", "left"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_newest_ones_are_kept(tmp_path, keep, left):
    checkpoints = make(tmp_path, keep=keep)
    for num_steps in (10, 20, 30, 40):
        assert isinstance(save_all(checkpoints, tmp_path, num_steps), CheckpointComplete)
    assert names_in(tmp_path) == [f"step-{num_steps:08d}" for num_steps in left]


def test_the_old_one_goes_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    checkpoints = make(tmp_path, keep=1)
    save_all(checkpoints, tmp_path, 10)
    seen = []
    real = shutil.rmtree

    def look(path, **words):
        seen.append(latest(tmp_path, FINGERPRINT)[0].num_steps)
        real(path, **words)

    monkeypatch.setattr(shutil, "rmtree", look)
    save_all(checkpoints, tmp_path, 20)
    assert set(seen) == {20}
    assert names_in(tmp_path) == ["step-00000020"]


def test_to_keep_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="0 checkpoints to keep leave nothing to resume from: keep 1 or more"):
        make(tmp_path, keep=0)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileProblem, match="is not a folder that you may write to"):
        make(tmp_path / "file" / "checkpoints")


def test_what_a_former_run_left_unfinished_is_removed_and_nothing_else(tmp_path):
    save_all(make(tmp_path), tmp_path, 10)
    report_of(tmp_path, 0, 20, *small_stage())
    (tmp_path / "step-00000005.old.partial").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes.partial").write_text("mine, too")
    make(tmp_path)
    assert names_in(tmp_path) == ["mine", "notes.partial", "step-00000010"]


# What goes wrong.


def test_a_stage_that_is_not_saved_takes_the_checkpoint_with_it_and_leaves_the_old_one(tmp_path):
    checkpoints = make(tmp_path, num_stages=3, keep=1)
    save_all(checkpoints, tmp_path, 10, num_stages=3)
    first, _, third = reports(tmp_path, 20, num_stages=3)
    assert decided_by(checkpoints, first) is None
    assert decided_by(checkpoints, StageNotSaved(20, 1, "the disk is full")) == CheckpointIncomplete(20, "the disk is full")
    assert names_in(tmp_path) == ["step-00000010", "step-00000020.partial"]  # the third may still be writing there
    assert decided_by(checkpoints, third) is None
    assert names_in(tmp_path) == ["step-00000010"]
    assert isinstance(save_all(checkpoints, tmp_path, 30, num_stages=3), CheckpointComplete)
    assert names_in(tmp_path) == ["step-00000030"]


def test_one_checkpoint_is_given_up_once_however_many_stages_fail(tmp_path):
    checkpoints = make(tmp_path, num_stages=3)
    decided = [decided_by(checkpoints, StageNotSaved(20, stage, f"disk {stage} is full")) for stage in (2, 0, 1)]
    assert decided == [CheckpointIncomplete(20, "disk 2 is full"), None, None]
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("failing", ["write_manifest", "_sync"])
def test_a_manifest_that_cannot_be_written_counts_as_not_saved(tmp_path, monkeypatch, failing):
    checkpoints = make(tmp_path, keep=1)
    save_all(checkpoints, tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, failing, no_space)
        reason = f"cannot write {tmp_path / 'step-00000020'}: No space left on device"
        assert save_all(checkpoints, tmp_path, 20) == CheckpointIncomplete(20, reason)
    assert names_in(tmp_path) == ["step-00000010"]
    assert isinstance(save_all(checkpoints, tmp_path, 30), CheckpointComplete)


def test_a_folder_that_cannot_get_its_name_counts_as_not_saved(tmp_path, monkeypatch):
    checkpoints = make(tmp_path, keep=1)
    save_all(checkpoints, tmp_path, 10)
    real = os.rename

    def rename(old, new):
        if new.name == "step-00000020":
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    assert save_all(checkpoints, tmp_path, 20).reason.endswith("step-00000020: Input/output error")
    assert names_in(tmp_path) == ["step-00000010"]


def test_a_file_that_is_not_where_the_report_says_counts_as_not_saved(tmp_path):
    checkpoints = make(tmp_path)
    first, second = reports(tmp_path, 20)
    (tmp_path / "step-00000020.partial" / first.file_name).unlink()
    decided_by(checkpoints, first)
    assert "step-00000020: No such file or directory" in decided_by(checkpoints, second).reason
    assert names_in(tmp_path) == []


def test_old_checkpoints_that_cannot_be_removed_do_not_stop_new_ones(tmp_path, monkeypatch):
    checkpoints = make(tmp_path, keep=1)
    save_all(checkpoints, tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    assert isinstance(save_all(checkpoints, tmp_path, 20), CheckpointComplete)
    assert names_in(tmp_path) == ["step-00000010.old.partial", "step-00000020"]
    monkeypatch.undo()
    make(tmp_path)
    assert names_in(tmp_path) == ["step-00000020"]


def test_a_file_system_that_cannot_sync_folders_still_gets_checkpoints(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert isinstance(save_all(make(tmp_path), tmp_path, 10), CheckpointComplete)


# Workers that die.


def test_a_stage_whose_worker_died_while_it_saved_is_given_up_when_its_successor_reports(tmp_path):
    checkpoints = make(tmp_path)
    save_all(checkpoints, tmp_path, 10)
    lost, _ = reports(tmp_path, 20)
    assert decided_by(checkpoints, lost) is None
    first, second = reports(tmp_path, 30)
    assert decided_by(checkpoints, second) == CheckpointIncomplete(20, "the worker that was to save stage 1 is gone")
    assert names_in(tmp_path) == ["step-00000010", "step-00000030.partial"]
    assert decided_by(checkpoints, first).num_steps == 30


def test_one_report_may_decide_two_checkpoints(tmp_path):
    checkpoints = make(tmp_path, keep=9)
    lost, _ = reports(tmp_path, 20)
    first, second = reports(tmp_path, 30)
    assert decided_by(checkpoints, lost) is None
    assert decided_by(checkpoints, first) is None
    incomplete, complete = checkpoints.add_report(second)
    assert incomplete == CheckpointIncomplete(20, "the worker that was to save stage 1 is gone")
    assert complete.num_steps == 30
    assert names_in(tmp_path) == ["step-00000030"]


def test_a_successor_may_save_the_same_step_and_litter_of_the_dead_is_swept(tmp_path):
    checkpoints = make(tmp_path)
    first, second = reports(tmp_path, 20)
    (tmp_path / "step-00000020.partial" / ".stage-1.safetensors.0123abcd.tmp").write_text("half of")
    again = report_of(tmp_path, 0, 20, *small_stage(77))
    assert [decided_by(checkpoints, report) for report in (first, again)] == [None, None]
    assert isinstance(decided_by(checkpoints, second), CheckpointComplete)
    assert names_in(tmp_path / "step-00000020") == ["manifest.json", "stage-0.safetensors", "stage-1.safetensors"]
    fresh = small_stage(5)
    load_stage(latest(tmp_path, FINGERPRINT)[0], 0, *fresh)
    assert held(*fresh) == held(*small_stage(77))


# Runs that resume.


def test_a_torn_checkpoint_is_replaced_when_its_step_comes_again_and_never_costs_a_whole_one(tmp_path):
    checkpoints = make(tmp_path)
    for num_steps in (20, 40):
        save_all(checkpoints, tmp_path, num_steps)
    os.truncate(tmp_path / "step-00000040" / "stage-0.safetensors", 9)
    resumed = make(tmp_path, keep=1)
    save_all(resumed, tmp_path, 30)
    assert names_in(tmp_path) == ["step-00000030", "step-00000040"]
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 30
    save_all(resumed, tmp_path, 40)
    assert names_in(tmp_path) == ["step-00000040"]
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 40


def test_a_stage_that_is_saved_again_while_its_checkpoint_becomes_whole_does_not_change_it(tmp_path):
    checkpoints = make(tmp_path)
    first, second = reports(tmp_path, 20)
    assert decided_by(checkpoints, first) is None
    before = report_of(tmp_path, 0, 20, *small_stage(77))  # written before, reported after
    assert isinstance(decided_by(checkpoints, second), CheckpointComplete)
    after = report_of(tmp_path, 1, 20, *small_stage(78))
    late = StageNotSaved(20, 0, "cannot write step-00000020.partial/stage-0.safetensors: No such file or directory")
    assert {decided_by(checkpoints, report).folder.name for report in (before, after, late)} == {"step-00000020"}
    assert names_in(tmp_path) == ["step-00000020"]
    checkpoint, warnings = latest(tmp_path, FINGERPRINT)
    assert (checkpoint.num_steps, warnings) == (20, [])
    module, optimizer = small_stage(5)
    load_stage(checkpoint, 0, module, optimizer)
    assert held(module, optimizer) == held(*small_stage(0))


# Coordinators that die.


@pytest.mark.parametrize("killed_at", ["before the second report", "between two renames", "before the manifest", "at the end"])
def test_a_coordinator_that_takes_over_completes_what_another_has_begun(tmp_path, monkeypatch, killed_at):
    first, second = reports(tmp_path, 20)
    with contextlib.suppress(KeyboardInterrupt):
        killed = make(tmp_path)
        first, second = reports(tmp_path, 20)
        killed.add_report(first)
        if killed_at != "before the second report":
            calls = []

            def replace(old, new, real=os.replace):
                calls.append(new)
                if killed_at == "between two renames" and len(calls) == 2:
                    raise KeyboardInterrupt
                real(old, new)

            def write_manifest(checkpoint, real=checkpoint_folder.write_manifest):
                if killed_at == "before the manifest":
                    raise KeyboardInterrupt
                return real(checkpoint)

            monkeypatch.setattr(os, "replace", replace)
            monkeypatch.setattr(checkpoint_folder, "write_manifest", write_manifest)
            killed.add_report(second)
    monkeypatch.undo()
    successor = CheckpointFolder(tmp_path, 2, 2, FINGERPRINT, is_takeover=True)
    decided = [*successor.add_report(first), *successor.add_report(second)]  # sent again: they were not acknowledged
    assert {(type(each), each.num_steps) for each in decided} == {(CheckpointComplete, 20)}
    assert names_in(tmp_path) == ["step-00000020"]
    assert latest(tmp_path, FINGERPRINT)[0].num_steps == 20


def test_a_step_that_is_saved_again_with_other_layers_is_never_mixed_with_the_one_before(tmp_path):
    names = find_layer_names([small_stage(0)[0], small_stage(1)[0]])
    shapes = [{name: list(value.shape) for name, value in small_stage(stage)[0].state_dict().items()} for stage in range(2)]
    fingerprint = {"layers": names.to_json(), "model": shapes}
    checkpoints = CheckpointFolder(tmp_path, 2, 2, fingerprint)
    counts = (len(names.model) - 1, 1)
    old, moved = ([replace(each, epoch=epoch) for each in reports(tmp_path, 20)] for epoch in (1, 2))
    moved = [replace(each, layer_counts=counts) for each in moved]
    assert decided_by(checkpoints, old[0]) is None
    assert decided_by(checkpoints, moved[1]) is None  # the other half is of other layers
    assert decided_by(checkpoints, old[1]) is None  # and this one comes late
    assert isinstance(decided_by(checkpoints, moved[0]), CheckpointComplete)
    found = read_checkpoint(tmp_path / "step-00000020").layers
    assert tuple(map(len, found.stages)) == counts
