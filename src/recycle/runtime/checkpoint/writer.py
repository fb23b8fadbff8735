"""Saving a stage inside a worker: a snapshot at once, and the disk in the background."""

import hashlib
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from recycle.core.errors import UserError
from recycle.runtime.checkpoint.files import PARTIAL, stage_file, stage_metadata, step_folder
from recycle.runtime.checkpoint.state import Snapshot, take_snapshot
from recycle.runtime.checkpoint.tensor_file import save_tensors


@dataclass(frozen=True, slots=True)
class StageSaved:
    """A stage after so many steps lies on disk, in the folder that is not yet a checkpoint."""

    num_steps: int
    stage: int
    file_name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StageNotSaved:
    """A stage after so many steps is not on disk, and why."""

    num_steps: int
    stage: int
    reason: str


PATIENCE_S = 60.0
Deliver = Callable[[Path, str], None]
"""Bring a file to where it has this name among the checkpoints."""


class StageWriter:
    """Saves one stage, again and again. Each `save` is told of exactly once, and none of them can end the training.

    `tell` is called in the thread that writes: it must bear being called while the worker says other things. With a `deliver`
    files do not stay in `folder`: it brings each to where it belongs.
    """

    def __init__(
        self, folder: Path, stage: int, tell: Callable[[StageSaved | StageNotSaved], None], deliver: Deliver | None = None
    ) -> None:
        self._folder = folder
        self._deliver = deliver
        self._stage = stage
        self._tell = tell
        self._thread: threading.Thread | None = None

    def save(self, num_steps: int, module: nn.Module, optimizer: Optimizer, is_last: bool = False) -> None:
        """Copy what the stage holds now, and return; the copy is written while training goes on.

        If the former copy is still being written, this waits for it, so that there is never more than one in memory. But not
        for long, unless it is the last: others wait for this worker meanwhile. Then this state is not saved.
        """
        if not self.wait(None if is_last else PATIENCE_S):
            self._tell(StageNotSaved(num_steps, self._stage, "the one before it is still being written: the disk is too slow"))
            return
        taken = self._take(num_steps, module, optimizer)
        # No daemon: a worker that ends in order writes to the end what it has begun.
        self._thread = threading.Thread(target=self._run, args=(num_steps, taken), name=f"writer of stage {self._stage}")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return True when nothing is being written any more, and all has been told; False if that takes longer than so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _take(self, num_steps: int, module: nn.Module, optimizer: Optimizer) -> Snapshot | StageNotSaved:
        try:
            return take_snapshot(module, optimizer)
        except UserError as problem:
            return StageNotSaved(num_steps, self._stage, str(problem))
        except (RuntimeError, MemoryError) as problem:  # torch says that memory is short with the former
            return StageNotSaved(num_steps, self._stage, f"its copy could not be made: {_in_one_line(problem)}")

    def _run(self, num_steps: int, taken: Snapshot | StageNotSaved) -> None:
        self._tell(taken if isinstance(taken, StageNotSaved) else self._write(num_steps, taken))

    def _write(self, num_steps: int, snapshot: Snapshot) -> StageSaved | StageNotSaved:
        path = self._folder / f"{step_folder(num_steps)}{PARTIAL}" / stage_file(self._stage)
        metadata = stage_metadata(num_steps, self._stage) | {"optimizer": snapshot.optimizer}
        digest = hashlib.sha256()
        try:
            size_bytes = save_tensors(path, snapshot.tensors, metadata, digest.update)
            if self._deliver is not None:
                self._deliver(path, path.relative_to(self._folder).as_posix())
                shutil.rmtree(path.parent, ignore_errors=True)
        except UserError as problem:
            return StageNotSaved(num_steps, self._stage, str(problem))
        except Exception as problem:  # a mistake of ours; without a word of it the launcher would wait for this stage for ever
            return StageNotSaved(num_steps, self._stage, f"cannot write {path}: {_in_one_line(problem)}")
        return StageSaved(num_steps, self._stage, path.name, size_bytes, digest.hexdigest())


def _in_one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
