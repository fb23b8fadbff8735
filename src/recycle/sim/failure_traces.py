"""Traces made up from a few numbers and a seed: who leaves when, and who comes back.

A seed means the same trace on every machine and with every numpy: only raw bits of PCG64 are drawn, which numpy promises to
keep, and not its distributions, which it may change. All times are whole milliseconds, as in the file, and all changes lie
before the end, so that a longer trace of the same seed begins like a shorter one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from numpy.random import PCG64, SeedSequence

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace
from recycle.core.units import format_duration

MOST_CHANGES = 1_000_000
MOST_BACK_AT_ONCE = 4
LONGEST_US = 10**15  # 30 years, as long as a trace may last

Move = tuple[int, bool, int]
"""A change in the making: milliseconds, whether it is a departure, the place of the node. In this order it sorts by time, and
at one time those who come back are before those who leave."""


def worker_names(num_pipelines: int, num_stages: int) -> tuple[str, ...]:
    """The nodes of a cluster in the order of its shape: W0_0, W0_1, ..."""
    _refuse_count("pipelines", num_pipelines)
    _refuse_count("stages", num_stages)
    _refuse_too_many(num_pipelines * num_stages, 0)
    return tuple(str(Worker(pipeline, stage)) for pipeline in range(num_pipelines) for stage in range(num_stages))


def node_names(num_nodes: int) -> tuple[str, ...]:
    """Nodes without a place in a shape: node0, node1, ..."""
    _refuse_count("nodes", num_nodes)
    _refuse_too_many(num_nodes, 0)
    return tuple(f"node{number}" for number in range(num_nodes))


def every(nodes: Sequence[str], interval_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """One random live node leaves every `interval_us`, never the last one; with `rejoin_us` it is back that much later."""
    interval, end, rejoin = _ms("the interval", interval_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_too_many(len(nodes), (end - 1) // interval, rejoin)

    def when_back(at: int, size: int) -> list[int]:
        return [at + rejoin] * size if rejoin else []

    departures = ((at, 1) for at in range(interval, end, interval))
    return _trace(nodes, _in_groups(len(nodes), departures, when_back, _uniforms(seed)), end)


def bursts(nodes: Sequence[str], most: int, interval_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Like spot instances: 1 to `most` random live nodes leave together, on average every `interval_us`; one at least stays.

    With `rejoin_us` they come back a few at a time: 1 to `MOST_BACK_AT_ONCE` of a burst after each `rejoin_us`.
    """
    interval, end, rejoin = _ms("the interval", interval_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_size("burst", most, len(nodes))
    _refuse_too_many(len(nodes), (end - 1) * (1 + most) // (2 * interval), rejoin)
    draws = _uniforms(seed)

    def departures() -> Iterator[tuple[int, int]]:
        at = _wait_ms(draws, interval)
        while at < end:
            yield at, 1 + _pick(draws, most)
            at += _wait_ms(draws, interval)

    def when_back(at: int, size: int) -> list[int]:
        times: list[int] = []
        while rejoin and len(times) < size:
            at += rejoin
            times += [at] * (1 + _pick(draws, MOST_BACK_AT_ONCE))
        return times[:size]

    return _trace(nodes, _in_groups(len(nodes), departures(), when_back, draws), end)


def poisson(nodes: Sequence[str], mtbf_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Each node by itself leaves after an exponential time of mean `mtbf_us`, and again so after each return."""
    return racks(nodes, 1, mtbf_us, end_us, seed, rejoin_us)


def racks(nodes: Sequence[str], rack_size: int, mtbf_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Each `rack_size` nodes in a row leave together, after an exponential time of mean `mtbf_us`, and return together.

    A rack has its own stream of random numbers: what happens to it does not depend on how many others there are.
    """
    mtbf, end, rejoin = _ms("the mean time between failures", mtbf_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_size("rack", rack_size, len(nodes))
    _refuse_too_many(len(nodes), len(nodes) * end // (mtbf + rejoin), rejoin)
    moves: list[Move] = []
    for number, first in enumerate(range(0, len(nodes), rack_size)):
        places = range(first, min(first + rack_size, len(nodes)))
        for at, leaves in _alone(_uniforms(seed, number), mtbf, end, rejoin):
            moves += ((at, leaves, place) for place in places)
    return _trace(nodes, moves, end)


def _alone(draws: Iterator[float], mtbf: int, end: int, rejoin: int) -> Iterator[tuple[int, bool]]:
    """Yield when one that fails by itself leaves and, unless `rejoin` is 0, is back."""
    at = _wait_ms(draws, mtbf)
    while at < end:
        yield at, True
        if not rejoin:
            return
        yield at + rejoin, False
        at += rejoin + _wait_ms(draws, mtbf)


def _in_groups(
    num_nodes: int,
    departures: Iterable[tuple[int, int]],
    when_back: Callable[[int, int], list[int]],
    draws: Iterator[float],
) -> Iterator[Move]:
    """Yield who leaves and who is back: at each of `departures` so many of those who are live, but never all."""
    live, away = list(range(num_nodes)), list[tuple[int, int]]()
    for at, size in departures:
        while away and away[0][0] < at:
            live.append(heappop(away)[1])
        # Who is back at this very moment is not asked to leave again, but may be the one who stays.
        num_free = len(live) if away and away[0][0] == at else len(live) - 1
        leaving = [_take(live, draws) for _ in range(min(size, num_free))]
        yield from ((at, True, place) for place in leaving)
        for back, place in zip(when_back(at, len(leaving)), leaving, strict=False):
            heappush(away, (back, place))
            yield back, False, place
        if len(live) == 1 and not away:
            return


def _take(live: list[int], draws: Iterator[float]) -> int:
    """Remove a random one; the last fills its place, which is quick and as random."""
    place = _pick(draws, len(live))
    live[place], live[-1] = live[-1], live[place]
    return live.pop()


def _trace(nodes: Sequence[str], moves: Iterable[Move], end: int) -> Trace:
    changes = [Change(0, True, node) for node in nodes]
    changes += (Change(at * 1000, not leaves, nodes[place]) for at, leaves, place in sorted(moves) if at < end)
    return Trace(tuple(changes), end * 1000)


def _uniforms(seed: int, stream: int = 0) -> Iterator[float]:
    """Return numbers from 0 up to but without 1; another `stream` of the same seed is independent of this one."""
    if seed < 0:
        raise UserError(f"the seed is {seed}, but it must be a whole number of at least 0")
    bits = PCG64(SeedSequence(seed, spawn_key=(stream,)))
    return ((bits.random_raw() >> 11) * 2.0**-53 for _ in itertools.count())


def _pick(draws: Iterator[float], num: int) -> int:
    return int(next(draws) * num)


def _wait_ms(draws: Iterator[float], mean: int) -> int:
    """An exponential time, rounded up, so that nobody leaves at the moment of joining."""
    return max(1, math.ceil(-mean * math.log1p(-next(draws))))


def _ms(what: str, time_us: int) -> int:
    if not 1000 <= time_us <= LONGEST_US:  # also true of what is not a number
        said = format_duration(time_us) if time_us >= 0 else f"{time_us} µs"
        raise UserError(f"{what} is {said}, but it must be from 1 ms to 30 years")
    return int(time_us) // 1000


def _rejoin_ms(rejoin_us: int | None) -> int:
    """The time to rejoin, 0 for never."""
    return 0 if rejoin_us is None else _ms("the time to rejoin", rejoin_us)


def _refuse_count(what: str, count: int) -> None:
    if count < 1:
        raise UserError(f"the number of {what} is {count}, but it must be a whole number of at least 1")


def _refuse_size(what: str, size: int, num_nodes: int) -> None:
    if not 1 <= size <= num_nodes:
        raise UserError(
            f"a {what} of {size} nodes is not possible: there are {num_nodes}, so give a number from 1 to {num_nodes}"
        )


def _refuse_too_many(num_nodes: int, num_failures: int, rejoin: int = 0) -> None:
    """Raise if the trace would be longer than anybody can use, before it is made."""
    count = num_nodes + (2 * num_failures if rejoin else min(num_failures, num_nodes))
    if count > MOST_CHANGES:
        raise UserError(
            f"the trace would have about {count:,} changes, more than the {MOST_CHANGES:,} that are allowed: "
            "take fewer nodes, a shorter time, or failures further apart"
        )
