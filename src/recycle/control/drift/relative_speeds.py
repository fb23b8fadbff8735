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


def relative_speeds(paces: Mapping[int, tuple[Worker, Pace]], cost_of: CostOf) -> dict[int, SpeedEstimate]:
    """Return the speed of each member, from its place and pace; members that ran nothing have none."""
    by_stage: dict[int, dict[int, Pace]] = defaultdict(dict)
    for number, (worker, pace) in paces.items():
        if _time_us(pace) > 0:
            by_stage[worker.stage][number] = pace
    slowness = {
        number: _time_us(pace) / max(1, sum(num * cost_of(stage, name) for name, (num, _) in pace.items()))
        for stage, peers in by_stage.items()
        for number, pace in peers.items()
    }
    found: dict[int, SpeedEstimate] = {}
    for peers in by_stage.values():
        if len(peers) > 1:
            found |= _beside_peers(peers, slowness)
        else:
            usual = median(slowness.values())
            found |= {number: SpeedEstimate(usual / slowness[number], is_lone=True) for number in peers}
    return found


def _time_us(pace: Pace) -> int:
    """The time of all ops, each taken for a median one of its class."""
    return sum(num * time_us for num, time_us in pace.values())


def _beside_peers(peers: Mapping[int, Pace], slowness: Mapping[int, float]) -> dict[int, SpeedEstimate]:
    """The speed of each of the workers of a stage, where that of the median one is 1; of two, that of the faster.

    It is the time that the median one takes for the ops of a worker over the time of the worker; so long ops weigh more than
    short ones, whose times vary. Only ops of classes count that at least one other runs; if there are none, `slowness` does.
    """
    by_class: dict[str, list[int]] = defaultdict(list)
    for pace in peers.values():
        for name, (_, time_us) in pace.items():
            by_class[name].append(time_us)
    usual_us = {name: median_low(times_us) for name, times_us in by_class.items() if len(times_us) > 1}
    usual = median_low([slowness[number] for number in peers])
    speeds = {}
    for number, pace in peers.items():
        shared = {name: each for name, each in pace.items() if name in usual_us}
        expected_us = sum(num * usual_us[name] for name, (num, _) in shared.items())
        speeds[number] = SpeedEstimate(expected_us / max(1, _time_us(shared)) if expected_us > 0 else usual / slowness[number])
    return speeds
