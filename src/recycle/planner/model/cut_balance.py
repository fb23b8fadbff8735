"""Compiled balancing of whole cuts: shift cuts of single chains by a layer while that makes the loads of workers more even.

The load split has fractions of layers; whole chains on whole workers are a layer off here and there. A step shifts the cuts of
one chain at neighbouring boundaries, so that a layer's work goes from the worker at one end to the worker at the other. It is
taken if the sum of squares of the loads, each over its worker's speed, falls. That sum is least where all loads are as even as
they can be.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from recycle.planner.model.assignment import Ints

Floats = npt.NDArray[np.float64]
# Longer runs find little that shorter ones do not, and with many stages they take seconds.
_MOST_PASSES, _LONGEST_RUN = 6, 8


def _compiled(function: Any) -> Any:
    return numba.njit(cache=True, error_model="numpy")(function)


@_compiled
def _best_run(
    chain: int,
    first: int,
    step: int,
    positions: Ints,
    lows: Ints,
    highs: Ints,
    work: Ints,
    held: Ints,
    capacity: Ints,
    pipeline: Ints,
    loads: Floats,
    speeds: Floats,
) -> tuple[float, int]:
    """The best run of boundaries from `first + 1` on to shift by `step`: the change of the sum of squares, and where it ends."""
    num_stages = pipeline.shape[0]
    best, best_last, sum_before = -1e-9, -1, 0.0
    for last in range(first + 1, min(num_stages, first + 1 + _LONGEST_RUN)):
        at = positions[last, chain]
        if not lows[last] <= at + step <= highs[last]:
            break
        # The stage before this boundary: it gains or loses at its end, and at its beginning unless it begins the run.
        stage = last - 1
        begins = positions[stage, chain] + (step if stage > first else 0)
        ends = at + step
        if ends - begins < 1 or held[ends] - held[begins] > capacity[stage]:
            break
        change = (work[ends] - work[begins]) - (work[at] - work[positions[stage, chain]])
        where = pipeline[stage, chain]
        load, speed = loads[stage, where], speeds[stage, where]
        sum_before += ((load + change) ** 2 - load**2) / speed
        # The stage after it, if the run ends here.
        end = positions[last + 1, chain]
        if end - (at + step) < 1 or held[end] - held[at + step] > capacity[last]:
            continue
        change = work[at] - work[at + step]
        where = pipeline[last, chain]
        load, speed = loads[last, where], speeds[last, where]
        total = sum_before + ((load + change) ** 2 - load**2) / speed
        if total < best:
            best, best_last = total, last
    return best, best_last


@_compiled
def _shift(chain: int, first: int, last: int, step: int, positions: Ints, work: Ints, pipeline: Ints, loads: Floats) -> None:
    for stage in range(first, last + 1):
        loads[stage, pipeline[stage, chain]] -= work[positions[stage + 1, chain]] - work[positions[stage, chain]]
    for boundary in range(first + 1, last + 1):
        positions[boundary, chain] += step
    for stage in range(first, last + 1):
        loads[stage, pipeline[stage, chain]] += work[positions[stage + 1, chain]] - work[positions[stage, chain]]


@_compiled
def balance(
    chains: Ints,
    positions: Ints,
    lows: Ints,
    highs: Ints,
    work: Ints,
    held: Ints,
    capacity: Ints,
    pipeline: Ints,
    lost: Floats,
    speeds: Floats,
) -> None:
    """Shift cuts in `positions`, by boundary and chain, of the given chains in their order, until no single shift helps.

    `work` and `held` are sums of the work and of the activations of one chain over the layers, `lost` is by stage the time that
    is not work, `speeds` is by stage and pipeline.
    """
    num_stages, num_chains = pipeline.shape
    loads = np.zeros(speeds.shape, np.float64)
    for stage in range(num_stages):
        loads[stage] += lost[stage] * speeds[stage]
        for chain in range(num_chains):
            loads[stage, pipeline[stage, chain]] += work[positions[stage + 1, chain]] - work[positions[stage, chain]]
    for _ in range(_MOST_PASSES):
        is_changed = False
        for chain in chains:
            best, best_first, best_last, best_step = -1e-9, -1, -1, 0
            for first in range(num_stages - 1):
                for step in (-1, 1):
                    change, last = _best_run(
                        chain, first, step, positions, lows, highs, work, held, capacity, pipeline, loads, speeds
                    )
                    if change < best:
                        best, best_first, best_last, best_step = change, first, last, step
            if best_first >= 0:
                _shift(chain, best_first, best_last, best_step, positions, work, pipeline, loads)
                is_changed = True
        if not is_changed:
            break
