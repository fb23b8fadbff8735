"""`LinkWatch`: which links between members are slow, from the lags that they report with their iterations, with hysteresis.

Messages are short and few beside ops, and their times vary more. So a link must be slow for longer than a worker, by more, and by
so much that it matters beside the ops that wait for its messages.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median

from recycle.control.drift.message_times import LinkLag
from recycle.control.drift.op_pace import Pace
from recycle.control.drift.relative_links import LinkEstimate, WorkerPair, compare_links, message_times_us
from recycle.control.drift.speed_watch import SpeedWatch
from recycle.core.cluster import Worker

HOLD_LINKS, LINK_TOLERANCE = 5, 0.34
# Times of messages are compared as if all were longer by this share of an op, and at least by this time: less does not matter.
_LEAST_SHARE, _LEAST_US = 0.1, 1000.0
_SLOWEST = 0.001


@dataclass(frozen=True, slots=True)
class LinkChange:
    """The link of two workers has had another speed than before since an iteration; 1 is that of other links.

    A message took `time_us` on it, and `usual_us` on the other links; 0 if nothing was measured.
    """

    pair: WorkerPair
    speed: float
    since: int
    time_us: int = 0
    usual_us: int = 0

    @property
    def delay_us(self) -> int:
        """How much longer a message takes than on other links."""
        return max(0, self.time_us - self.usual_us)


class LinkWatch:
    """The speeds of the links between members, by their numbers: a member that changes its place takes its links along.

    `slow` has the links that are slow, with what was last found about each.
    """

    def __init__(self) -> None:
        self._watch = SpeedWatch[tuple[int, int]](HOLD_LINKS, LINK_TOLERANCE)
        self._members: Mapping[int, Worker] = {}
        self.slow: dict[tuple[int, int], LinkChange] = {}
        self._recent: dict[tuple[int, int], deque[LinkEstimate]] = {}

    def start_epoch(self, members: Mapping[int, Worker], iteration: int) -> Iterator[LinkChange]:
        """Watch the links of these members in a new epoch, and forget those of others; yield what changes between places."""
        before = {change.pair for change in self.slow.values()}
        self._members = members
        self._watch.keep_only([pair for pair in self._watch.known if members.keys() >= set(pair)])
        self._recent.clear()
        kept = {pair: change for pair, change in self.slow.items() if members.keys() >= set(pair)}
        self.slow = {pair: replace(change, pair=self._pair(*pair)) for pair, change in kept.items()}
        now = {change.pair: change for change in self.slow.values()}
        present = set(members.values())
        yield from (LinkChange(pair, 1.0, iteration) for pair in sorted(before - now.keys()) if present >= set(pair))
        yield from (replace(now[pair], since=iteration) for pair in sorted(now.keys() - before))

    def add(self, iteration: int, lags: Mapping[int, Mapping[str, LinkLag]], paces: Iterable[Pace]) -> Iterator[LinkChange]:
        """Add the lags of an iteration, by member and sender; yield the links whose speed changes by it."""
        numbers = {place: number for number, place in self._members.items()}
        times_us = message_times_us({self._members[number]: of_member for number, of_member in lags.items()})
        compared = {
            (numbers[pair.first], numbers[pair.second]): estimate
            for pair, estimate in compare_links(times_us).items()
            if pair.first in numbers and pair.second in numbers
        }
        for members, estimate in compared.items():
            self._recent.setdefault(members, deque(maxlen=HOLD_LINKS)).append(estimate)
        least_us = max(_LEAST_US, _LEAST_SHARE * _op_us(paces))
        speeds = {members: estimate.relative_speed(least_us) for members, estimate in compared.items()}
        for change in self._watch.add(iteration, speeds):
            recent = self._recent[change.member]
            time_us, usual_us = (median(times) for times in zip(*((each.time_us, each.usual_us) for each in recent), strict=True))
            speed = max(_SLOWEST, round(usual_us / time_us, 3)) if change.speed < 1 else 1.0
            found = LinkChange(self._pair(*change.member), speed, change.since, round(time_us), round(usual_us))
            was_slow = self.slow.pop(change.member, None) is not None
            if speed < 1:
                self.slow[change.member] = found
            if speed < 1 or was_slow:
                yield found

    def _pair(self, first: int, second: int) -> WorkerPair:
        return WorkerPair(self._members[first], self._members[second])


def _op_us(paces: Iterable[Pace]) -> float:
    """The median over all workers and classes of the time of an op."""
    times_us = [time_us for pace in paces for _, time_us in pace.values()]
    return median(times_us) if times_us else 0.0
