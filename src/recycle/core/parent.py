"""Ending with the parent: a process that works for another one must not outlive it, and is not interrupted before it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


def end_with_parent() -> None:
    """Watch the process that started this one from a thread, and end when it does: who is killed can end nobody."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold an interrupt back until the end of the block, so that no process is started by half.

    Those started in it keep it held: a terminal tells everybody, and it is the parent that ends its children.
    """
    resource_tracker.ensure_running()  # which Python else does with the first process, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Another thread may still take it, and Python then interrupts this one all the same: but the handler is ours.
    came: list[int] = []
    is_ours = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_ours else None
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def process_state(pid: int) -> str:
    """The letter by which the system tells what a process does (R runs, S waits, T is stopped); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
