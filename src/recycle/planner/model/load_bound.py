"""The lower bound of the period where micro-batches are cut at shared layers, or workers have speeds of their own.

`lower_bound` treats every stage alone, because its work is its own. Shared layers tie neighbouring stages together: what counts
is the work that a run of stages cannot give away, over the speed of its workers, with the time in which these cannot work. The
proof is in docs/planner.md. Where a length depends on a cut, the bound takes the least or the greatest that shared layers allow.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from recycle.core.op import Kind
from recycle.core.plans.op_costs import slowed_us
from recycle.core.problem import Problem
from recycle.planner.model.assignment import Ints, speeds_of
from recycle.planner.model.load_split import WorkLine, fits, layer_work

Floats = npt.NDArray[np.float64]
_NEVER = -(10**15)
_ROUNDING_US = 1e-6  # what floating-point numbers may take off a limit that is a whole multiple of the grain
_HELD = ("activation_bytes", "weight_held_bytes")


@dataclass(frozen=True, slots=True)
class _Limits:
    """What limits the work of a worker of one stage in a period, for any speed; times of its own ops are at speed 1.

    Args:
        own_us: Reduction and step, and synchronous the way to this stage.
        tail_us: From the first F of an earlier stage to that of this one, and from the last I here to the end there.
        round_trip_us: From the start of a chain's F to the start of its I here.
        forwards_us: The F's that memory holds before any I ran.
        afters_us: The W's that memory lets be outstanding when an I ends.
        area: Work for each microsecond with full memory.
        not_forward, not_after, neither: The least share of a chain's work that is no F, that is no W, and that is neither.
        grain_us: The work of whole layers is a multiple of it.
    """

    own_us: float
    tail_us: float
    round_trip_us: float
    forwards_us: float
    afters_us: float
    area: float
    not_forward: float
    not_after: float
    neither: float
    grain_us: int

    def work(self, speed: float, period_us: float) -> float:
        """The most work of a worker. If it runs any chain at all, then each of these limits holds."""
        whole = speed * (period_us - self.own_us)
        started = speed * (period_us - self.own_us - self.round_trip_us)  # what is not an F before the first I
        ended = speed * (period_us - self.tail_us)  # what is not a W after the last I
        between = speed * (period_us - self.tail_us - self.round_trip_us)  # neither
        limits = (
            whole,
            started + self.forwards_us,
            _over(started, self.not_forward),
            ended + self.afters_us,
            _over(ended, self.not_after),
            between + self.forwards_us + self.afters_us,
            _over(between + self.afters_us, self.not_forward),
            _over(between + self.forwards_us, self.not_after),
            _over(between, self.neither),
            self.area * (period_us - self.own_us),
        )
        return max(0.0, (min(limits) + _ROUNDING_US) // self.grain_us * self.grain_us)


def _over(time_us: float, share: float) -> float:
    """The work of which `share` takes this time; any, if there is no such share."""
    return time_us / share if share > 1e-9 else math.inf if time_us >= 0 else 0.0


def _most_for(values: Floats, sizes: Floats) -> float:
    """The highest value for its size."""
    ratios = [value / size if size else math.inf for value, size in zip(values.tolist(), sizes.tolist(), strict=True) if value]
    return max(ratios, default=0.0)


class LoadBound:
    """Least and greatest times of a problem with shared layers or speeds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        shape, held, stages = problem.shape, problem.held_layers, problem.profile.stages
        self.num_stages, shared = shape.num_stages, held.num_shared if held else 0
        self.bounds = held.sums.bounds if held else tuple(range(self.num_stages + 1))
        inner, last = self.bounds[1:-1], self.bounds[-1]
        self.lows, self.highs = (0, *(at - shared for at in inner), last), (0, *(at + shared for at in inner), last)
        times = {kind: held.sums.times(kind) if held else _sums(s.duration_us(kind) for s in stages) for kind in Kind}
        self.forward = times[Kind.F]
        splits = problem.techniques.decoupled
        self.back = times[Kind.I] if splits else times[Kind.B]
        # What follows the part that the stage before waits for, layer by layer the cheaper of the two ways.
        self.after = (
            _sums(map(min, _steps(times[Kind.W]), _differences(times[Kind.B], times[Kind.I]))) if splits else (0,) * (last + 1)
        )
        self.speeds = speeds_of(problem)
        self.fastest = float(self.speeds.max())
        comm = [problem.profile.comm_us(stage) for stage in range(self.num_stages - 1)]
        self.comm = (0, *accumulate(comm))
        steps = [problem.optimizer_us(stage) for stage in range(self.num_stages)]
        self.steps = steps if problem.techniques.staggered else [max(steps)] * self.num_stages
        work = tuple(shape.num_chains * at for at in layer_work(problem, last))
        self.line = WorkLine(
            work, self.lows, self.highs, tuple(float(row.sum()) for row in self.speeds), (0.0,) * self.num_stages
        )
        self._limits = [self._limits_of(stage) for stage in range(self.num_stages)]

    def period_us(self) -> int:
        """A period that no plan can beat: the least in which the stages have time for all work, however it is split."""
        least = max(self._whole_us(stage) for stage in range(self.num_stages))
        most = max(1, least)
        while not self._fits(most):
            least, most = most + 1, 2 * most
        while least < most:
            middle = (least + most) // 2
            if self._fits(middle):
                most = middle
            else:
                least = middle + 1
        return least

    def _fits(self, period_us: int) -> bool:
        return fits(self.line, [self.room_us(stage, period_us) for stage in range(self.num_stages)])

    def room_us(self, stage: int, period_us: int) -> float:
        """The most work that the workers of `stage` can do in a period, by the terms of docs/planner.md."""
        return sum(self._limits[stage].work(speed, period_us) for speed in self.speeds[stage].tolist() if speed)

    def _least(self, sums: tuple[int, ...], stage: int) -> int:
        """The least of the sums over the layers that `stage` computes of a chain, of which there is one at least."""
        if self.highs[stage] < self.lows[stage + 1]:
            return sums[self.lows[stage + 1]] - sums[self.highs[stage]]
        return min(sums[layer + 1] - sums[layer] for layer in range(self.lows[stage], self.highs[stage + 1]))

    def _way_us(self, sums: tuple[int, ...], above: int, below: int) -> float:
        """The least time of the layers between the starts of two stages, communication included."""
        layers = max(0, sums[self.lows[below]] - sums[self.highs[above]])
        return layers / self.fastest + self.comm[below] - self.comm[above]

    def _round_trip_us(self, stage: int) -> float:
        down = self.forward[-1] - self.forward[self.highs[stage]]
        up = self.back[-1] - self.back[self.highs[stage + 1]]
        return max(0, down + up) / self.fastest + 2 * (self.comm[-1] - self.comm[stage])

    def _limits_of(self, stage: int) -> "_Limits":
        ranges = self._ranges(stage)
        forward, back, after = (self._totals(sums, ranges) for sums in (self.forward, self.back, self.after))
        whole = np.maximum(forward + back + after, 1e-9)
        reach = 0.0 if self.problem.techniques.staggered else self._way_us(self.forward, 0, stage)
        round_trip = self._round_trip_us(stage)
        forwards, afters, area = self._memory_limits(stage, round_trip, ranges)
        return _Limits(
            reach + self.problem.reduce_us(stage) + self.steps[stage],
            max((self._tail_us(stage, above) for above in range(stage)), default=float(_NEVER)),
            round_trip,
            forwards,
            afters,
            area,
            *(1 - float((part / whole).max()) for part in (forward, after, forward + after)),
            math.gcd(*_steps(layer_work(self.problem, self.bounds[-1]))[self.lows[stage] : self.highs[stage + 1]]) or 1,
        )

    def _ranges(self, stage: int) -> Ints:
        """First and end layer of every part of a chain that `stage` may compute, a column each."""
        firsts, ends = range(self.lows[stage], self.highs[stage] + 1), range(self.lows[stage + 1], self.highs[stage + 1] + 1)
        return np.array([(first, end) for first in firsts for end in ends if first < end], dtype=np.int64).T

    def _totals(self, sums: Sequence[int], ranges: Ints) -> Floats:
        at = np.array(sums, dtype=np.float64)
        made: Floats = at[ranges[1]] - at[ranges[0]]
        return made

    def _memory_limits(self, stage: int, round_trip_us: float, ranges: Ints) -> tuple[float, float, float]:
        """The time of the F's that fit before any I ran, of the W's that can be outstanding when an I ends, and the area.

        The area is the work that a worker can do for each microsecond of the period, if memory is never empty.
        """
        problem, capacity = self.problem, self.problem.capacity(stage)
        if capacity is None:
            return math.inf, math.inf, math.inf
        forward, back, after = (self._totals(sums, ranges) for sums in (self.forward, self.back, self.after))
        if problem.held_layers is None:
            held = np.array([problem.held_by_forward(stage)], dtype=np.float64)
            kept = np.array([problem.held_for_weight(stage)], dtype=np.float64)
        else:
            sums = problem.held_layers.sums.sums
            sizes = [sums[name] if problem.memory.unit == "bytes" else range(self.bounds[-1] + 1) for name in _HELD]
            held, kept = (self._totals(size, ranges) for size in sizes)
            kept = np.minimum(held, kept)
        # A fused backward keeps nothing after it, and is at the latest where a W of no length would be.
        occupied = held * (round_trip_us + back / self.fastest) + kept * after / self.fastest
        whole = forward + back + after
        return capacity * _most_for(forward, held), capacity * _most_for(after, kept), capacity * _most_for(whole, occupied)

    def _tail_us(self, stage: int, above: int) -> float:
        """The time from the first F of `above` to that of `stage`, and from the last I of `stage` to the end of `above`."""
        reach = 0.0 if self.problem.techniques.staggered else self._way_us(self.forward, 0, above)
        ways = self._way_us(self.forward, above, stage) + self._way_us(self.back, above, stage)
        finish = self.problem.reduce_us(above) + self.steps[above]
        return reach + ways + self._least(self.after, above) / self.fastest + finish

    def _whole_us(self, stage: int) -> int:
        """Without shared layers: the time of whole micro-batches on whole workers, each at its own speed."""
        if self.problem.held_layers is not None:
            return 0
        problem = self.problem
        chain_us = layer_work(problem, self.num_stages)
        whole = chain_us[stage + 1] - chain_us[stage]
        lengths = [slowed_us(whole, speed) for speed in self.speeds[stage].tolist() if speed]
        low, high = 0, problem.shape.num_chains * max(lengths)
        while low < high:
            middle = (low + high) // 2
            if sum(middle // length for length in lengths) >= problem.shape.num_chains:
                high = middle
            else:
                low = middle + 1
        return low + problem.reduce_us(stage) + self.steps[stage]


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return (0, *accumulate(values))


def _steps(sums: tuple[int, ...]) -> list[int]:
    return [after - before for before, after in pairwise(sums)]


def _differences(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    return [a - b for a, b in zip(_steps(one), _steps(other), strict=True)]
