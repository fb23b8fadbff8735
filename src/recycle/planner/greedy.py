"""The greedy method: list scheduling under many settings, each schedule tightened, the best one kept.

A `Setting` holds the dials of the list scheduler by stage, and which ops are urgent. `portfolio` yields settings that are known
to work well, the strongest first; `improve` then changes the best ones step by step. How long it searches is counted in placed
ops, not in seconds, so that the same problem gives the same plan on every machine.
"""

from collections.abc import Callable

import numpy as np

from recycle.core.problem import Problem
from recycle.planner.improve import changed
from recycle.planner.portfolio import portfolio
from recycle.planner.schedule import Schedule
from recycle.planner.search import Search

DEFAULT_EFFORT = 60_000_000
# Beyond this share of the effort a search goes on only while its best schedule is not this close to the bound.
_FIRST_SHARE, _CLOSE = 0.15, 1.005
# Small problems are better left to an exact method than searched for long; large ones get the first share at most.
_MOST_RUNS, _LARGE_OPS = 2000, 400_000
_NUM_STARTS = 4


def solve(
    problem: Problem, bound_us: int, effort: int = DEFAULT_EFFORT, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the best schedule found with at most about `effort` placed ops; stops early at the bound.

    The portfolio's best few settings are improved side by side, because a single one often gets stuck.
    """
    search = Search.of(problem, bound_us)
    num_runs = min(_MOST_RUNS, max(1, effort // search.num_ops))
    first_runs = max(1, round(num_runs * _FIRST_SHARE))
    if search.num_ops > _LARGE_OPS:
        num_runs = first_runs
    settings = portfolio(problem)
    starts = [search.run(next(settings))]
    rng = np.random.default_rng(0)
    for number in range(1, num_runs):
        best = min(starts, key=lambda found: found.score)
        is_close = number >= first_runs and best.score[0] <= _CLOSE * bound_us
        if best.score[0] <= bound_us or is_close or out_of_time():
            break
        if (setting := next(settings, None)) is not None:
            starts = sorted([*starts, search.run(setting)], key=lambda found: found.score)[:_NUM_STARTS]
        else:
            at = number % len(starts)
            found = search.run(changed(rng, search, starts[at]))
            starts[at] = min(found, starts[at], key=lambda found: found.score)
    return search.schedule(min(starts, key=lambda found: found.score).starts)
