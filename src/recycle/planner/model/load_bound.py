"""The lower bound of the period where micro-batches are cut at shared layers, or workers have speeds of their own.

`lower_bound` treats every stage alone, because its work is its own. Shared layers tie neighbouring stages together: what counts
is the work that a run of stages cannot give away, over the speed of its workers, with the time in which these cannot work. The
proof is in docs/planner.md. Where a length depends on a cut, the bound takes the least or the greatest that shared layers allow.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from recycle.core.op import Kind
from recycle.core.plans.op_costs import slowed_us
from recycle.core.problem import Problem
from recycle.planner.model.assignment import speeds_of
from recycle.planner.model.load_split import WorkLine, layer_work, least_time_us

_NEVER = -(10**15)
_HELD = ("activation_bytes", "weight_held_bytes")


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

    def period_us(self) -> int:
        """A period that no plan can beat."""
        lost = [self._lost_us(stage) for stage in range(self.num_stages)]
        num_chains = self.problem.shape.num_chains
        work = tuple(num_chains * at for at in layer_work(self.problem, self.bounds[-1]))
        line = WorkLine(work, self.lows, self.highs, tuple(float(row.sum()) for row in self.speeds), tuple(lost))
        least = math.ceil(least_time_us(line) - 1e-6)
        return max([least, *(self._whole_us(stage) for stage in range(self.num_stages))])

    def _most(self, sums: tuple[int, ...], stage: int) -> int:
        return sums[self.highs[stage + 1]] - sums[self.lows[stage]]

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

    def _room_us(self, stage: int) -> tuple[float, float]:
        """The time of the F's that fit before any I ran, at most, and of the W's that can be outstanding when an I ends."""
        problem, capacity, num_chains = self.problem, self.problem.capacity(stage), self.problem.shape.num_chains
        forwards, afters = (num_chains * self._most(sums, stage) for sums in (self.forward, self.after))
        if capacity is None:
            return forwards, afters
        if problem.held_layers is None:
            whole, rest = problem.held_by_forward(stage), problem.held_for_weight(stage)
            at_once = min(num_chains, capacity // whole) if whole else num_chains
            pending = min(num_chains, 1 + (capacity - whole) // rest) if whole and rest else num_chains
            return at_once * self._most(self.forward, stage), pending * self._most(self.after, stage)
        # Every layer of a micro-batch takes its part of the memory: no run of layers has more time for its memory than its best.
        held = problem.held_layers.sums.sums
        sizes = [held[name] if problem.memory.unit == "bytes" else range(self.bounds[-1] + 1) for name in _HELD]
        forward, after = (self._time_for_memory(stage, *each) for each in zip((self.forward, self.after), sizes, strict=True))
        return min(forwards, capacity * forward), min(afters, capacity * after)

    def _time_for_memory(self, stage: int, times: Sequence[int], held: Sequence[int]) -> float:
        """The most time that a layer of `stage` has for each unit of memory that it holds."""
        layers = range(self.lows[stage], self.highs[stage + 1])
        pairs = [(times[layer + 1] - times[layer], held[layer + 1] - held[layer]) for layer in layers]
        return max((time / size if size else math.inf for time, size in pairs if time), default=0.0)

    def _lost_us(self, stage: int) -> float:
        """The least time in a period in which a worker of `stage` does not work, in the mean over its speeds."""
        forwards, afters = self._room_us(stage)
        staggered, round_trip = self.problem.techniques.staggered, self._round_trip_us(stage)
        reach = 0.0 if staggered else self._way_us(self.forward, 0, stage)
        own = reach + self.problem.reduce_us(stage) + self.steps[stage]
        tail = max((self._tail_us(stage, above) for above in range(stage)), default=float(_NEVER))
        total = 0.0
        for speed in filter(None, self.speeds[stage].tolist()):
            idle = max(0.0, round_trip - forwards / speed)
            total += speed * max(idle + own, idle - afters / speed + tail)
        return total / float(self.speeds[stage].sum())

    def _tail_us(self, stage: int, above: int) -> float:
        """The time from the first F of `above` to that of `stage`, and from the last I of `stage` to the end of `above`."""
        reach = 0.0 if self.problem.techniques.staggered else self._way_us(self.forward, 0, above)
        ways = self._way_us(self.forward, above, stage) + self._way_us(self.back, above, stage)
        return reach + ways + self._least(self.after, above) / self.fastest + self.steps[above]

    def _whole_us(self, stage: int) -> int:
        """Without shared layers: the time of whole micro-batches on whole workers, each at its own speed."""
        if self.problem.held_layers is not None:
            return 0
        problem, lost = self.problem, math.ceil(self._lost_us(stage)) if not self.problem.speeds else 0
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
        return low + max(lost, problem.reduce_us(stage) + self.steps[stage])


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return (0, *accumulate(values))


def _steps(sums: tuple[int, ...]) -> list[int]:
    return [after - before for before, after in pairwise(sums)]


def _differences(one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    return [a - b for a, b in zip(_steps(one), _steps(other), strict=True)]
