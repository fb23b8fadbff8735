"""Spreading work over processes: results in the order of the questions."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from recycle.core.errors import UserError
from recycle.host.process_pool import BROKEN, process_pool, submit

_Question = TypeVar("_Question")
_Answer = TypeVar("_Answer")


def spread(
    function: Callable[[_Question], _Answer],
    questions: Sequence[_Question],
    tick: Callable[[int], None] = lambda done: None,
    num_processes: int | None = None,
) -> list[_Answer]:
    """Answer every question, in this process if there is only one; `tick` hears how many are done."""
    num_processes = min(len(questions), num_processes or os.cpu_count() or 1)
    if num_processes <= 1 or multiprocessing.parent_process() is not None:
        return [_told(function(question), tick, number) for number, question in enumerate(questions, start=1)]
    try:
        with process_pool(num_processes) as pool:
            futures = [submit(pool, function, question) for question in questions]
            return [_told(future.result(), tick, number) for number, future in enumerate(futures, start=1)]
    except BrokenProcessPool:
        raise UserError(BROKEN) from None


def _told(answer: _Answer, tick: Callable[[int], None], number: int) -> _Answer:
    tick(number)
    return answer
