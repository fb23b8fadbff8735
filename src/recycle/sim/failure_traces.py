"""Generators of random failure traces: periodic, bursts, Poisson, racks, failure models, slow workers and links, drift.

They are made from a few numbers and a seed.

A seed gives the same trace on every machine and with every version of numpy: only raw bits of PCG64 are drawn, which numpy keeps
stable, and not its distributions, which may change. Times are whole milliseconds, as in the file, and all changes are before the
end, so that a longer trace of the same seed begins like a shorter one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from numpy.random import PCG64, SeedSequence

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Slowdown, Trace
from recycle.core.units import format_duration
from recycle.sim.failure_model import FailureCause, FailureModel, FailureScope

MOST_CHANGES = 1_000_000
MOST_BACK_AT_ONCE = 4
LONGEST_US = 10**15  # 30 years, as long as a trace may last

_SLOW_STREAM, _LINK_STREAM, _DRIFT_STREAM = 1 << 20, 2 << 20, 3 << 20  # beside those of racks, which count from 0
_SCOPE_STREAMS = {FailureScope.GPU: 4 << 20, FailureScope.MACHINE: 5 << 20, FailureScope.RACK: 6 << 20}
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class SlowRate:
    """How often a node is slow (mean time between two beginnings of it), how long in the mean, and at which speed."""

    mtbf_us: int
    time_us: int
    speed: float


# "Fail-slow in the wild" (FALCON and GREYHOUND, ATC 2025): computation was slow in 2 % of jobs, for ten minutes in the mean, and
# communication in 40 %, for 24 minutes. What follows is our reading of it: a job of that study is one node for computation and
# four for communication, and lasts an hour. The speeds are assumptions.
PUBLISHED_SLOW = SlowRate(50 * 3_600_000_000, 600_000_000, 0.6)
PUBLISHED_SLOW_LINKS = SlowRate(10 * 3_600_000_000, 24 * 60_000_000, 0.5)

NodeChange = tuple[int, bool, int]
"""Milliseconds, whether the node leaves, the index of the node. Sorted, nodes that return come before nodes that leave."""


def worker_names(num_pipelines: int, num_stages: int) -> tuple[str, ...]:
    _refuse_count("pipelines", num_pipelines)
    _refuse_count("stages", num_stages)
    _refuse_too_many(num_pipelines * num_stages, 0)
    return tuple(str(Worker(pipeline, stage)) for pipeline in range(num_pipelines) for stage in range(num_stages))


def node_names(num_nodes: int) -> tuple[str, ...]:
    _refuse_count("nodes", num_nodes)
    _refuse_too_many(num_nodes, 0)
    return tuple(f"node{number}" for number in range(num_nodes))


def periodic_trace(nodes: Sequence[str], interval_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """One random live node leaves every `interval_us`, never the last one; with `rejoin_us` it returns so much later."""
    interval, end, rejoin = _ms("the interval", interval_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_too_many(len(nodes), (end - 1) // interval, rejoin)

    def when_back(at: int, size: int) -> list[int]:
        return [at + rejoin] * size if rejoin else []

    departures = ((at, 1) for at in range(interval, end, interval))
    return _trace(nodes, _group_changes(len(nodes), departures, when_back, _uniforms(seed)), end)


def burst_trace(nodes: Sequence[str], most: int, interval_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Like spot instances: 1 to `most` random live nodes leave together, on average every `interval_us`; at least one stays.

    With `rejoin_us` they return a few at a time: 1 to `MOST_BACK_AT_ONCE` of a burst after each `rejoin_us`.
    """
    interval, end, rejoin = _ms("the interval", interval_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_size("burst", most, len(nodes))
    _refuse_too_many(len(nodes), (end - 1) * (1 + most) // (2 * interval), rejoin)
    draws = _uniforms(seed)

    def departures() -> Iterator[tuple[int, int]]:
        at = _exponential_ms(draws, interval)
        while at < end:
            yield at, 1 + _draw_index(draws, most)
            at += _exponential_ms(draws, interval)

    def when_back(at: int, size: int) -> list[int]:
        times: list[int] = []
        while rejoin and len(times) < size:
            at += rejoin
            times += [at] * (1 + _draw_index(draws, MOST_BACK_AT_ONCE))
        return times[:size]

    return _trace(nodes, _group_changes(len(nodes), departures(), when_back, draws), end)


def poisson_trace(nodes: Sequence[str], mtbf_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Each node leaves after an exponential time of mean `mtbf_us`, and again so after each return."""
    return rack_trace(nodes, 1, mtbf_us, end_us, seed, rejoin_us)


def rack_trace(nodes: Sequence[str], rack_size: int, mtbf_us: int, end_us: int, seed: int, rejoin_us: int | None = None) -> Trace:
    """Each `rack_size` consecutive nodes leave together, after an exponential time of mean `mtbf_us`, and return together.

    A rack has its own stream of random numbers, so that its failures do not depend on the number of racks.
    """
    mtbf, end, rejoin = _ms("the mean time between failures", mtbf_us), _ms("the end", end_us), _rejoin_ms(rejoin_us)
    _refuse_size("rack", rack_size, len(nodes))
    _refuse_too_many(len(nodes), len(nodes) * end // (mtbf + rejoin), rejoin)
    changes: list[NodeChange] = []
    for number, at, leaves in _rack_changes(-(-len(nodes) // rack_size), mtbf, end, seed, rejoin):
        first = number * rack_size
        changes += ((at, leaves, index) for index in range(first, min(first + rack_size, len(nodes))))
    return _trace(nodes, changes, end)


@lru_cache(maxsize=64)
def _rack_changes(num_racks: int, mtbf: int, end: int, seed: int, rejoin: int) -> tuple[tuple[int, int, bool], ...]:
    """The number of each rack that leaves or returns, when, and whether it leaves; kept, because shapes share their failures."""
    return tuple(
        (number, at, leaves)
        for number in range(num_racks)
        for at, leaves in _leaves_and_returns(_uniforms(seed, number), mtbf, end, rejoin)
    )


@dataclass(frozen=True, slots=True)
class DrawnFailure:
    """The nodes of these indices fail together for a cause, and are back at `back_us`."""

    at_us: int
    back_us: int
    cause: FailureCause
    indices: range


def draw_failures(model: FailureModel, num_nodes: int, gpus_per_node: int, end_us: int, seed: int) -> list[DrawnFailure]:
    """The failures of so many nodes by a failure model, in order of time.

    Machines and racks are consecutive nodes, and have streams of random numbers of their own.
    """
    _refuse_count("GPUs of a node", gpus_per_node)
    end = _ms("the end", end_us)
    found: list[DrawnFailure] = []
    for scope, nodes in _nodes_together(model, gpus_per_node).items():
        causes = model.of_scope(scope)
        if not causes:
            continue
        expected = sum(one.per_gpu_day for one in causes) * gpus_per_node * num_nodes * end / _DAY_MS
        _refuse_too_many(num_nodes, round(expected * nodes), rejoin=1)
        for number, first in enumerate(range(0, num_nodes, nodes)):
            indices = range(first, min(first + nodes, num_nodes))
            draws = _uniforms(seed, _SCOPE_STREAMS[scope] + number)
            found += _failures_of_group(causes, indices, len(indices) * gpus_per_node, end, draws)
    return sorted(found, key=lambda failure: (failure.at_us, failure.indices.start))


def model_trace(model: FailureModel, nodes: Sequence[str], gpus_per_node: int, end_us: int, seed: int) -> Trace:
    """The trace of a failure model: nodes leave alone, with their machine or with their rack, and are back after repair.

    Failures of a node that is away already only lengthen its absence.
    """
    away: list[list[tuple[int, int, bool]]] = [[] for _ in nodes]
    for failure in draw_failures(model, len(nodes), gpus_per_node, end_us, seed):
        for index in failure.indices:
            outages = away[index]
            if outages and failure.at_us <= outages[-1][1]:
                start_us, back_us, hangs = outages[-1]
                outages[-1] = (start_us, max(back_us, failure.back_us), hangs)
            else:
                outages.append((failure.at_us, failure.back_us, failure.cause.hangs))
    changes = [
        change
        for node, outages in zip(nodes, away, strict=True)
        for at_us, back_us, hangs in outages
        for change in (Change(at_us, False, node, hangs), Change(back_us, True, node))
        if change.at_us < end_us // 1000 * 1000
    ]
    changes.sort(key=lambda change: change.at_us)
    return Trace((*(Change(0, True, node) for node in nodes), *changes), end_us // 1000 * 1000)


def _nodes_together(model: FailureModel, gpus_per_node: int) -> dict[FailureScope, int]:
    """How many consecutive nodes fail together."""
    gpus = {FailureScope.GPU: 1, FailureScope.MACHINE: model.gpus_per_machine, FailureScope.RACK: model.gpus_per_rack}
    return {scope: max(1, num // gpus_per_node) for scope, num in gpus.items()}


def _failures_of_group(
    causes: Sequence[FailureCause], indices: range, num_gpus: int, end: int, draws: Iterator[float]
) -> Iterator[DrawnFailure]:
    """The failures of nodes that fail together: after a repair, the time to the next one begins anew."""
    rate = sum(cause.per_gpu_day for cause in causes)
    mtbf = max(1, round(_DAY_MS / (rate * num_gpus)))
    at = _exponential_ms(draws, mtbf)
    while at < end:
        drawn, repair = next(draws) * rate, next(draws)
        cause = next((one for one in causes if (drawn := drawn - one.per_gpu_day) < 0), causes[-1])
        back = at + -(-cause.repair.draw_us(repair) // 1000)
        yield DrawnFailure(at * 1000, back * 1000, cause, indices)
        at = back + _exponential_ms(draws, mtbf)


def quiet_trace(nodes: Sequence[str], end_us: int) -> Trace:
    """A trace in which no node leaves."""
    return _trace(nodes, (), _ms("the end", end_us))


def slow_spells(nodes: Sequence[str], rate: SlowRate, end_us: int, seed: int, is_link: bool = False) -> tuple[Slowdown, ...]:
    """Times at which nodes, or their links, are slow: each begins and ends after exponential times, by itself."""
    mtbf, mean, end = _ms("the time between slowdowns", rate.mtbf_us), _ms("a slowdown", rate.time_us), _ms("the end", end_us)
    _refuse_too_many(len(nodes), len(nodes) * end // (mtbf + mean), 1)
    found = []
    for number, node in enumerate(nodes):
        draws = _uniforms(seed, (_LINK_STREAM if is_link else _SLOW_STREAM) + number)
        at = _exponential_ms(draws, mtbf)
        while at < end:
            until = at + _exponential_ms(draws, mean)
            found.append(Slowdown(at * 1000, until * 1000, node, rate.speed, is_link))
            at = until + _exponential_ms(draws, mtbf)
    return tuple(sorted(found, key=lambda slow: slow.start_us))


def drift_spells(nodes: Sequence[str], every_us: int, slowest: float, end_us: int, seed: int) -> tuple[Slowdown, ...]:
    """Speeds that drift: every `every_us` each node has a new one, any hundredth from `slowest` to 1."""
    every, end = _ms("the time between two drifts", every_us), _ms("the end", end_us)
    if not 0.01 <= slowest <= 1:
        raise UserError(f"the slowest speed of a drift is {slowest:g}, but it must be a number from 0.01 to 1")
    _refuse_too_many(len(nodes), len(nodes) * (end // every), 1)
    draws, steps = _uniforms(seed, _DRIFT_STREAM), round((1 - slowest) * 100)
    found = []
    for at in range(every, end, every):
        for node in nodes:
            speed = 1 - _draw_index(draws, steps + 1) / 100
            if speed < 1:
                found.append(Slowdown(at * 1000, (at + every) * 1000, node, speed))
    return tuple(found)


def _leaves_and_returns(draws: Iterator[float], mtbf: int, end: int, rejoin: int) -> Iterator[tuple[int, bool]]:
    at = _exponential_ms(draws, mtbf)
    while at < end:
        yield at, True
        if not rejoin:
            return
        yield at + rejoin, False
        at += rejoin + _exponential_ms(draws, mtbf)


def _group_changes(
    num_nodes: int,
    departures: Iterable[tuple[int, int]],
    when_back: Callable[[int, int], list[int]],
    draws: Iterator[float],
) -> Iterator[NodeChange]:
    """Yield the nodes that leave and return: at each of `departures` so many of the live nodes, but never all."""
    live, away = list(range(num_nodes)), list[tuple[int, int]]()
    for at, size in departures:
        while away and away[0][0] < at:
            live.append(heappop(away)[1])
        # A node that returns at this moment does not leave again, but may be the one that stays.
        num_free = len(live) if away and away[0][0] == at else len(live) - 1
        leaving = [_pop_random(live, draws) for _ in range(min(size, num_free))]
        yield from ((at, True, index) for index in leaving)
        for back, index in zip(when_back(at, len(leaving)), leaving, strict=False):
            heappush(away, (back, index))
            yield back, False, index
        if len(live) == 1 and not away:
            return


def _pop_random(live: list[int], draws: Iterator[float]) -> int:
    """Remove a random node in constant time: the last node takes its index."""
    index = _draw_index(draws, len(live))
    live[index], live[-1] = live[-1], live[index]
    return live.pop()


def _trace(nodes: Sequence[str], node_changes: Iterable[NodeChange], end: int) -> Trace:
    changes = [Change(0, True, node) for node in nodes]
    changes += (Change(at * 1000, not leaves, nodes[index]) for at, leaves, index in sorted(node_changes) if at < end)
    return Trace(tuple(changes), end * 1000)


def _uniforms(seed: int, stream: int = 0) -> Iterator[float]:
    """Random numbers in [0, 1); different streams of one seed are independent."""
    if seed < 0:
        raise UserError(f"the seed is {seed}, but it must be a whole number of at least 0")
    bits = PCG64(SeedSequence(seed, spawn_key=(stream,)))
    return ((bits.random_raw() >> 11) * 2.0**-53 for _ in itertools.count())


def _draw_index(draws: Iterator[float], num: int) -> int:
    return int(next(draws) * num)


def _exponential_ms(draws: Iterator[float], mean: int) -> int:
    """An exponential time, rounded up, so that no node leaves at the moment of joining."""
    return max(1, math.ceil(-mean * math.log1p(-next(draws))))


def _ms(what: str, time_us: int) -> int:
    if not 1000 <= time_us <= LONGEST_US:  # also refuses NaN
        shown = format_duration(time_us) if time_us >= 0 else f"{time_us} µs"
        raise UserError(f"{what} is {shown}, but it must be from 1 ms to 30 years")
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
    """Raise before a trace with far too many changes is generated."""
    count = num_nodes + (2 * num_failures if rejoin else min(num_failures, num_nodes))
    if count > MOST_CHANGES:
        raise UserError(
            f"the trace would have about {count:,} changes, more than the {MOST_CHANGES:,} that are allowed: "
            "take fewer nodes, a shorter time, or failures further apart"
        )
