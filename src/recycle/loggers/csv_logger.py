"""`CsvLogger`: steps, evaluations and recoveries as rows of a CSV file."""

import csv
import io
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import Evaluated, Recovered
from recycle.core.files import refuse_unwritable, write_text
from recycle.loggers.log_values import recovery_text
from recycle.runtime.callbacks.protocol import Logger, RunStart, StepMetrics
from recycle.runtime.coordinator.ledger.trained import Trained

COLUMNS = ("event", "step", "loss", "gradient_norm", "iteration_s", "samples_per_s", "lost_s", "live_workers", "text")


class CsvLogger(Logger):
    """Writes a row for every step, evaluation and recovery; the column `event` says which. Each row is on disk at once.

    Args:
        path: The file, by default `metrics.csv` in the run folder. A new run replaces a file that is there; a resumed one drops
            the rows of the steps that it trains again, and goes on behind the others.

    Example:
        recycle.train(..., out="runs/a", callbacks=[recycle.CsvLogger()])
    """

    NAME, REWINDS = "csv", True

    def __init__(self, path: Path | str | None = None) -> None:
        self._path = Path(path) if path is not None else None
        refuse_unwritable(self._path)
        self._stream: io.TextIOWrapper | None = None

    def on_start(self, run: RunStart) -> None:
        if self._path is None:
            if run.folder is None:
                raise FileProblem("a CSV log without a path lies in the run folder, and this run has none: name a file")
            self._path = run.folder / "metrics.csv"
        rows = _rows(self._path, run.num_done) if run.is_continued else []
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self._path, text.getvalue())
        self._stream = self._path.open("a", encoding="utf-8", newline="")

    def on_step(self, step: StepMetrics) -> None:
        numbers = (step.loss, step.gradient_norm, step.iteration_s, step.samples_per_s)
        self._write(event="step", step=step.step, **dict(zip(COLUMNS[2:6], numbers, strict=True)))

    def on_evaluate(self, evaluation: Evaluated) -> None:
        self._write(event="evaluation", step=evaluation.num_steps, loss=evaluation.loss)

    def on_recovery(self, recovery: Recovered) -> None:
        facts = {"lost_s": recovery.lost_us / 1e6, "live_workers": recovery.num_live, "text": recovery_text(recovery)}
        self._write(event="recovery", step=recovery.iteration + 1, **facts)

    def on_end(self, trained: Trained | None) -> None:
        if self._stream is not None:
            self._stream.close()

    def _write(self, **row: Any) -> None:
        assert self._stream is not None, "the file could not be opened"
        csv.DictWriter(self._stream, COLUMNS, lineterminator="\n").writerow(row)
        self._stream.flush()


def _rows(path: Path, num_steps: int) -> list[dict[str, str]]:
    """The rows of a file that belong to its first `num_steps` steps, and all its recoveries."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if None not in row.values() and None not in row]
    known = [row for row in rows if set(row) == set(COLUMNS) and row["step"].isdecimal()]
    return [row for row in known if row["event"] == "recovery" or int(row["step"]) <= num_steps]
