"""Processes that work for this one and never outlive it, whatever ends it: an interrupt, a termination, a kill."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from recycle.host.process_lifetime import children_uninterrupted, end_with_parent

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")

BROKEN = (
    "a process was ended from outside, perhaps for lack of memory, or the script that called has no "
    "'if __name__ == \"__main__\":' guard: finished work is kept where there is a folder for it; run the same again"
)


@contextmanager
def process_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes; when the block is left early, they are ended at once."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        # Ended, not cancelled: the pool's own thread complains of futures that were cancelled under its hands.
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True)


def submit(
    pool: ProcessPoolExecutor, function: Callable[_Given, _Answer], *args: _Given.args, **kwargs: _Given.kwargs
) -> "Future[_Answer]":
    """Ask the pool. Processes started by it never see an interrupt: they are ended by us."""
    with children_uninterrupted():
        return pool.submit(function, *args, **kwargs)
