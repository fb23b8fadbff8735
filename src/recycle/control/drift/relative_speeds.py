"""`relative_speeds`: how fast the workers of one iteration were, each beside its peers.

Peers of a stage run the same ops. So a worker is slow if its ops take longer than those of its peers in the same iteration; if
all take longer, the machine is busy or the profile is wrong, and nobody is slow. A worker without a live peer is compared with
the workers of all stages, by how much longer than planned their ops take. An error of the profile is in that, too: only a change
of it means something.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median, median_low
from typing import NamedTuple

from recycle.control.drift.op_pace import Pace
from recycle.core.cluster import Worker

CostOf = Callable[[int, str], int]
"""The planned time in µs, at speed 1, of an op of a stage and a class."""


class SpeedEstimate(NamedTuple):
    """The speed of a worker in an iteration. If it `is_lone`, it has no peer: its speed is that beside plan and all others."""

    speed: float
    is_lone: bool = False


class _Slowness(NamedTuple):
    """By class of a worker's ops: their time over the planned time, and how much planned time they make up."""

    ratios: Mapping[str, float]
    weights: Mapping[str, int]

    def mean(self, by: Mapping[str, float]) -> float:
        """The mean of a number of each class, by the planned time of the classes that have one."""
        return sum(by[each] * self.weights[each] for each in by) / sum(self.weights[each] for each in by)


def relative_speeds(paces: Mapping[int, tuple[Worker, Pace]], cost_of: CostOf) -> dict[int, SpeedEstimate]:
    """Return the speed of each member, from its place and pace; members that ran nothing have none."""
    slowness = {number: _slowness(worker.stage, pace, cost_of) for number, (worker, pace) in paces.items()}
    by_stage: dict[int, dict[int, _Slowness]] = defaultdict(dict)
    for number, each in slowness.items():
        if each.weights:
            by_stage[paces[number][0].stage][number] = each
    whole = [each.mean(each.ratios) for peers in by_stage.values() for each in peers.values()]
    found: dict[int, SpeedEstimate] = {}
    for peers in by_stage.values():
        if len(peers) > 1:
            found |= {number: SpeedEstimate(speed) for number, speed in _beside_peers(peers).items()}
        else:
            found |= {number: SpeedEstimate(median(whole) / each.mean(each.ratios), True) for number, each in peers.items()}
    return found


def _slowness(stage: int, pace: Pace, cost_of: CostOf) -> _Slowness:
    costs = {each: cost_us for each in pace if (cost_us := cost_of(stage, each)) > 0 and pace[each][1] > 0}
    ratios = {each: pace[each][1] / cost_us for each, cost_us in costs.items()}
    return _Slowness(ratios, {each: pace[each][0] * cost_us for each, cost_us in costs.items()})


def _beside_peers(peers: Mapping[int, _Slowness]) -> dict[int, float]:
    """The speed of each of the workers of a stage, where that of the median one is 1; of two, that of the faster.

    By ops of a class that at least one other runs, too; a worker that has none, by its ops beside the plan.
    """
    by_class: dict[str, list[float]] = defaultdict(list)
    for each in peers.values():
        for name, ratio in each.ratios.items():
            by_class[name].append(ratio)
    usual = {name: median_low(ratios) for name, ratios in by_class.items() if len(ratios) > 1}
    usual_whole = median_low([each.mean(each.ratios) for each in peers.values()])
    speeds = {}
    for number, each in peers.items():
        shared = {name: ratio for name, ratio in each.ratios.items() if name in usual}
        if shared:
            speeds[number] = each.mean({name: usual[name] for name in shared}) / each.mean(shared)
        else:
            speeds[number] = usual_whole / each.mean(each.ratios)
    return speeds
