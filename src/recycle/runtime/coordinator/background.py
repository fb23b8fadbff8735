"""The coordinator's slow work, in threads of its own: a stalled disk or launcher must not delay heartbeats."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from recycle.control.decide.journal import Journal, JournalEntry
from recycle.core.errors import FileProblem

Result = TypeVar("Result")


class Background:
    """Runs the jobs of one queue one after the other, and hands each result to the thread that serves connections.

    `call_soon` has a function called by the serving thread. An error of a job is raised there.
    """

    def __init__(self, name: str, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._executor, self._call_soon = ThreadPoolExecutor(1, name), call_soon

    def run(self, job: Callable[[], Result], then: Callable[[Result], None] = lambda result: None) -> None:
        """Run `job` after all earlier jobs, and have the serving thread call `then` with its result."""
        self._executor.submit(job).add_done_callback(partial(self._deliver, then))

    def _deliver(self, then: Callable[[Result], None], future: "Future[Result]") -> None:
        self._call_soon(lambda: then(future.result()))

    def close(self) -> None:
        """Wait until all jobs are done."""
        self._executor.shutdown()


class BackgroundJournal:
    """A journal that is written by a thread. `num_pending` entries are not on disk yet.

    `written` is called by the serving thread for every entry, with a sentence if it could not be written.
    """

    def __init__(
        self, journal: Journal, call_soon: Callable[[Callable[[], None]], None], written: Callable[[str | None], None]
    ) -> None:
        self._journal, self._background, self._written = journal, Background("journal", call_soon), written
        self.num_pending = 0

    def append(self, entry: JournalEntry) -> None:
        self.num_pending += 1
        self._background.run(lambda: self._append(entry), self._done)

    def _append(self, entry: JournalEntry) -> str | None:
        try:
            self._journal.append(entry)
        except FileProblem as problem:
            return str(problem)
        return None

    def _done(self, problem: str | None) -> None:
        self.num_pending -= 1
        self._written(problem)

    def last(self) -> JournalEntry | None:
        return self._journal.last()

    def close(self) -> None:
        self._background.close()
