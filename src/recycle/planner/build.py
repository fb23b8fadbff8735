"""Building a plan library: a plan for every number of failures, in parallel, resumable at any time.

Only the process that was asked writes; the others plan. So whatever stops them, the folder holds whole plans or none.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import UserError
from recycle.core.library import Library
from recycle.core.problem import Problem
from recycle.planner.normalize import most_failures
from recycle.planner.solve import solve_normalized

# Placed ops a plan: a library is many plans, so each gets less search than a single one.
LIBRARY_EFFORT = 2_000_000


@dataclass(frozen=True, slots=True)
class Built:
    """One plan of the library: how good it is, and whether it was there before."""

    num_failures: int
    period_us: int
    bound_us: int
    was_there: bool


def build(
    folder: Path,
    problem: Problem,
    max_failures: int,
    method: str = "auto",
    time_limit_s: float = 60.0,
    num_processes: int | None = None,
) -> Iterator[Built]:
    """Plan for 0 to `max_failures`, yielding each plan when it is on disk; what is there already is kept."""
    most = most_failures(problem.shape)
    if not 0 <= max_failures <= most:
        raise UserError(
            f"{max_failures} failures are too many: at most {most} workers can fail while every stage keeps a live one"
        )
    library = Library.create(folder, problem)
    missing = []
    for num_failures in range(max_failures + 1):
        if library.has(num_failures):
            yield _known(library, num_failures)
        else:
            missing.append(num_failures)
    if missing:
        num_processes = min(len(missing), num_processes or os.cpu_count() or 1)
        yield from _plan_missing(library, missing, method, time_limit_s, num_processes)


def _known(library: Library, num_failures: int) -> Built:
    plan = library.get(num_failures)
    return Built(num_failures, plan.period_us, plan.quality.bound_us, was_there=True)


def _plan_missing(library: Library, missing: list[int], method: str, time_limit_s: float, num_processes: int) -> Iterator[Built]:
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_die_quietly)
    try:
        waiting = iter(missing)
        running: set[Future[tuple[int, str, int, int]]] = set()
        while True:
            # A few at a time, so that a stop has little to throw away.
            for num_failures in _take(waiting, 2 * num_processes - len(running)):
                running.add(pool.submit(_plan_one, library.problem, num_failures, method, time_limit_s))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                num_failures, text, period_us, bound_us = future.result()
                library.put(num_failures, text)
                yield Built(num_failures, period_us, bound_us, was_there=False)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()


def _take(waiting: Iterator[int], count: int) -> list[int]:
    return [number for _, number in zip(range(count), waiting, strict=False)]


def _die_quietly() -> None:
    """A planning process has nothing to lose: an interrupt ends it without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _plan_one(problem: Problem, num_failures: int, method: str, time_limit_s: float) -> tuple[int, str, int, int]:
    plan, _ = solve_normalized(problem, num_failures, method, time_limit_s, effort=LIBRARY_EFFORT)
    return num_failures, plan.dumps(), plan.period_us, plan.quality.bound_us
