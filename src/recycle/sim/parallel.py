"""Spreading work over processes: results in the order of the questions, no process left behind whatever happens."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from recycle.core.errors import UserError

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
    if num_processes <= 1 or multiprocessing.current_process().daemon or multiprocessing.parent_process() is not None:
        return [_told(function(question), tick, number) for number, question in enumerate(questions, start=1)]
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        answers = pool.map(function, questions)
        return [_told(answer, tick, number) for number, answer in enumerate(answers, start=1)]
    except BrokenProcessPool:
        raise UserError("a process was ended from outside, perhaps for lack of memory: run the same command again") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _told(answer: _Answer, tick: Callable[[int], None], number: int) -> _Answer:
    tick(number)
    return answer
