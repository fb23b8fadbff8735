"""Signals that ask a process to stop: the first one is a request, the second one ends the process at once.

A job manager sends SIGTERM to every process of a job, and a process sends it on to its children. So a child may get the same
request twice: SIGTERM within some seconds after the first signal changes nothing.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST_S = 5.0


@contextmanager
def stop_signals(ask: Callable[[signal.Signals], None], is_repeatable: bool = False) -> Iterator[None]:
    """Call `ask` with the first SIGINT or SIGTERM in this block; a second one raises KeyboardInterrupt or SystemExit.

    A second SIGTERM does so only some seconds later. With `is_repeatable`, further signals are requests, too. A signal that this
    process ignores stays ignored. Python handles signals in the main thread: in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_s: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if asked_s is None or is_repeatable:
            asked_s = time.monotonic()
            ask(signal.Signals(number))
        elif number == signal.SIGTERM and time.monotonic() < asked_s + _SAME_REQUEST_S:
            pass
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    changed = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for number in changed:
            signal.signal(number, handle)
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
