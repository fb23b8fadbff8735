"""Checkpoints in the launcher: stages that workers have written become a whole checkpoint, or none, and old ones go.

The order makes it safe to be killed anywhere: every stage's bytes, then the manifest, then the name without `.partial`, then the
end of old checkpoints. What is to go is renamed first, so that no half of it passes for a checkpoint.
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
from recycle.runtime.checkpoint.files import (
    MANIFEST,
    PARTIAL,
    Checkpoint,
    StageFile,
    find_checkpoints,
    is_whole,
    plain,
    refuse_other_size,
    step_folder,
    write_manifest,
)
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved


@dataclass(frozen=True, slots=True)
class CheckpointComplete:
    """A checkpoint after so many steps is on disk, and a run can resume from it."""

    num_steps: int
    folder: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointIncomplete:
    """There will be no checkpoint after so many steps, and why; those before it are untouched."""

    num_steps: int
    reason: str


class CheckpointFolder:
    """The folder of a run's checkpoints: it hears what workers have written, and keeps the newest `keep` whole ones.

    Make a new one whenever workers start anew: it removes what was left unfinished.
    """

    def __init__(self, folder: Path, num_stages: int, keep: int, fingerprint: Mapping[str, Any]) -> None:
        if keep < 1:
            raise UserError(f"{keep} checkpoints to keep leave nothing to resume from: keep 1 or more")
        self._folder = folder
        self._num_stages = num_stages
        self._keep = keep
        self._fingerprint = plain(fingerprint)
        self._heard: dict[int, dict[int, StageSaved | StageNotSaved]] = {}
        self._untold: list[CheckpointComplete | CheckpointIncomplete] = []
        _make(folder)
        for path in folder.glob(f"step-*{PARTIAL}"):
            if path.is_dir():
                _remove(path)

    def hear(self, report: StageSaved | StageNotSaved) -> CheckpointComplete | CheckpointIncomplete | None:
        """Take note of a stage, and return what that decided: a checkpoint that is whole, or will never be, or mostly nothing.

        A worker reports in order, so that a stage that reports later steps before earlier ones has lost the worker that saved
        those. If one report decides two things, the second is returned when the next report comes.
        """
        lost = [
            StageNotSaved(num_steps, report.stage, f"the worker that was to save stage {report.stage} is gone")
            for num_steps, heard in sorted(self._heard.items())
            if num_steps < report.num_steps and report.stage not in heard
        ]
        self._untold += [event for each in [*lost, report] if (event := self._note(each)) is not None]
        return self._untold.pop() if self._untold else None

    def _note(self, report: StageSaved | StageNotSaved) -> CheckpointComplete | CheckpointIncomplete | None:
        assert 0 <= report.stage < self._num_stages, f"there is no stage {report.stage} of {self._num_stages}"
        heard = self._heard.setdefault(report.num_steps, {})
        is_first_loss = not any(isinstance(other, StageNotSaved) for other in heard.values())
        heard[report.stage] = report
        if len(heard) == self._num_stages:
            del self._heard[report.num_steps]
            saved = [told for _, told in sorted(heard.items()) if isinstance(told, StageSaved)]
            if len(saved) == self._num_stages:
                return self._finish(report.num_steps, saved)
            _remove(self._partial(report.num_steps))  # nobody writes there any more
        return (
            CheckpointIncomplete(report.num_steps, report.reason) if isinstance(report, StageNotSaved) and is_first_loss else None
        )

    def _finish(self, num_steps: int, saved: list[StageSaved]) -> CheckpointComplete | CheckpointIncomplete:
        """Turn the partial folder into a checkpoint."""
        partial, folder = self._partial(num_steps), self._folder / step_folder(num_steps)
        files = tuple(StageFile(told.file_name, told.size_bytes, told.sha256) for told in saved)
        try:
            manifest_bytes = _complete(Checkpoint(num_steps, partial, files, self._fingerprint))
            if folder.exists():  # a torn one, from before the run resumed
                _remove(folder)
            os.rename(partial, folder)
            _sync(self._folder)
            self._retire(num_steps)
        except OSError as problem:
            _remove(partial)
            return CheckpointIncomplete(num_steps, f"cannot write {folder}: {problem.strerror or problem}")
        except FileProblem as problem:
            _remove(partial)
            return CheckpointIncomplete(num_steps, str(problem))
        return CheckpointComplete(num_steps, folder, manifest_bytes + sum(file.size_bytes for file in files))

    def _retire(self, newest: int) -> None:
        """Remove whole checkpoints older than the newest `keep`; what is torn or later than `newest` is not ours to judge."""
        kept = 0
        for num_steps, path in find_checkpoints(self._folder).items():
            if num_steps <= newest and is_whole(path):
                kept += 1
                if kept > self._keep:
                    _remove(path)

    def _partial(self, num_steps: int) -> Path:
        return self._folder / f"{step_folder(num_steps)}{PARTIAL}"


def _make(folder: Path) -> None:
    refuse_unwritable(folder / MANIFEST)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileProblem(f"cannot make {folder}: {problem.strerror or problem}; choose a folder that you may write to") from None


def _complete(checkpoint: Checkpoint) -> int:
    """Write the manifest of a folder that holds every file it tells of, and nothing else, to the disk; return its size."""
    names = {file.name for file in checkpoint.files}
    for file in checkpoint.files:
        refuse_other_size(checkpoint.folder, file)
    for path in checkpoint.folder.iterdir():
        if path.name not in names:  # of a worker that was killed while it wrote
            path.unlink()
    manifest = write_manifest(checkpoint)
    _sync(manifest)
    _sync(checkpoint.folder)
    return manifest.stat().st_size


def _remove(folder: Path) -> None:
    """Remove a folder, as far as the disk lets us; what is left of it has a name that the next start removes."""
    leaving = folder.with_name(f"{folder.name.removesuffix(PARTIAL)}.old{PARTIAL}")
    with contextlib.suppress(OSError):
        shutil.rmtree(leaving, ignore_errors=True)
        os.rename(folder, leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def _sync(path: Path) -> None:
    """Return when what `path` says is on the disk, a file's bytes or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some shared file systems cannot do that for folders
            raise
    finally:
        os.close(handle)
