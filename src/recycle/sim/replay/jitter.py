"""Durations of ops with slow workers and random jitter, independent of the order of events.

Each worker has in each iteration a random stream of its own, made from (seed, pipeline, stage, iteration); the factor of an op is
the number at the position of the op in the row. So an op takes the same time, eager or paced, whatever else happens.
"""

import numpy as np

from recycle.core.cluster import Worker
from recycle.sim.replay.op_graph import Ints, OpGraph

_MOST_DEVIATIONS = 3.0


def disturbed_durations_us(graph: OpGraph, num_iterations: int, jitter: float, slow: dict[Worker, float], seed: int) -> Ints:
    """Return the duration of every op in every iteration: at least 1 µs, exactly the profile's where nothing disturbs it."""
    durations = np.tile(graph.durations_us, (num_iterations, 1))
    for number, row in enumerate(graph.plan.rows):
        factor = slow.get(row.worker, 1.0)
        if jitter == 0 and factor == 1.0:
            continue
        ops = graph.ops_of_row(number)
        for iteration in range(num_iterations):
            noise = 1 + jitter * _deviations(seed, row.worker, iteration, len(row)) if jitter else 1.0
            durations[iteration, ops] = _rounded(durations[iteration, ops] * factor * noise)
    return durations


def _rounded(times: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> Ints:
    """Round to whole microseconds, at least 1 each, and carry the rounding error of each op over to the next."""
    ends = np.rint(np.cumsum(times)).astype(np.int64)
    whole: Ints = np.maximum(1, np.diff(ends, prepend=0))
    return whole


def _deviations(seed: int, worker: Worker, iteration: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    stream = np.random.default_rng([seed, worker.pipeline, worker.stage, iteration])
    return np.clip(stream.standard_normal(num), -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
