"""`LossWatch` notices losses that are infinite or not a number; `EvaluationLog` writes evaluations, and may end the run."""

import math
from collections.abc import Callable
from typing import Any

from recycle.core.errors import LossNotFinite, UserError
from recycle.core.events.record import Evaluated, Event
from recycle.runtime.coordinator.ledger.trained import finite
from recycle.runtime.worker.worker_reports import EvaluationDone, WorkerReport

# After so many steps in a row with a loss that is not finite, nothing better is to be expected.
_MOST_NOT_FINITE = 25


class LossWatch:
    """Warns of the first loss of several that is not finite; `fail` gets the error if a run has nothing else."""

    def __init__(self, warn: Callable[[str], None], fail: Callable[[UserError], None]) -> None:
        self._warn, self._fail = warn, fail
        self._num_not_finite = 0

    def add(self, step: int, loss: float) -> None:
        self._num_not_finite = 0 if math.isfinite(loss) else self._num_not_finite + 1
        if self._num_not_finite == 1:
            self._warn(f"the loss of step {step} is {loss}")
        elif self._num_not_finite == _MOST_NOT_FINITE:
            problem = f"the loss was infinite or not a number in {_MOST_NOT_FINITE} steps in a row, to step {step}"
            self._fail(LossNotFinite(problem))


class EvaluationLog:
    """The evaluations of a run, each written once and behind the step whose weights it evaluated.

    `write` gets the event, and the time of its end. `num_steps` returns how many steps are in the record.
    """

    def __init__(self, write: Callable[[Evaluated, int], None], num_steps: Callable[[], int]) -> None:
        self._write, self._num_steps = write, num_steps
        self._early: list[Evaluated] = []
        self._done: dict[int, Evaluated] = {}
        self._patience, self._time_limit_us = 0, math.inf
        self._stop: Callable[[str], None] | None = None
        self._stopped_because = ""

    def end_by(self, patience: int, time_limit_s: float | None, stop: Callable[[str], None]) -> None:
        """Have `stop` called once with the reason, when the run is to end early.

        That is when `patience` evaluations in a row have not brought a lower loss than the best before, or after `time_limit_s`.
        """
        self._patience, self._stop = patience, stop
        self._time_limit_us = math.inf if time_limit_s is None else time_limit_s * 1e6

    @property
    def done(self) -> tuple[Evaluated, ...]:
        """The evaluations in the record, by their steps."""
        return tuple(event for _, event in sorted(self._done.items()))

    def summary(self) -> dict[str, Any]:
        """The fields of `Trained` that are about evaluations and the end of the run."""
        return {"evaluations": self.done, "stopped_because": self._stopped_because}

    def restore(self, event: Event) -> None:
        """Note the event if it is an evaluation, which is in the record already."""
        if isinstance(event, Evaluated):
            self._done[event.num_steps] = event

    def is_pending(self, report: WorkerReport) -> bool:
        """Whether the report is an evaluation that waits for reports on its step."""
        return isinstance(report, EvaluationDone) and any(event.num_steps == report.num_steps for event in self._early)

    def add(self, report: WorkerReport, begin_us: int) -> None:
        """Add the report if it is an evaluation; several workers report it, and it may come before the last report on its step.

        `begin_us` is the beginning of the run.
        """
        if isinstance(report, EvaluationDone) and report.num_steps not in self._done and not self.is_pending(report):
            numbers = report.num_steps, finite(report.loss), report.num_microbatches, report.took_us
            self._early.append(Evaluated(report.at_us - begin_us, *numbers))
            self._release()

    def stepped(self, run_us: int) -> None:
        """Write the evaluations whose step is in the record by now. End the run if it is time; it has taken `run_us`."""
        self._release()
        if self._stop is not None and (reason := self._reason(run_us)):
            self._stopped_because = reason
            self._stop(reason)
            self._stop = None

    def go_back(self, num_steps: int) -> None:
        """Forget later evaluations that are not in the record yet: their steps are redone."""
        self._early = [event for event in self._early if event.num_steps <= num_steps]

    def _release(self) -> None:
        due = [event for event in self._early if event.num_steps <= self._num_steps()]
        self._early = [event for event in self._early if event not in due]
        for event in due:
            self._done[event.num_steps] = event
            self._write(event, event.at_us)

    def _reason(self, run_us: int) -> str:
        if run_us >= self._time_limit_us:
            return f"the time limit of {self._time_limit_us / 1e6:g} s is reached"
        losses = [math.inf if event.loss is None else event.loss for event in self.done]
        if self._patience and len(losses) > self._patience and min(losses[-self._patience :]) >= min(losses[: -self._patience]):
            return f"the evaluation loss has not fallen in {self._patience} evaluations"
        return ""
