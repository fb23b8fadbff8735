"""Ending with the parent: a process that works for another one must not outlive it, and is not interrupted before it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


def end_with_parent() -> None:
    """Watch the process that started this one from a thread, and end when it does: who is killed can end nobody."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def children_uninterrupted() -> Iterator[None]:
    """Let processes that this thread starts in the block never see an interrupt: a terminal tells all, and we end our own."""
    resource_tracker.ensure_running()  # which Python else does with the first process, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold an interrupt back until the end of the block, so that no process is started by half. The second one comes through.

    Only the main thread is ever interrupted, so in others there is nothing to hold, and neither is there where no handler of
    Python's is.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            handler(number, frame)

    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            signal.raise_signal(signal.SIGINT)


def process_state(pid: int) -> str:
    """The letter by which the system tells what a process does (R runs, S waits, T is stopped); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
