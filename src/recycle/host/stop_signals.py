"""Signals that ask a process to stop: the first one is a request, the second one ends the process at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals(ask: Callable[[signal.Signals], None], is_repeatable: bool = False) -> Iterator[None]:
    """Call `ask` with the first SIGINT or SIGTERM in this block; a second one raises KeyboardInterrupt or SystemExit.

    With `is_repeatable`, further signals are requests, too. A signal that this process ignores stays ignored. Python handles
    signals in the main thread: in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        is_first, asked = not asked, True
        if is_first or is_repeatable:
            ask(signal.Signals(number))
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
