"""`parallel_map`: apply a function to every argument in a pool of processes, with the results in the order of the arguments."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from recycle.host.process_pool import process_pool, submit

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


def parallel_map(
    function: Callable[[_Argument], _Result],
    arguments: Sequence[_Argument],
    on_progress: Callable[[int], None] = lambda num_done: None,
    num_processes: int | None = None,
) -> list[_Result]:
    """Return `function` of every argument; `on_progress` is called with the number of results so far.

    With one argument, or inside a process of a pool, the function runs in this process.
    """
    num_processes = min(len(arguments), num_processes or os.cpu_count() or 1)
    if num_processes <= 1 or multiprocessing.parent_process() is not None:
        return _collect((function(argument) for argument in arguments), on_progress)
    with process_pool(num_processes) as pool:
        futures = [submit(pool, function, argument) for argument in arguments]
        return _collect((future.result() for future in futures), on_progress)


def _collect(results: Iterable[_Result], on_progress: Callable[[int], None]) -> list[_Result]:
    collected: list[_Result] = []
    for result in results:
        collected.append(result)
        on_progress(len(collected))
    return collected
