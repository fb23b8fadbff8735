"""`TensorBoardLog`: loss, gradient norm, throughput and iteration time by step, in event files for TensorBoard."""

import math
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Event, Spell, Stepped
from recycle.report.record.live_facts import iteration_us, samples_per_s

LOSS, NORM = "train/loss", "train/gradient_norm"
THROUGHPUT, ITERATION = "train/samples_per_second", "train/iteration_seconds"
# torch writes to the disk every two minutes, which is too late for a page that is watched during a run.
_FLUSH_S = 10


class TensorBoardLog:
    """Writes the curves of a run until it is closed; `tensorboard --logdir FOLDER` shows them meanwhile.

    A run that resumes after `num_done` steps hides later steps that an earlier run wrote into the same folder, because they are
    trained again.
    """

    def __init__(self, folder: Path | str, num_done: int = 0) -> None:
        assert num_done >= 0
        self._writer = _writer(Path(folder), num_done)
        self._last: Stepped | None = None
        self._spell: Spell | None = None

    def close(self) -> None:
        self._writer.close()

    def on_event(self, event: Event) -> None:
        """Write the event if it is a step or a spell of training."""
        if isinstance(event, Stepped):
            self._write_step(event)
        elif isinstance(event, Spell) and samples_per_s(event) is not None:
            self._spell = event
        self._write_throughput()

    def _write_step(self, step: Stepped) -> None:
        self._write(LOSS, step, step.loss)
        self._write(NORM, step, step.norm)
        took_us = iteration_us(self._last, step)
        if took_us is not None:
            self._write(ITERATION, step, took_us / 1e6)
        self._last = step

    def _write_throughput(self) -> None:
        """Write the throughput of a spell at the step that ended in it, whichever of the two events came first."""
        if self._spell is None or self._last is None or not self._spell.start_us < self._last.at_us <= self._spell.end_us:
            return
        self._write(THROUGHPUT, self._last, samples_per_s(self._spell))
        self._spell = None

    def _write(self, name: str, step: Stepped, value: float | None) -> None:
        """Write a value at its step, counted from 1 as everywhere that people read; a value that is not finite is NaN."""
        self._writer.add_scalar(name, math.nan if value is None else value, step.iteration + 1)


def _writer(folder: Path, num_done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # here, because it takes a second to import, and few runs need it
    except ImportError as problem:
        raise UserError(
            f"a log for TensorBoard needs torch and tensorboard ({problem}): "
            "install them with pip install -e '.[tensorboard]' in a clone of ReCycle"
        ) from None
    make: Any = SummaryWriter  # torch has no types for it
    try:
        return make(str(folder), purge_step=num_done + 1 if num_done else None, flush_secs=_FLUSH_S)
    except OSError as problem:
        raise FileProblem(
            f"cannot write {folder}: {problem.strerror or problem}; choose a folder that you may write to"
        ) from None
