"""`StageWriter`: a worker's snapshots of its stage, written to the disk by a thread while training continues."""

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from recycle.core.errors import UserError
from recycle.runtime.checkpoint.files import PARTIAL, attempt_file, stage_metadata, step_folder
from recycle.runtime.checkpoint.layer_state import without_guests
from recycle.runtime.checkpoint.state import Snapshot, take_snapshot
from recycle.runtime.checkpoint.tensor_file import save_tensors


@dataclass(frozen=True, slots=True)
class StageSaved:
    """A stage after `num_steps` steps, of which `epoch` did the last, is on disk, in the folder of an unfinished checkpoint.

    `layer_counts` are the layers of each stage, if they are others than those of the job's own stages. `positions` are those of
    all workers in the streams that they read; the ledger adds them.
    """

    num_steps: int
    stage: int
    file_name: str
    size_bytes: int
    sha256: str
    epoch: int = 0
    layer_counts: tuple[int, ...] = ()
    positions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageNotSaved:
    """A stage after `num_steps` steps could not be saved, for this reason."""

    num_steps: int
    stage: int
    reason: str
    epoch: int = 0


PATIENCE_S = 60.0
_PULSE_S = 1.0
Pulse = Callable[[int], object]
"""Gets the numbers of bytes that move."""
Deliver = Callable[[Path, str, Pulse], None]
"""Send the file at a path to the coordinator, which stores it under a name in the folder of checkpoints."""
GoesOn = Callable[[bool], bool]
"""Whether to wait on for what is being written; it is told whether bytes of a delivery have moved since it was last asked."""


class StageWriter:
    """Saves one stage repeatedly. Each `save` is reported exactly once, and no failed save ends the training.

    `report` is called in the thread that writes, so it must be thread-safe. With `deliver`, a file is sent away after it is
    written, and does not stay in `folder`. `goes_on` is asked about once a second while the caller waits. `layer_counts` are
    those of `StageSaved`.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        report: Callable[[StageSaved | StageNotSaved], None],
        deliver: Deliver | None = None,
        goes_on: GoesOn = lambda has_moved: True,
        layer_counts: tuple[int, ...] = (),
    ) -> None:
        self._folder, self._layer_counts = folder, layer_counts
        self._deliver, self._goes_on, self._has_moved = deliver, goes_on, False
        self._stage = stage
        self._report = report
        # One thread for all saves: Python waits for ever for a new thread that has no memory to begin. It is no daemon, so that a
        # worker that ends normally finishes its writes first.
        self._thread = ThreadPoolExecutor(1, f"writer of stage {stage}")
        self._writing: Future[None] | None = None

    def save(self, num_steps: int, module: nn.Module, optimizer: Optimizer, is_last: bool = False, epoch: int = 0) -> None:
        """Copy the state of the stage in an epoch and return; a thread writes the copy while training continues.

        There is at most one copy in memory: this waits until the former copy is written, for at most `PATIENCE_S` unless
        `is_last`, because other workers wait for this one. After that the state is not saved. If the epoch ends meanwhile, the
        last state is neither saved nor reported: the next epoch saves it.
        """
        if not self.wait(None if is_last else PATIENCE_S):
            reason = "the one before it is still being written: the disk is too slow"
            if not is_last:
                self._report(StageNotSaved(num_steps, self._stage, reason, epoch))
            return
        snapshot = self._take(num_steps, module, optimizer)
        self._writing = self._thread.submit(self._run, num_steps, snapshot, epoch)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is written and reported; return False after `timeout_s`, or when `goes_on` says no."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._writing is not None:
            if futures.wait([self._writing], max(0.0, min(_PULSE_S, end_s - time.monotonic()))).done:
                self._writing = None
                break
            has_moved, self._has_moved = self._has_moved, False
            if not self._goes_on(has_moved) or time.monotonic() >= end_s:
                return False
        return True

    def _moved(self, num_bytes: int) -> None:
        self._has_moved = self._has_moved or num_bytes > 0

    def _take(self, num_steps: int, module: nn.Module, optimizer: Optimizer) -> Snapshot | StageNotSaved:
        try:
            return without_guests(take_snapshot(module, optimizer), module)
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
                self._deliver(path, path.relative_to(self._folder).as_posix(), self._moved)
        except UserError as problem:
            return StageNotSaved(num_steps, self._stage, str(problem))
        except Exception as problem:  # a bug: without a report, the launcher would wait for this stage for ever
            return StageNotSaved(num_steps, self._stage, f"cannot write {path}: {_in_one_line(problem)}")
        finally:
            if self._deliver is not None:  # what could not be sent would fill the disk
                shutil.rmtree(path.parent, ignore_errors=True)
        return StageSaved(num_steps, self._stage, path.name, size_bytes, digest.hexdigest(), layer_counts=self._layer_counts)


def _in_one_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"
