"""Settings of the list scheduler's priority rule that are known to work well.

The portfolio has them for all problems, the strongest first. Where chains may be cut, a `CutRule` gives cuts and a setting.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recycle.core.problem import Problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.search import UNLIMITED, Setting
from recycle.planner.model.assignment import Assignment, Ints
from recycle.planner.model.chain_cuts import assign
from recycle.planner.model.lower_bound import Bounds


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


def urgent_ends(problem: Problem, num_first: int, num_last: int) -> kernel.Percents:
    """The I's of each pipeline's first micro-batches, and the F's and I's of its last ones."""
    shape = problem.shape
    index = np.arange(shape.num_chains) % shape.num_microbatches
    is_first, is_last = index < num_first, index >= shape.num_microbatches - num_last
    by_kind = np.stack([is_last, is_first | is_last, np.zeros_like(is_last)])
    return _at_all_stages(problem, np.where(by_kind, kernel.WHOLE_PATIENCE, 0))


def _at_all_stages(problem: Problem, percents: npt.ArrayLike) -> kernel.Percents:
    """The urgency of ops that is the same at all stages, given by kind and chain."""
    return np.repeat(np.asarray(percents).astype(np.uint8)[:, None, :], problem.shape.num_stages, axis=1)


@dataclass(frozen=True, slots=True)
class CutRule:
    """A few numbers from which cuts and a setting follow, for problems with shared layers.

    With cuts all stages have about the same work, so that time is lost only where the pipeline fills and drains. There two things
    count: how much less work the stages at either end have, and how long workers wait for the ops of the first and the last
    micro-batches. Both are compromises that no formula knows.

    Args:
        first_idle, last_idle: For how much idle time of the first and of the last stage work is split, in multiples of what
            `Bounds` proves, or of the work of a micro-batch at a stage if that is more.
        first_reach, last_reach: The share of the stages over which that falls to none.
        first, num_first: The urgency of the I of a pipeline's first micro-batch, and the number of micro-batches over which it
            falls to that of the others, in multiples of the number of stages.
        last, num_last: The same of the last I, which falls with the square.
        last_forward, num_last_forward: The same of the last F, which falls evenly.
        inputs, forwards: The urgency of all other I's and F's.
        push: As in the portfolio.
    """

    first_idle: float = 0.5
    last_idle: float = 0.6
    first_reach: float = 0.2
    last_reach: float = 0.5
    first: float = 50
    num_first: float = 0.25
    last: float = 80
    num_last: float = 1.0
    last_forward: float = 40
    num_last_forward: float = 1.0
    inputs: float = 3
    forwards: float = 12
    push: float = 1.25

    def neighbour(self, rng: np.random.Generator) -> "CutRule":
        """The same rule with one to three numbers changed at random."""
        names = rng.choice(list(_CHANGES), size=int(rng.choice([1, 1, 2, 3])), replace=False)
        changes = {str(name): _CHANGES[str(name)](getattr(self, str(name)), rng) for name in names}
        return replace(self, **changes)

    def has_cuts_of(self, other: "CutRule") -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in _NUMBERS_OF_CUTS)

    def assignment(self, problem: Problem) -> Assignment:
        bounds, num_stages = Bounds(problem), problem.shape.num_stages
        proven = max(bounds.lost_us(stage, problem.cluster.num_live(stage)) for stage in range(num_stages))
        scale = max(2 * proven, *(sum(bounds.lengths_us(stage)) for stage in range(num_stages)))
        at = np.arange(num_stages) / num_stages
        from_first = np.maximum(0.0, 1 - at / self.first_reach)
        from_last = np.maximum(0.0, 1 - at[::-1] / self.last_reach)
        return assign(problem, (scale * (self.first_idle * from_first + self.last_idle * from_last)).tolist())

    def setting(self, problem: Problem) -> Setting:
        shape, num_stages = problem.shape, problem.shape.num_stages
        after = np.arange(shape.num_chains) % shape.num_microbatches
        before = shape.num_microbatches - 1 - after
        first = self.first * _falling(after, self.num_first * num_stages)
        last = self.last * _falling(before, self.num_last * num_stages) ** 2
        last_forward = self.last_forward * _falling(before, self.num_last_forward * num_stages)
        forwards, inputs = np.maximum(self.forwards, last_forward), np.maximum(self.inputs, np.maximum(first, last))
        longest = max(stage.forward_us for stage in problem.profile.stages)
        parameters = parameters_by_depth(num_stages - np.arange(num_stages), self.push, UNLIMITED, longest)
        return Setting(parameters, _at_all_stages(problem, np.stack([forwards, inputs, np.zeros_like(inputs)])))


def _falling(number: Ints, until: float) -> npt.NDArray[np.float64]:
    """1 for number 0, and 0 from `until` on."""
    return np.maximum(0.0, 1 - number / max(1.0, until))


def _added(value: float, rng: np.random.Generator) -> float:
    return max(0.0, value + rng.normal(0, 0.3))


def _scaled(value: float, rng: np.random.Generator) -> float:
    return float(np.clip(value * 2 ** rng.normal(0, 0.7), 0.02, 4.0))


def _percent(value: float, rng: np.random.Generator) -> float:
    return 0.0 if rng.random() < 0.25 else float(np.clip(value + rng.normal(0, rng.choice([5, 15])), 0, 130))


_NUMBERS_OF_CUTS = ("first_idle", "last_idle", "first_reach", "last_reach")
# How each number of a rule is changed at random.
_CHANGES: dict[str, Callable[[float, np.random.Generator], float]] = {
    **dict.fromkeys(("first_idle", "last_idle", "push"), _added),
    **dict.fromkeys(("first_reach", "last_reach", "num_first", "num_last", "num_last_forward"), _scaled),
    **dict.fromkeys(("first", "last", "last_forward", "inputs", "forwards"), _percent),
}
