"""`CallbackThread`: one callback, called in a thread of its own with what is put into its queue."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from recycle.core.errors import FileProblem
from recycle.runtime.callbacks.deliveries import Cursor, Delivery
from recycle.runtime.callbacks.protocol import Callback, Logger, RunStart
from recycle.runtime.coordinator.ledger.trained import Trained

# So many events may wait for a slow callback; they are a few hundred bytes each.
MOST_WAITING = 10_000


class CallbackThread:
    """A callback and its thread. `warn` gets a sentence when it raises for the first time, or loses events.

    `cursor` is behind the last delivery that was put in. That of a logger is kept in `kept_in`, as far as it was called.
    `error` is the first one of a callback that is required.
    """

    def __init__(
        self,
        callback: Callback,
        run: RunStart,
        cursor: Cursor,
        warn: Callable[[str], None],
        kept_in: Path | None = None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._callback, self._run, self._warn, self._kept_in = callback, run, warn, kept_in
        self.cursor, self._done = cursor, cursor
        self.error: str | None = None
        self._has_warned = self._has_lost = False
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(most_waiting)
        self._is_abandoned = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"callback {self.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._callback.NAME if isinstance(self._callback, Logger) else type(self._callback).__name__

    def put(self, delivery: Delivery) -> None:
        """Have the callback called, unless it was, with this or with a later delivery of its kind."""
        if not self.cursor.is_before(delivery):
            return
        self.cursor = self.cursor.after(delivery)
        try:
            self._queue.put_nowait(lambda: self._deliver(delivery))
        except queue.Full:
            if not self._has_lost:
                self._has_lost = True
                self._warn(f"{self.name} is {self._queue.maxsize} events behind, and misses later ones until it catches up")

    def end(self, trained: Trained | None) -> None:
        """Have `on_end` called behind all the rest."""
        try:
            self._queue.put_nowait(lambda: self._call("on_end", trained))
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # `join` says that it has not ended

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread; after `timeout_s` leave it behind, with a warning."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._is_abandoned.set()
            self._warn(f"{self.name} has not ended in time: about {self._queue.qsize()} calls of it are missing")

    def _follow(self) -> None:
        self._call("on_start", self._run)
        while (call := self._queue.get()) is not None and not self._is_abandoned.is_set():
            call()

    def _deliver(self, delivery: Delivery) -> None:
        self._call(f"on_{delivery.kind}", delivery.value)
        self._done = self._done.after(delivery)
        if self._kept_in is not None:
            try:
                self._done.save(self._kept_in)
            except (FileProblem, OSError) as problem:
                self._warn_once(f"a resumed run may log events twice: {problem}")

    def _call(self, method: str, value: object) -> None:
        try:
            getattr(self._callback, method)(value)
        except Exception as problem:
            sentence = f"{self.name}.{method} raised {type(problem).__name__}: {problem}"
            if self._callback.is_required:
                self.error = self.error or sentence
            else:
                self._warn_once(f"{sentence}; training goes on")

    def _warn_once(self, sentence: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(sentence)
