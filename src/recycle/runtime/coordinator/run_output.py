"""`RunOutput`: what a coordinator writes, to the run folder by one thread, and to its launcher by another."""

from collections.abc import Callable, Sequence

from recycle.core.events.record import Event
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointIncomplete
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.coordinator.background import Background
from recycle.runtime.coordinator.config import EventSink, EventsRecorded, Notice
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.ledger.trained import Trained


class RunOutput:
    """The run folder, if there is one, and the launcher. Everything is written in the order of the calls.

    The serving thread calls `warn` with a sentence if something cannot be written, and each `then` with its result.
    """

    def __init__(
        self,
        run: RunFolder | None,
        sink: EventSink,
        call_soon: Callable[[Callable[[], None]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._run, self._sink, self._warn = run, sink, warn
        self._late: list[Event] = []
        self._late_plan: Callable[[], None] | None = None
        self._disk, self._launcher = Background("disk", call_soon, gathers=True), Background("launcher", call_soon, gathers=True)

    def publish(self, events: Sequence[Event], written: Callable[[Sequence[Event]], None]) -> None:
        """Publish events; `written` is called when they are in the run folder, or with the launcher if there is none."""

        def done(outcome: tuple[str | None, bool]) -> None:
            problem, is_written = outcome
            self._warn_of(problem)
            self._late += events
            if is_written:  # with all that had no room before
                late, self._late = self._late, []
                written(late)

        if (run := self._run) is not None:
            self._disk.run(lambda: (run.write(*events), run.is_written), done)
        self.notify(EventsRecorded(events), lambda: written(events) if self._run is None else None)

    def notify(self, notice: Notice, then: Callable[[], None] = lambda: None) -> None:
        self._launcher.run(lambda: self._sink.send(notice), lambda _: then())

    def keep_plan(self, iteration: int, text: Callable[[], str], is_late: bool = False) -> None:
        """Keep a plan; the thread of the disk makes its text. If it `is_late`, it is kept with `keep_late_plan` or the next plan.

        After a take-over, workers come first: the text of a large plan takes seconds, and is perhaps in the folder already.
        """
        self.keep_late_plan()
        if (run := self._run) is not None:
            self._late_plan = lambda: self._disk.run(lambda: run.keep_plan(iteration, text()), self._warn_of)
            if not is_late:
                self.keep_late_plan()

    def keep_late_plan(self) -> None:
        keep, self._late_plan = self._late_plan, None
        if keep is not None:
            keep()

    def add_report(
        self,
        report: StageSaved | StageNotSaved,
        then: Callable[[Sequence[CheckpointComplete | CheckpointIncomplete]], None],
    ) -> None:
        """Add the report on a stage to its checkpoint."""
        run = self._run
        assert run is not None
        self._disk.run(lambda: run.checkpoints.add_report(report), then)

    def go_back(self, num_steps: int, epoch: int) -> None:
        """Forget later checkpoints than this, which `epoch` makes again."""
        if (run := self._run) is not None:
            self._disk.run(lambda: run.checkpoints.go_back(num_steps, epoch))

    def find_checkpoint(self, then: Callable[[int], None]) -> None:
        """Find the newest whole checkpoint, after the one that is being completed; every byte is checked."""

        def found(newest: tuple[int, Sequence[str]]) -> None:
            num_steps, warnings = newest
            for warning in warnings:
                self._warn(warning)
            then(num_steps)

        self._disk.run(lambda: self._run.newest() if self._run is not None else (0, ()), found)

    def write_summary(self, trained: Trained, then: Callable[[str | None], None]) -> None:
        self._disk.run(lambda: self._run.close(trained) if self._run is not None else None, then)

    def when_recorded(self, then: Callable[[], None]) -> None:
        """Call `then` when everything so far is in the record; not at all if events wait for room on the disk."""
        is_written = (lambda: run.is_written) if (run := self._run) is not None else (lambda: True)
        self._disk.run(is_written, lambda is_recorded: then() if is_recorded else None)

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` when everything so far is in the run folder, as far as it can be written."""
        self._disk.run(lambda: None, lambda _: then())

    def close(self) -> None:
        """Wait until everything is written."""
        self.keep_late_plan()
        self._disk.close()
        self._launcher.close()

    def _warn_of(self, problem: str | None) -> None:
        if problem is not None:
            self._warn(problem)
