"""WaitThread: a thread that waits for gloo's operations, so that the end of an epoch ends the wait of the training thread.

gloo can lose the error of a broken connection: if a receiver dies after it has announced its receive, the sender's write fails
in gloo's event loop, which tells nobody; if a sender dies in the middle of a tensor, its receiver is not told either. Such an
operation ends at its timeout and no sooner, whatever is done to its group.
"""

import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple


class _End(Enum):
    DONE = "the operation has ended"
    OVER = "nobody waits any more"


class WaitThread:
    """Waits for one operation at a time. `abort` ends a wait that has not ended yet."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, timedelta] | None] = SimpleQueue()
        self._ends: SimpleQueue[_End | RuntimeError] = SimpleQueue()
        self._end: _End | RuntimeError | None = None  # one that was seen, and not yet taken
        self._has_thread = self._is_asked = False

    def _run(self) -> None:
        while (begun := self._works.get()) is not None:
            work, timeout = begun
            try:
                work.wait(timeout)
                self._ends.put(_End.DONE)
            except Exception as problem:
                self._ends.put(problem if isinstance(problem, RuntimeError) else RuntimeError(repr(problem)))
            del work, begun  # they own tensors

    def begin(self, work: Any, timeout: timedelta) -> None:
        """Let the thread wait for an operation; `end` is to be called once for each, before the next one begins."""
        assert not self._is_asked, "the thread waits for another operation"
        self._is_asked = True
        if not self._has_thread:  # not before: an epoch may end while its groups are made
            self._has_thread = True
            threading.Thread(target=self._run, name="transport wait", daemon=True).start()
        self._works.put((work, timeout))

    def end(self) -> None:
        """Wait until the thread has waited; raise `RuntimeError` if the operation failed, timed out, or was aborted."""
        end, self._end, self._is_asked = self._end or self._ends.get(), None, False
        match end:
            case RuntimeError() as problem:
                raise problem
            case _End.OVER:
                raise RuntimeError("the epoch is over")

    def ends_within(self, seconds: float) -> bool:
        """Wait for so long at most; return whether `end` returns at once, or raises."""
        if self._end is None:
            with suppress(Empty):
                self._end = self._ends.get(timeout=seconds)
        return self._end is not None

    def abort(self) -> None:
        """End the wait of the other thread, if it waits; it waits for nothing after that."""
        self._ends.put(_End.OVER)

    def close(self) -> None:
        """End the thread, as soon as the operation ends for which it waits."""
        self._works.put(None)


@dataclass(slots=True)
class GlooWork:
    """An operation of gloo that was begun."""

    operation: Any
    thread: WaitThread
    is_awaited: bool = False

    def wait(self, timeout: timedelta) -> None:
        self._let_thread_wait(timeout)
        self.thread.end()

    def ends_within(self, seconds: float, timeout: timedelta) -> bool:
        """Wait for so long at most; return whether `wait` returns at once, or raises.

        Until `wait` is called, the thread waits for nothing else. `timeout` begins with the first of these waits.
        """
        self._let_thread_wait(timeout)
        return self.thread.ends_within(seconds)

    def _let_thread_wait(self, timeout: timedelta) -> None:
        if not self.is_awaited:
            self.is_awaited = True
            self.thread.begin(self.operation, timeout)


class GlooVote(NamedTuple):
    """A vote that was begun; its thread runs it, and does nothing else meanwhile."""

    thread: WaitThread

    def wait(self, timeout: timedelta) -> None:
        """Wait for the vote, whose thread has the deadline."""
        self.thread.end()

    @property
    def has_ended(self) -> bool:
        """Whether `wait` returns at once, or raises."""
        return self.thread.ends_within(0)
