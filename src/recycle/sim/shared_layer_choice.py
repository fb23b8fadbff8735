"""shared_layers_of_job(): how many layers neighbouring stages of a simulated job should share.

Shared layers cost memory, a longer reduction and a longer optimizer step, and pay when workers are dead or stages uneven. So the
plans for the numbers of dead workers that a trace has decide.
"""

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from recycle.core.errors import UserError
from recycle.core.events.trace import Trace, live_counts
from recycle.planner.failure_normalization import most_failures
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob

MOST_SHARED = 2
# Without a trace so many of all workers are taken to be dead, and with one the numbers at these shares of its time.
_DEAD_SHARES = (0.05, 0.10)
_TIME_SHARES = (1 / 6, 1 / 2, 5 / 6)


def expected_dead(traces: Iterable[Trace], num_places: int) -> tuple[int, ...]:
    """The numbers of dead workers that stand for each third of the time of all traces, from the fewest to the most."""
    times: Counter[int] = Counter()
    for trace in traces:
        counts = list(live_counts(trace))
        ends = [at_us for at_us, _ in counts[1:]] + [trace.end_us]
        for (at_us, num_live), end_us in zip(counts, ends, strict=True):
            times[max(0, num_places - num_live)] += end_us - at_us
    total, found = sum(times.values()), []
    for share in _TIME_SHARES:
        passed = 0
        for dead, time_us in sorted(times.items()):
            passed += time_us
            if passed >= share * total:
                found.append(dead)
                break
    return tuple(found)


@lru_cache(maxsize=64)
def shared_layers_of_job(job: SimulatedJob, folder: Path | None, num_dead: tuple[int, ...] = ()) -> int:
    """The number up to `MOST_SHARED` that fits in memory, and has the shortest iterations with so many workers dead."""
    wanted = num_dead or tuple(math.ceil(share * job.num_nodes) for share in _DEAD_SHARES)
    counts = [min(number, most_failures(job.shape)) for number in wanted]
    periods = {}
    for shared in range(MOST_SHARED + 1):
        try:
            problem = job.problem(shared_layers=shared)
        except UserError:
            break  # a stage has fewer layers, or they do not fit in the memory
        periods[shared] = sum(timing.period_us for timing in IterationTimes(problem, folder).exactly(counts))
    return min(periods, key=lambda shared: (periods[shared], shared))
