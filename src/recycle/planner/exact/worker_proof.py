"""raise_bound(): a higher bound of the period, from the rows that a single worker can have.

A whole plan is too much for an exact method beyond some hundred ops, but a row is not. Most of what the formula of the bound does
not know happens in one row: how F's, I's and W's fit into each other while memory is full.
"""

import time

from recycle.core.problem import Problem
from recycle.planner.exact.exact_model import Exact, ExactLimit
from recycle.planner.model.busiest_worker import busiest_workers

# So many stages are tried, those with the highest bounds, if no worker has more micro-batches than this.
_MOST_STAGES, _MOST_MICROBATCHES = 4, 100


def raise_bound(problem: Problem, bound_us: int, period_us: int, limit: ExactLimit) -> Exact:
    """Return the highest bound that was proven for a problem without cuts and speeds: at most `period_us`, that of a plan.

    Each stage gets half of what is left of the limit.
    """
    from recycle.planner.exact import cpsat

    used = 0
    for number, worker in enumerate(busiest_workers(problem)):
        if bound_us >= period_us or number == _MOST_STAGES or worker.num_microbatches > _MOST_MICROBATCHES:
            break
        found = cpsat.prove_worker(worker, _half(limit, used), bound_us, period_us)
        bound_us, used = found.bound_us, used + found.used
    return Exact(None, bound_us, used)


def _half(limit: ExactLimit, used: int) -> ExactLimit:
    if limit.deadline is not None:
        return ExactLimit(deadline=(time.monotonic() + limit.deadline) / 2)
    assert limit.effort is not None
    return ExactLimit(effort=max(1, (limit.effort - used) // 2))
