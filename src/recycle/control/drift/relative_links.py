"""`compare_links`: how fast the links of one iteration were, each beside the others between the same two stages.

Messages between two stages have the same size. So a link is slow if they take longer on it than on other links of that boundary
in the same iteration; if all take longer, the machines or the network are busy. A link without another one at its boundary is
compared with the links of all boundaries, and only a change of that means something.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median_low
from typing import NamedTuple

from recycle.control.drift.message_times import LinkLag
from recycle.control.drift.relative_speeds import SpeedEstimate
from recycle.core.cluster import Worker


class WorkerPair(NamedTuple):
    """Two workers that exchange messages: activations from the first to the second, gradients back."""

    first: Worker
    second: Worker

    def __str__(self) -> str:
        return f"{self.first}-{self.second}"


def message_times_us(lags: Mapping[Worker, Mapping[str, LinkLag]]) -> dict[WorkerPair, float]:
    """How long a message took between the workers of each pair: the mean of both ways, since the difference of clocks is in one.

    `lags` are by receiver and sender. With one clock, one way is enough. Other pairs, of which a way is not known, have no time.
    """
    ways: dict[WorkerPair, list[LinkLag]] = defaultdict(list)
    for receiver, of_receiver in lags.items():
        for name, lag in of_receiver.items():
            sender = Worker.parse(name)
            ways[WorkerPair(*sorted((sender, receiver), key=lambda worker: worker.stage))].append(lag)
    times_us = {}
    for pair, known in ways.items():
        if len(known) == 2 or known[0].is_one_clock:
            times_us[pair] = max(1.0, sum(lag.least_us for lag in known) / len(known))
    return times_us


class LinkEstimate(NamedTuple):
    """How long a message took in an iteration on a link, and how long on the median link of its boundary; of two, the faster.

    If the link `is_lone`, no other one of its boundary was measured: the median is that of all links.
    """

    time_us: float
    usual_us: float
    is_lone: bool = False

    def relative_speed(self, least_us: float) -> SpeedEstimate:
        """The speed beside the usual link, if all messages took `least_us` longer: times far below that do not matter."""
        return SpeedEstimate((self.usual_us + least_us) / (self.time_us + least_us), self.is_lone)


def compare_links(times_us: Mapping[WorkerPair, float]) -> dict[WorkerPair, LinkEstimate]:
    """Compare the links of each boundary with each other, by the times of their messages."""
    by_boundary: dict[int, list[float]] = defaultdict(list)
    for pair, time_us in times_us.items():
        by_boundary[pair.first.stage].append(time_us)
    compared = {}
    for pair, time_us in times_us.items():
        beside = by_boundary[pair.first.stage]
        is_lone = len(beside) == 1
        compared[pair] = LinkEstimate(time_us, median_low(times_us.values() if is_lone else beside), is_lone)
    return compared
