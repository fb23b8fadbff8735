"""The portfolio: settings of the list scheduler's priority rule that are known to work well, the strongest first."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from recycle.core.problem import Problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.search import UNLIMITED, Setting
from recycle.planner.model.assignment import Bools, Ints


class _Entry(NamedTuple):
    """A setting of the portfolio, for any problem.

    Urgent are the first and the last micro-batches of a pipeline: `num_first` and `num_last` of them (below 1: times the number
    of stages). A worker waits for them for `patience` times the longest F. `push` and `stash` are multiplied by the depth of a
    stage, which is the number of stages from there to the last.
    """

    num_first: float
    num_last: float
    patience: float
    push: float
    stash: float


# Ordered so that each entry adds most to those before it (the second was put there by hand), on 104 problems of 12 to 256
# workers, four cost ratios, memory for S and for 2S. The benchmark's shapes were among them.
_PORTFOLIO = (
    _Entry(1, 0.5, 1, 1.25, UNLIMITED),
    _Entry(0, 0, 0, 0, UNLIMITED),
    _Entry(1, 8, 1, 2, UNLIMITED),
    _Entry(1, 2, 1, 1, 0.5),
    _Entry(0, 0, 0, 2, UNLIMITED),
    _Entry(1, 0.5, 1, 1.5, 0),
    _Entry(1, 8, 1, 0, 0.5),
    _Entry(1, 8, 1, 1, UNLIMITED),
    _Entry(0, 0, 0, 1.25, 0),
    _Entry(1, 0.5, 1, 1.25, 0),
    _Entry(UNLIMITED, 0, 0.5, 1.25, 0),
    _Entry(1, 8, 1, 1.5, UNLIMITED),
    _Entry(1, 0.5, 1, 1, 0),
    _Entry(0, 8, 1, 1, 0.5),
    _Entry(UNLIMITED, 0, 0.5, 1.5, UNLIMITED),
    _Entry(1, 2, 1, 2, 0),
    _Entry(1, 0.5, 1, 1.25, 0.25),
    _Entry(1, 0.5, 1, 1.5, UNLIMITED),
    _Entry(1, 8, 1, 1.5, 0),
    _Entry(0, 0, 0, 1, 0),
    _Entry(1, 2, 1, 1.75, UNLIMITED),
)


def portfolio(problem: Problem) -> Iterator[Setting]:
    """Yield settings: classic 1F1B where the backward pass is whole, then the strongest first."""
    num_stages = problem.shape.num_stages
    depth = num_stages - np.arange(num_stages)
    longest = max(stage.forward_us for stage in problem.profile.stages)
    if not problem.techniques.decoupled:
        yield Setting(parameters_by_depth(depth, 0, UNLIMITED, window=depth), urgent_ends(problem, 0, 0))
    for entry in _PORTFOLIO:
        first, last = (round(n * num_stages) if 0 < n < 1 else int(n) for n in (entry.num_first, entry.num_last))
        parameters = parameters_by_depth(depth, entry.push, entry.stash, round(entry.patience * longest))
        yield Setting(parameters, urgent_ends(problem, first, last))


def parameters_by_depth(depth: Ints, push: float, stash: float, patience_us: int = 0, window: int | Ints = UNLIMITED) -> Ints:
    parameters = np.zeros((depth.size, kernel.NUM_PARAMETERS), np.int64)
    parameters[:, kernel.PUSH] = np.round(push * depth)
    parameters[:, kernel.STASH] = np.round(stash * depth)
    parameters[:, kernel.PATIENCE_US] = patience_us
    parameters[:, kernel.WINDOW] = window
    return parameters


def urgent_ends(problem: Problem, num_first: int, num_last: int) -> Bools:
    """The I's of each pipeline's first micro-batches, and the F's and I's of its last ones."""
    shape = problem.shape
    index = np.arange(shape.num_chains) % shape.num_microbatches
    is_first, is_last = index < num_first, index >= shape.num_microbatches - num_last
    by_kind = np.stack([is_last, is_first | is_last, np.zeros_like(is_last)])
    return np.repeat(by_kind[:, None, :], shape.num_stages, axis=1)
