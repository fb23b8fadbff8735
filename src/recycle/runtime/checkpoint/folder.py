"""`CheckpointFolder`: combines the stages that workers have written into whole checkpoints, and removes old ones.

The process may be killed at any point: first the bytes of every stage are written, then the manifest, then the folder is renamed
without `.partial`, then old checkpoints are removed. A folder is renamed before it is removed, so that no half of it counts.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import refuse_unwritable
from recycle.runtime.checkpoint.compatibility import fingerprint_of_layers
from recycle.runtime.checkpoint.files import (
    MANIFEST,
    PARTIAL,
    Checkpoint,
    StageFile,
    find_checkpoints,
    is_whole,
    plain,
    read_checkpoint,
    refuse_other_size,
    stage_file,
    step_folder,
    write_manifest,
)
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved


@dataclass(frozen=True, slots=True)
class CheckpointComplete:
    """The checkpoint after `num_steps` steps is on disk, and a run can resume from it."""

    num_steps: int
    folder: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointIncomplete:
    """There will be no checkpoint after `num_steps` steps, for this reason; earlier checkpoints are untouched."""

    num_steps: int
    reason: str


class CheckpointFolder:
    """The folder of a run's checkpoints: takes the reports of workers, and keeps the newest `keep` whole checkpoints.

    Make a new one whenever workers are started: it removes unfinished checkpoints. With `is_takeover`, the workers of a killed
    coordinator go on, and so do their unfinished checkpoints.
    """

    def __init__(
        self, folder: Path, num_stages: int, keep: int, fingerprint: Mapping[str, Any], is_takeover: bool = False
    ) -> None:
        if keep < 1:
            raise UserError(f"{keep} checkpoints to keep leave nothing to resume from: keep 1 or more")
        self._folder = folder
        self._num_stages = num_stages
        self._keep = keep
        self._fingerprint = plain(fingerprint)
        self._reports: dict[int, dict[int, StageSaved | StageNotSaved]] = {}
        self._complete: dict[int, CheckpointComplete] = {}
        self._went_back: list[tuple[int, int]] = []
        make_folder(folder)
        if is_takeover:
            whole = [path for path in find_checkpoints(folder).values() if is_whole(path)]
            self._complete = {each.num_steps: _complete_at(each) for each in map(read_checkpoint, whole)}
            return
        for path in folder.glob(f"step-*{PARTIAL}"):
            if path.is_dir():
                _remove(path)

    def add_report(self, report: StageSaved | StageNotSaved) -> list[CheckpointComplete | CheckpointIncomplete]:
        """Add the report on one stage; return the checkpoints that it completed or made impossible.

        A report on a checkpoint that is complete already changes nothing: two workers may have saved the same stage, or the
        coordinator died before it acknowledged the report.
        A worker reports its saves in order. So a stage that reports a later step without an earlier one has lost the worker that
        saved the earlier one.
        """
        if any(report.epoch < epoch and report.num_steps > num_steps for epoch, num_steps in self._went_back):
            return []
        if report.num_steps in self._complete:
            _remove(self._partial(report.num_steps))
            return [self._complete[report.num_steps]]
        lost = [
            StageNotSaved(num_steps, report.stage, f"the worker that was to save stage {report.stage} is gone")
            for num_steps, reports in sorted(self._reports.items())
            if num_steps < report.num_steps and report.stage not in reports
        ]
        return [event for each in [*lost, report] if (event := self._add(each)) is not None]

    def go_back(self, num_steps: int, epoch: int) -> None:
        """Forget later checkpoints than this: `epoch` does their steps again, with sums in another order perhaps.

        Reports on them from earlier epochs do not count any more, and files that were thought to be whole are replaced.
        """
        self._went_back.append((epoch, num_steps))
        self._reports = {number: reports for number, reports in self._reports.items() if number <= num_steps}
        self._complete = {number: complete for number, complete in self._complete.items() if number <= num_steps}

    def _add(self, report: StageSaved | StageNotSaved) -> CheckpointComplete | CheckpointIncomplete | None:
        assert 0 <= report.stage < self._num_stages, f"there is no stage {report.stage} of {self._num_stages}"
        reports = self._reports.setdefault(report.num_steps, {})
        if not _fits_in(report, reports):
            return None
        is_first_loss = not any(isinstance(other, StageNotSaved) for other in reports.values())
        reports[report.stage] = report
        if len(reports) == self._num_stages:
            del self._reports[report.num_steps]
            saved = [other for _, other in sorted(reports.items()) if isinstance(other, StageSaved)]
            if len(saved) == self._num_stages:
                return self._finish(report.num_steps, saved)
            _remove(self._partial(report.num_steps))  # no worker writes there any more
        if isinstance(report, StageNotSaved) and is_first_loss:
            return CheckpointIncomplete(report.num_steps, report.reason)
        return None

    def _finish(self, num_steps: int, saved: list[StageSaved]) -> CheckpointComplete | CheckpointIncomplete:
        """Turn the partial folder into a checkpoint."""
        partial, folder, fingerprint = self._partial(num_steps), self._folder / step_folder(num_steps), self._fingerprint
        if counts := saved[0].layer_counts:
            fingerprint = plain(fingerprint_of_layers(fingerprint, counts))
        files = tuple(StageFile(stage_file(report.stage), report.size_bytes, report.sha256) for report in saved)
        try:
            for report, file in zip(saved, files, strict=True):
                # A coordinator that was killed here may have renamed it already.
                if (partial / report.file_name).exists() or not (partial / file.name).exists():
                    os.replace(partial / report.file_name, partial / file.name)
            _finish_files(Checkpoint(num_steps, partial, files, fingerprint, saved[0].positions))
            if folder.exists():  # a torn one, from before the run resumed
                _remove(folder)
            os.rename(partial, folder)
            _sync(self._folder)
            self._remove_old(num_steps)
        except (OSError, FileProblem) as problem:
            _remove(partial)
            cause = f"cannot write {folder}: {problem.strerror or problem}" if isinstance(problem, OSError) else str(problem)
            return CheckpointIncomplete(num_steps, cause)
        self._complete[num_steps] = _complete_at(Checkpoint(num_steps, folder, files, fingerprint))
        return self._complete[num_steps]

    def _remove_old(self, newest: int) -> None:
        """Remove whole checkpoints older than the newest `keep`; torn ones and those later than `newest` stay."""
        kept = 0
        for num_steps, path in find_checkpoints(self._folder).items():
            if num_steps <= newest and is_whole(path):
                kept += 1
                if kept > self._keep:
                    _remove(path)

    def _partial(self, num_steps: int) -> Path:
        return self._folder / f"{step_folder(num_steps)}{PARTIAL}"


def _fits_in(report: StageSaved | StageNotSaved, reports: dict[int, StageSaved | StageNotSaved]) -> bool:
    """Whether a report belongs with those on the other stages; removes those whose stages had other layers in an earlier epoch.

    A step that is saved again after layers have moved is saved by all stages.
    """
    if not isinstance(report, StageSaved):
        return True
    others = {
        stage: each
        for stage, each in reports.items()
        if isinstance(each, StageSaved) and each.layer_counts != report.layer_counts
    }
    if any(each.epoch > report.epoch for each in others.values()):
        return False
    for stage in others:
        del reports[stage]
    return True


def make_folder(folder: Path) -> None:
    """Make a folder; raise if that is not possible, or nothing could be written into it."""
    refuse_unwritable(folder / MANIFEST)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileProblem(f"cannot make {folder}: {problem.strerror or problem}; choose a folder that you may write to") from None


def _complete_at(checkpoint: Checkpoint) -> CheckpointComplete:
    manifest_bytes = (checkpoint.folder / MANIFEST).stat().st_size
    return CheckpointComplete(
        checkpoint.num_steps, checkpoint.folder, manifest_bytes + sum(file.size_bytes for file in checkpoint.files)
    )


def _finish_files(checkpoint: Checkpoint) -> None:
    """Check the sizes of the files, remove all other files, and write the manifest."""
    names = {file.name for file in checkpoint.files}
    for file in checkpoint.files:
        refuse_other_size(checkpoint.folder, file)
    for path in checkpoint.folder.iterdir():
        if path.name not in names:  # left by a worker that was killed while it wrote
            path.unlink()
    manifest = write_manifest(checkpoint)
    _sync(manifest)
    _sync(checkpoint.folder)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; the rest has a name that the next start removes."""
    leaving = folder.with_name(f"{folder.name.removesuffix(PARTIAL)}.old{PARTIAL}")
    with contextlib.suppress(OSError):
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(folder, leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file's bytes or a folder's names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some shared file systems cannot do that for folders
            raise
    finally:
        os.close(handle)
