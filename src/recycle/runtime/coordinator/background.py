"""The coordinator's slow work, in threads of its own: a stalled disk or launcher must not delay heartbeats."""

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from recycle.control.decide.journal import JournalEntry
from recycle.control.store.protocol import Store, StoreAway, ask_until_answered
from recycle.core.errors import FileProblem, LeadershipLost

Result = TypeVar("Result")
_RETRY_S = 0.5


class Background:
    """Runs the jobs of one queue one after the other, and hands each result to the thread that serves connections.

    `call_soon` has a function called by the serving thread. An error of a job is raised there.
    """

    def __init__(self, name: str, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self._call_soon = call_soon
        # An executor would cost several times as much for each of thousands of jobs.
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Result], then: Callable[[Result], None] = lambda result: None) -> None:
        """Run `job` after all earlier jobs, and have the serving thread call `then` with its result."""
        self._jobs.put((job, then))

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, then = entry
            try:
                result = job()
            except BaseException as problem:
                self._call_soon(partial(_raise, problem))
            else:
                self._call_soon(partial(then, result))

    def close(self) -> None:
        """Wait until all jobs are done."""
        self._jobs.put(None)
        self._thread.join()


def _raise(problem: BaseException) -> None:
    raise problem


class BackgroundJournal:
    """A journal that a thread writes to the store. `num_pending` entries are not stored yet.

    The serving thread calls `written` for every entry, with a sentence if it could not be written here, and `lost` if another
    coordinator leads. While the store is away, the thread tries again and again, and `late` is called once, with the reason.
    """

    def __init__(
        self,
        store: Store,
        call_soon: Callable[[Callable[[], None]], None],
        written: Callable[[str | None], None],
        late: Callable[[str], None] = lambda problem: None,
        lost: Callable[[LeadershipLost], None] = lambda problem: None,
    ) -> None:
        self._store, self._background, self._call_soon = store, Background("journal", call_soon), call_soon
        self._written, self._late, self._lost = written, late, lost
        self._closing = threading.Event()
        self.num_pending, self._is_late = 0, False

    @property
    def term(self) -> int:
        return self._store.term

    @property
    def lease_s(self) -> float:
        return self._store.lease_s

    def append(self, entry: JournalEntry) -> None:
        self.num_pending += 1
        self._background.run(lambda: self._append(entry), self._done)

    def _append(self, entry: JournalEntry) -> str | LeadershipLost | None:
        while True:
            try:
                self._store.append(entry)
                return None
            except FileProblem as problem:
                return str(problem)
            except LeadershipLost as problem:
                return problem
            except StoreAway as problem:
                self._call_soon(partial(self._is_away, str(problem)))
            if wait_to_retry(self._closing):
                return LeadershipLost("the coordinator ended while the store was away")

    def _is_away(self, problem: str) -> None:
        if not self._is_late:
            self._is_late = True
            self._late(problem)

    def _done(self, problem: str | LeadershipLost | None) -> None:
        if isinstance(problem, LeadershipLost):  # what rests on this entry is never sent
            self._lost(problem)
            return
        self.num_pending -= 1
        self._is_late = False
        self._written(problem)

    def last(self) -> JournalEntry | None:
        return ask_until_answered(self._store.last)

    def close(self) -> None:
        """Wait until all entries are stored, unless the store is away."""
        self._closing.set()
        self._background.close()


def wait_to_retry(closing: threading.Event) -> bool:
    """Wait before the store is asked again; return whether the coordinator ends meanwhile."""
    return closing.wait(_RETRY_S)
