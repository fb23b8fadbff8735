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
