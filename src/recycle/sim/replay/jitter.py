"""How long ops really take: slow workers, and jitter that depends on who, when and where, never on the order of events.

Each worker has in each iteration a stream of its own, made from (seed, pipeline, stage, iteration); the factor of an op is
the number at its position. So the same op takes the same time whatever else happens, eager or paced.
"""

import numpy as np

from recycle.core.cluster import Worker
from recycle.sim.replay.op_graph import Ints, OpGraph

_MOST_DEVIATIONS = 3.0


def durations_us(program: OpGraph, num_iterations: int, jitter: float, slow: dict[Worker, float], seed: int) -> Ints:
    """Return the duration of every op in every iteration: at least 1 µs, exactly the profile's where nothing disturbs it."""
    known = np.tile(program.durations_us, (num_iterations, 1))
    for number, row in enumerate(program.plan.rows):
        factor = slow.get(row.worker, 1.0)
        if jitter == 0 and factor == 1.0:
            continue
        span = slice(*program.bounds[number : number + 2].tolist())
        for iteration in range(num_iterations):
            noise = 1 + jitter * _deviations(seed, row.worker, iteration, len(row)) if jitter else 1.0
            known[iteration, span] = _rounded(known[iteration, span] * factor * noise)
    return known


def _rounded(times: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> Ints:
    """Whole microseconds, at least 1 each, that add up to the times: what is rounded away of one op is given to the next."""
    ends = np.rint(np.cumsum(times)).astype(np.int64)
    whole: Ints = np.maximum(1, np.diff(ends, prepend=0))
    return whole


def _deviations(seed: int, worker: Worker, iteration: int, num: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    stream = np.random.default_rng([seed, worker.pipeline, worker.stage, iteration])
    return np.clip(stream.standard_normal(num), -_MOST_DEVIATIONS, _MOST_DEVIATIONS)
