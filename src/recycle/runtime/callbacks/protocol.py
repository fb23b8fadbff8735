"""`Callback`: what a run calls as it goes on. `Logger` is a callback that continues where it left off when a run is resumed."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recycle.core.events.record import Evaluated, Recovered, Saved
from recycle.runtime.coordinator.ledger.trained import Trained


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a callback knows of a run before its first event.

    `folder` is the run folder, None if there is none. If the run `is_continued`, an earlier process has begun it in the same
    folder, and `num_done` steps of it are done.
    """

    folder: Path | None = None
    is_continued: bool = False
    num_done: int = 0


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The numbers of one step. Steps count from 1.

    A loss or a norm that is not finite is None. `scale` is that of the gradient: below 1 it was clipped, None if the step was
    skipped. `iteration_s` is the time since the end of the step before, None if that is not known. `samples_per_s` are those of
    the training itself, without pauses.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    scale: float | None = 1.0
    iteration_s: float | None = None
    samples_per_s: float | None = None


class Callback:
    """The base class of callbacks, whose methods do nothing: override those that you need.

    A callback is called in a thread of its own, in the process that started the run, one event after the other. It never
    delays training. Every step, evaluation, recovery and checkpoint is passed once, in order; steps that are trained again, after
    all workers went back to a checkpoint, are not passed again. If it raises, the run goes on with one warning and calls it
    again with the next event; if it `is_required`, the run ends.

    Example:
        class Print(recycle.Callback):
            def on_step(self, step):
                print(step.step, step.loss)

        recycle.train(..., callbacks=[Print()])
    """

    is_required: bool = False

    def on_start(self, run: RunStart) -> None:
        """The run is about to start."""

    def on_step(self, step: StepMetrics) -> None:
        """A step was applied at every stage."""

    def on_evaluate(self, evaluation: Evaluated) -> None:
        """The weights were evaluated."""

    def on_recovery(self, recovery: Recovered) -> None:
        """Training goes on after workers left or joined, or with another plan."""

    def on_checkpoint(self, saved: Saved) -> None:
        """A whole checkpoint is on disk."""

    def on_end(self, trained: Trained | None) -> None:
        """The run has ended; it has no summary if it failed or was stopped."""


class Logger(Callback):
    """A callback that writes what it gets for good, under its `NAME`.

    The run folder has the number of the last event that it got, so that a resumed run goes on behind it: nothing is logged
    twice, and what it missed is taken from the record. A logger that `REWINDS` can forget the steps after `RunStart.num_done`,
    which are trained again; it gets those steps once more.
    """

    NAME: ClassVar[str] = ""
    REWINDS: ClassVar[bool] = False
