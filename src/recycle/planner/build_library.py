"""build(): make a library with a plan for every number of failures, in parallel processes, resumable at any time.

Only the calling process writes files, so that the folder holds whole plans whenever a process is stopped.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from recycle.core.errors import UserError
from recycle.core.plans.library import Library
from recycle.core.problem import Problem
from recycle.host.process_pool import process_pool, submit
from recycle.planner.failure_normalization import least_bound, most_failures
from recycle.planner.solve import refuse_misuse, solve_normalized

# Placed ops for one plan: a library has many plans, so each gets less search than a single one.
LIBRARY_EFFORT = 3_000_000

_PlanOne = Callable[[int], tuple[int, str, int]]


@dataclass(frozen=True, slots=True)
class Built:
    """One plan of a library: its period, the least bound of any distribution of its failures, and whether it was there before."""

    num_failures: int
    period_us: int
    bound_us: int
    was_there: bool


def build(
    folder: Path | str,
    problem: Problem,
    max_failures: int,
    method: str = "auto",
    time_limit_s: float | None = None,
    num_processes: int | None = None,
    effort: int = LIBRARY_EFFORT,
) -> Iterator[Built]:
    """Make a plan for every number of failures from 0 to `max_failures`, and yield each when its file is written.

    Args:
        folder: The folder of the library. Plans that it holds already are kept.
        problem: The problem; its own failures are ignored.
        max_failures: The largest number of failures to plan for.
        method: As for `solve`.
        time_limit_s: A limit for one plan in seconds, as for `solve`.
        num_processes: The number of planning processes; by default one for each core.
        effort: As for `solve`, for each plan.

    Returns:
        An iterator over the plans' periods and bounds. Planning happens while it is consumed.

    Raises:
        UserError: So many workers cannot fail, an argument is invalid, or the folder has a library of another problem. All but
            the last are raised before the first plan.

    Example:
        >>> import recycle, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> plans = recycle.build(folder, recycle.problem(2, 2, 4, costs="1,1,1"), max_failures=1, num_processes=1)
        >>> sorted(plan.num_failures for plan in plans)
        [0, 1]
        >>> recycle.Library.open(folder).get(1).problem.cluster.live_workers()
        [Worker(pipeline=0, stage=0), Worker(pipeline=0, stage=1), Worker(pipeline=1, stage=0)]
    """
    most = most_failures(problem.shape)
    if not 0 <= max_failures <= most:
        raise UserError(
            f"{max_failures} failures are too many: at most {most} workers can fail while every stage keeps a live one"
        )
    if max_failures and not problem.techniques.adaptive:
        raise UserError("only the technique 'adaptive' can re-route around a failure: switch it on, or give --max-failures 0")
    refuse_misuse(method, time_limit_s)
    library = Library.create(Path(folder), problem)
    plan_one = partial(_plan_one, library.problem, method=method, time_limit_s=time_limit_s, effort=effort)
    return _build(library, max_failures, plan_one, num_processes)


def _build(library: Library, max_failures: int, plan_one: _PlanOne, num_processes: int | None) -> Iterator[Built]:
    missing = []
    for num_failures in range(max_failures + 1):
        if (known := library.look(num_failures)) is not None:
            yield Built(num_failures, known, least_bound(library.problem, num_failures), was_there=True)
        else:
            missing.append(num_failures)
    if missing:
        num_processes = min(len(missing), num_processes or os.cpu_count() or 1)
        yield from _plan_missing(library, missing, plan_one, num_processes)


def _plan_missing(library: Library, missing: list[int], plan_one: _PlanOne, num_processes: int) -> Iterator[Built]:
    with process_pool(num_processes) as pool:
        waiting = iter(missing)
        running: set[Future[tuple[int, str, int]]] = set()
        while True:
            # A few at a time, so that little work is lost if the build is stopped.
            for num_failures in islice(waiting, 2 * num_processes - len(running)):
                running.add(submit(pool, plan_one, num_failures))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                num_failures, text, period_us = future.result()
                library.put(num_failures, text)
                yield Built(num_failures, period_us, least_bound(library.problem, num_failures), was_there=False)


def _plan_one(problem: Problem, num_failures: int, method: str, time_limit_s: float | None, effort: int) -> tuple[int, str, int]:
    plan, _ = solve_normalized(problem, num_failures, method, time_limit_s, effort)
    return num_failures, plan.dumps(), plan.period_us
