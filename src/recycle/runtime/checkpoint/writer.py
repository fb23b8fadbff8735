"""`StageWriter`: a worker's snapshots of its stage, written to the disk by a thread while training continues."""

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from recycle.core.errors import UserError
from recycle.runtime.checkpoint.files import PARTIAL, attempt_file, stage_metadata, step_folder
from recycle.runtime.checkpoint.state import Snapshot, take_snapshot
from recycle.runtime.checkpoint.tensor_file import save_tensors


@dataclass(frozen=True, slots=True)
class StageSaved:
    """A stage after `num_steps` steps, of which `epoch` did the last, is on disk, in the folder of an unfinished checkpoint."""

    num_steps: int
    stage: int
    file_name: str
    size_bytes: int
    sha256: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class StageNotSaved:
    """A stage after `num_steps` steps could not be saved, for this reason."""

    num_steps: int
    stage: int
    reason: str
    epoch: int = 0


PATIENCE_S = 60.0
Deliver = Callable[[Path, str], None]
"""Send the file at a path to the coordinator, which stores it under a name in the folder of checkpoints."""


class StageWriter:
    """Saves one stage repeatedly. Each `save` is reported exactly once, and no failed save ends the training.

    `report` is called in the thread that writes, so it must be thread-safe. With `deliver`, a file is sent away after it is
    written, and does not stay in `folder`.
    """

    def __init__(
        self, folder: Path, stage: int, report: Callable[[StageSaved | StageNotSaved], None], deliver: Deliver | None = None
    ) -> None:
        self._folder = folder
        self._deliver = deliver
        self._stage = stage
        self._report = report
        # One thread for all saves: Python waits for ever for a new thread that has no memory to begin. It is no daemon, so that a
        # worker that ends normally finishes its writes first.
        self._thread = ThreadPoolExecutor(1, f"writer of stage {stage}")
        self._writing: Future[None] | None = None

    def save(self, num_steps: int, module: nn.Module, optimizer: Optimizer, is_last: bool = False, epoch: int = 0) -> None:
        """Copy the state of the stage in an epoch and return; a thread writes the copy while training continues.

        There is at most one copy in memory: this waits until the former copy is written, for at most `PATIENCE_S` unless
        `is_last`, because other workers wait for this one. After that the state is not saved.
        """
        if not self.wait(None if is_last else PATIENCE_S):
            reason = "the one before it is still being written: the disk is too slow"
            self._report(StageNotSaved(num_steps, self._stage, reason, epoch))
            return
        snapshot = self._take(num_steps, module, optimizer)
        self._writing = self._thread.submit(self._run, num_steps, snapshot, epoch)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is written and reported; return False if that takes longer than `timeout_s`."""
        if self._writing is not None:
            try:
                self._writing.result(timeout_s)
            except TimeoutError:
                return False
            self._writing = None
        return True

    def _take(self, num_steps: int, module: nn.Module, optimizer: Optimizer) -> Snapshot | StageNotSaved:
        try:
            return take_snapshot(module, optimizer)
        except UserError as problem:
            return StageNotSaved(num_steps, self._stage, str(problem))
        except (RuntimeError, MemoryError) as problem:  # torch raises the former if memory is short
            return StageNotSaved(num_steps, self._stage, f"its copy could not be made: {_in_one_line(problem)}")

    def _run(self, num_steps: int, snapshot: Snapshot | StageNotSaved, epoch: int) -> None:
        saved = snapshot if isinstance(snapshot, StageNotSaved) else self._write(num_steps, snapshot)
        self._report(replace(saved, epoch=epoch))

    def _write(self, num_steps: int, snapshot: Snapshot) -> StageSaved | StageNotSaved:
        path = self._folder / f"{step_folder(num_steps)}{PARTIAL}" / attempt_file(self._stage)
        metadata = stage_metadata(num_steps, self._stage) | {"optimizer": snapshot.optimizer}
        digest = hashlib.sha256()
        try:
            size_bytes = save_tensors(path, snapshot.tensors, metadata, digest.update)
            if self._deliver is not None:
                self._deliver(path, path.relative_to(self._folder).as_posix())
                shutil.rmtree(path.parent, ignore_errors=True)
        except UserError as problem:
            return StageNotSaved(num_steps, self._stage, str(problem))
        except Exception as problem:  # a bug: without a report, the launcher would wait for this stage for ever
            return StageNotSaved(num_steps, self._stage, f"cannot write {path}: {_in_one_line(problem)}")
        return StageSaved(num_steps, self._stage, path.name, size_bytes, digest.hexdigest())


def _in_one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
