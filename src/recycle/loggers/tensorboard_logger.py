"""`TensorBoardLogger`: the curves of a run in event files for TensorBoard."""

from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Evaluated, Recovered
from recycle.core.files import refuse_unwritable
from recycle.loggers.log_values import evaluation_values, recovery_text, recovery_values, step_values
from recycle.runtime.callbacks.protocol import Logger, RunStart, StepMetrics
from recycle.runtime.coordinator.ledger.trained import Trained

# torch writes to the disk every two minutes, which is too late for a page that is watched during a run.
_FLUSH_S = 10


class TensorBoardLogger(Logger):
    """Writes the curves of a run; `tensorboard --logdir FOLDER` shows them meanwhile.

    Steps count from 1. A run that is resumed hides the later steps that an earlier process wrote into the same folder, because
    they are trained again.

    Args:
        folder: Where the event files are written, by default `tensorboard` in the run folder.

    Raises:
        UserError: tensorboard is not installed.

    Example:
        recycle.train(..., out="runs/a", callbacks=[recycle.TensorBoardLogger()])
    """

    NAME, REWINDS = "tensorboard", True

    def __init__(self, folder: Path | str | None = None) -> None:
        self._make = _writer_class()
        self._writer: Any = None
        self._folder = Path(folder) if folder is not None else None
        if self._folder is not None:
            refuse_unwritable(self._folder / "events")

    def on_start(self, run: RunStart) -> None:
        folder = self._folder
        if folder is None:
            if run.folder is None:
                raise FileProblem("a log for TensorBoard lies in the run folder, and this run has none: name a folder")
            folder = run.folder / "tensorboard"
        purged = run.num_done + 1 if run.num_done else None
        self._writer = self._make(str(folder), purge_step=purged, flush_secs=_FLUSH_S)

    def on_step(self, step: StepMetrics) -> None:
        self._write(step_values(step), step.step)

    def on_evaluate(self, evaluation: Evaluated) -> None:
        self._write(evaluation_values(evaluation), evaluation.num_steps)

    def on_recovery(self, recovery: Recovered) -> None:
        self._write(recovery_values(recovery), recovery.iteration + 1)
        self._writer.add_text("recovery", recovery_text(recovery), recovery.iteration + 1)

    def on_end(self, trained: Trained | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._writer is None:
            raise FileProblem("the event files could not be opened")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # here, because it takes a second to import, and few runs need it
    except ImportError as problem:
        raise UserError(
            f"a log for TensorBoard needs torch and tensorboard ({problem}): "
            "install them with pip install -e '.[tensorboard]' in a clone of ReCycle"
        ) from None
    return SummaryWriter
