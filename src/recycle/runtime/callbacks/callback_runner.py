"""`CallbackRunner`: passes the events of a run to its callbacks, each once, whichever process was killed meanwhile.

A coordinator that is killed may have written events that this process never got, or sent events that it had not written. The
former are taken from the record, the latter are known by their numbers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from recycle.core.errors import CallbackFailed, FileProblem, UserError
from recycle.core.events.record import Event, Recovered, Stepped
from recycle.core.events.record_file import RECORD, read_record
from recycle.runtime.callbacks.callback_thread import CallbackThread
from recycle.runtime.callbacks.deliveries import RECOVERY, STEP, Cursor, Delivery, DeliveryStream, deliveries_of
from recycle.runtime.callbacks.protocol import Callback, Logger, RunStart
from recycle.runtime.coordinator.ledger.trained import Trained

# How long the end of a run waits for its callbacks.
DEADLINE_S = 30.0
# In the run folder: how far each logger has got.
LOGGERS = "loggers"


class CallbackRunner:
    """The callbacks of one run. One thread calls `on_event` with every event, and `close` at the end.

    If the run is continued, its folder has the record of the earlier process. `warnings` are the sentences that `warn` got.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        run: RunStart,
        warn: Callable[[str], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        _refuse_unusable(callbacks)
        self._run, self._say, self._deadline_s = run, warn, deadline_s
        self.warnings: list[str] = []
        self._stream, self._epochs = DeliveryStream(), set[int]()
        before = list(deliveries_of(_recorded(run.folder))) if run.is_continued and callbacks else []
        # With a record that this process continues without a checkpoint, every step in it is done.
        self._num_steps = run.num_done or max((one.number for one in before if one.kind == STEP), default=0)
        done = [one for one in before if one.number <= self._num_steps or one.kind == RECOVERY]
        here = _cursor_after(done, self._num_steps)
        self._begun_us, self._threads = here.recovery, list[CallbackThread]()
        for callback in callbacks:
            kept_in = _cursor_file(run.folder, callback)
            cursor = self._kept_cursor(callback, kept_in) if isinstance(callback, Logger) else here
            self._threads.append(CallbackThread(callback, replace(run, num_done=self._num_steps), cursor, self.warn, kept_in))
            for delivery in done:  # which a logger may have missed
                self._threads[-1].put(delivery)

    def _kept_cursor(self, callback: Logger, kept_in: Path | None) -> Cursor:
        if kept_in is None:
            return Cursor()
        if not self._run.is_continued:
            kept_in.unlink(missing_ok=True)
            return Cursor()
        cursor = Cursor.load(kept_in)
        return cursor.rewound(self._num_steps) if callback.REWINDS else cursor

    def on_event(self, event: Event) -> None:
        """Pass an event on.

        Raises:
            CallbackFailed: A callback that is required has raised an error.
        """
        self._refuse_failed()
        if not self._threads:
            return
        if isinstance(event, Stepped):
            if event.iteration > self._num_steps:  # a coordinator was killed before it sent the steps between
                self._catch_up()
            self._num_steps = max(self._num_steps, event.iteration + 1)
        if (delivery := self._stream.add(event)) is not None:
            self._put(delivery)

    def close(self, trained: Trained | None) -> None:
        """End all callbacks; `trained` is None if the run has failed or was stopped.

        Raises:
            CallbackFailed: A callback that is required has raised an error, and the run has not failed by itself.
        """
        if trained is not None and self._threads:
            if trained.num_steps > self._num_steps:
                self._catch_up()
            for recovery in trained.recoveries:
                self._put(Delivery(RECOVERY, recovery.end_us, recovery))
        for thread in self._threads:
            thread.end(trained)
        until_s = time.monotonic() + self._deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if trained is not None:
            self._refuse_failed()

    def _put(self, delivery: Delivery) -> None:
        if isinstance(recovery := delivery.value, Recovered):
            # An epoch has one recovery, which another coordinator may have written again, with other times.
            if recovery.epoch in self._epochs or recovery.end_us <= self._begun_us:
                return
            self._epochs.add(recovery.epoch)
        for thread in self._threads:
            thread.put(delivery)

    def _catch_up(self) -> None:
        """Pass on what is in the record and was not passed on yet."""
        for delivery in deliveries_of(_recorded(self._run.folder)):
            self._put(delivery)

    def _refuse_failed(self) -> None:
        if failed := [thread.error for thread in self._threads if thread.error is not None]:
            raise CallbackFailed(f"{failed[0]}; the run ends, because it must not go on without this callback")

    def warn(self, sentence: str) -> None:
        """Print a sentence, and keep it."""
        self.warnings.append(sentence)
        self._say(sentence)


@contextmanager
def running(
    callbacks: Sequence[Callback], run: RunStart, warn: Callable[[str], None]
) -> Iterator[tuple[CallbackRunner, Callable[[Trained], None]]]:
    """Callbacks during a block: their runner, and a function that the block calls with the summary of the run."""
    runner, ended = CallbackRunner(callbacks, run, warn), list[Trained]()
    try:
        yield runner, ended.append
    except BaseException:
        runner.close(None)
        raise
    runner.close(ended[0] if ended else None)


def _cursor_after(deliveries: Sequence[Delivery], num_steps: int) -> Cursor:
    """The cursor behind all these deliveries, and behind so many steps at least."""
    cursor = Cursor()
    for delivery in deliveries:
        cursor = cursor.after(delivery) if cursor.is_before(delivery) else cursor
    return replace(cursor, step=max(cursor.step, num_steps))


def _refuse_unusable(callbacks: Sequence[Any]) -> None:
    names = set[str]()
    for callback in callbacks:
        if not isinstance(callback, Callback):
            what = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise UserError(f"a callback is {what}, but it must be an object of a class that extends recycle.Callback")
        if isinstance(callback, Logger):
            if callback.NAME in names:
                raise UserError(f"there are two loggers named {callback.NAME}: give one")
            names.add(callback.NAME)


def _cursor_file(folder: Path | None, callback: Callback) -> Path | None:
    return folder / LOGGERS / f"{callback.NAME}.json" if folder is not None and isinstance(callback, Logger) else None


def _recorded(folder: Path | None) -> Iterator[Event]:
    """The events of a run's record but ops; those before a place that cannot be read."""
    if folder is None or not (path := folder / RECORD).exists():
        return
    try:
        yield from read_record(path, path.stat().st_size)
    except (FileProblem, OSError):
        return
