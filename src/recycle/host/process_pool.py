"""`process_pool`: a pool of processes that end with this one, whether by Ctrl-C, SIGTERM or SIGKILL."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from recycle.core.errors import UserError
from recycle.host.process_lifetime import children_uninterrupted, end_with_parent

START_METHOD = "spawn"
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_BROKEN = (
    "a process was ended from outside, perhaps for lack of memory, or the script that called has no "
    "'if __name__ == \"__main__\":' guard: finished work is kept where there is a folder for it; run the same again"
)


@contextmanager
def process_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes; an exception in the block kills them at once.

    Raises a UserError if one of them was ended from outside.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context(START_METHOD), initializer=end_with_parent)
    try:
        yield pool
    except BaseException as problem:
        # Killed, not cancelled: the pool's own thread prints an error about cancelled futures.
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        if isinstance(problem, BrokenProcessPool):
            raise UserError(_BROKEN) from None
        raise
    finally:
        pool.shutdown(wait=True)


def submit(
    pool: ProcessPoolExecutor, function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
) -> "Future[_Result]":
    """Submit a call to the pool. Processes that this starts never see Ctrl-C: this process ends them."""
    with children_uninterrupted():
        return pool.submit(function, *args, **kwargs)
