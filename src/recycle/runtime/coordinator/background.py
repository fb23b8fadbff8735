"""The coordinator's slow work, in threads of its own: a stalled disk or launcher must not delay heartbeats."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from recycle.control.decide.journal import JournalEntry
from recycle.control.store.protocol import Store, StoreAway, ask_until_answered
from recycle.core.errors import FileProblem, LeadershipLost

Result = TypeVar("Result")
_RETRY_S = 0.5


_Jobs = list[tuple[Callable[[], Any], Callable[[Any], None]]]
# The results of a group are handed over together, unless one of its jobs takes longer than this.
_TOGETHER_S = 0.01


class Background:
    """Runs jobs one after the other, and hands their results to the thread that serves connections.

    `call_soon` has a function called by the serving thread. An error of a job is raised there. If it `gathers`, the jobs that the
    serving thread has in one turn are handed over together, at its end: to wake two threads for each of thousands costs more
    than the jobs. Only the serving thread may call `run`.
    """

    def __init__(self, name: str, call_soon: Callable[[Callable[[], None]], None], gathers: bool = False) -> None:
        self._call_soon, self._gathers = call_soon, gathers
        self._gathered: _Jobs = []
        self._queue: SimpleQueue[_Jobs | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], Result], then: Callable[[Result], None] = lambda result: None) -> None:
        """Run `job` after all earlier jobs, and have the serving thread call `then` with its result."""
        self._gathered.append((job, then))
        if not self._gathers:
            self._hand_over()
        elif len(self._gathered) == 1:
            self._call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if self._gathered:
            jobs, self._gathered = self._gathered, []
            self._queue.put(jobs)

    def _work(self) -> None:
        while (jobs := self._queue.get()) is not None:
            done: list[Callable[[], None]] = []
            began_s = time.monotonic()
            for job, then in jobs:
                try:
                    done.append(partial(then, job()))
                except BaseException as problem:
                    done.append(partial(_raise, problem))
                if time.monotonic() > began_s + _TOGETHER_S:
                    self._call_soon(partial(_call_all, done))
                    done, began_s = [], time.monotonic()
            if done:
                self._call_soon(partial(_call_all, done))

    def close(self) -> None:
        """Wait until all jobs are done."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join()


def _raise(problem: BaseException) -> None:
    raise problem


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


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
