"""Ending with the parent: a process that works for another one and must not outlive it."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Watch the process that started this one from a thread, and end when it does: who is killed can end nobody."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def process_state(pid: int) -> str:
    """The letter by which the system tells what a process does (R runs, S waits, T is stopped); empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
