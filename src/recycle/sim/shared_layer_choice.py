"""choose_shared_layers(): how many layers neighbouring stages of a simulated job should share.

Shared layers cost memory, a longer reduction and a longer optimizer step, and pay when workers are dead or stages uneven. So the
plans for a few dead workers decide.
"""

import math
from functools import lru_cache
from pathlib import Path

from recycle.core.errors import UserError
from recycle.planner.failure_normalization import most_failures
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob

MOST_SHARED = 2
EXPECTED_DEAD = (0.05, 0.10)


@lru_cache(maxsize=64)
def choose_shared_layers(job: SimulatedJob, folder: Path | None) -> int:
    """The number up to `MOST_SHARED` that fits in memory, and has the shortest iterations with `EXPECTED_DEAD` workers dead."""
    counts = [min(math.ceil(share * job.num_nodes), most_failures(job.shape)) for share in EXPECTED_DEAD]
    periods = {}
    for shared in range(MOST_SHARED + 1):
        try:
            problem = job.problem(shared_layers=shared)
        except UserError:
            break  # a stage has fewer layers, or they do not fit in the memory
        periods[shared] = sum(timing.period_us for timing in IterationTimes(problem, folder).exactly(counts))
    return min(periods, key=lambda shared: (periods[shared], shared))
