"""Generated traces: which nodes leave, how often, together with which others, and when they return."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.errors import UserError
from recycle.core.events.trace import Trace, live_counts
from recycle.sim.failure_traces import (
    PUBLISHED_SLOW,
    PUBLISHED_SLOW_LINKS,
    SlowRate,
    burst_trace,
    drift_spells,
    node_names,
    periodic_trace,
    poisson_trace,
    quiet_trace,
    rack_trace,
    slow_spells,
    worker_names,
)

MS, S, MIN, H, D = 1000, 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6
NODES = worker_names(4, 8)
# Each kind with the same few arguments: nodes, time between failures, end, seed, time to rejoin.
KINDS = {
    "every": periodic_trace,
    "poisson": poisson_trace,
    "bursts": lambda nodes, time_us, *rest: burst_trace(nodes, max(1, len(nodes) // 4), time_us, *rest),
    "racks": lambda nodes, time_us, *rest: rack_trace(nodes, max(1, len(nodes) // 4), time_us, *rest),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
arguments = given(
    num_nodes=st.integers(1, 20),
    time_us=st.integers(10 * S, 10 * H),
    end_us=st.integers(S, 20 * H),
    seed=st.integers(0, 2**70),
    rejoin_us=st.none() | st.integers(5 * MIN, 10 * H),
)


def absences(trace: Trace) -> dict[str, list[tuple[int, int | None]]]:
    """When each node left and when it was back, None where it was not."""
    found = defaultdict(list)
    for change in trace.later:
        if change.joins:
            found[change.node][-1] = (found[change.node][-1][0], change.at_us)
        else:
            found[change.node].append((change.at_us, None))
    return found


def departures(trace: Trace) -> dict[int, set[str]]:
    """Who left, by time."""
    found = defaultdict(set)
    for change in trace.later:
        if not change.joins:
            found[change.at_us].add(change.node)
    return found


def test_the_nodes_of_a_cluster_are_its_workers_in_the_order_of_the_shape():
    assert worker_names(2, 3) == ("W0_0", "W0_1", "W0_2", "W1_0", "W1_1", "W1_2")
    assert node_names(3) == ("node0", "node1", "node2")


@each_kind
@arguments
@settings(max_examples=40, deadline=None)
def test_a_trace_has_all_nodes_at_the_start_and_whole_milliseconds_before_its_end(
    kind, num_nodes, time_us, end_us, seed, rejoin_us
):
    nodes = node_names(num_nodes)
    trace = kind(nodes, time_us, end_us, seed, rejoin_us)
    assert trace.initial == nodes
    assert trace.end_us == end_us // MS * MS
    assert all(change.at_us % MS == 0 and 0 < change.at_us < end_us for change in trace.later)
    assert Trace.parse(trace.dumps()) == trace


@each_kind
@arguments
@settings(max_examples=40, deadline=None)
def test_a_longer_trace_begins_like_a_shorter_one(kind, num_nodes, time_us, end_us, seed, rejoin_us):
    nodes = node_names(num_nodes)
    short, long = (kind(nodes, time_us, length_us, seed, rejoin_us) for length_us in (end_us, 2 * end_us))
    assert short.later == tuple(change for change in long.later if change.at_us < short.end_us)


@each_kind
@arguments
@settings(max_examples=40, deadline=None)
def test_no_node_leaves_at_the_moment_at_which_it_comes_back(kind, num_nodes, time_us, end_us, seed, rejoin_us):
    trace = kind(node_names(num_nodes), time_us, end_us, seed, rejoin_us)
    for spans in absences(trace).values():
        assert all(back < left for (_, back), (left, _) in pairwise(spans))


@each_kind
def test_a_seed_means_one_trace_and_another_seed_another(kind):
    texts = [kind(NODES, H, 12 * H, seed, H).dumps() for seed in (1, 1, 2, 2**64 + 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@each_kind
def test_without_a_rejoin_nobody_comes_back(kind):
    trace = kind(NODES, 10 * MIN, 5 * D, 3)
    assert not any(change.joins for change in trace.later)
    assert all(len(spans) == 1 for spans in absences(trace).values())


@pytest.mark.parametrize("kind", ["every", "poisson", "racks"])
@given(rejoin_us=st.integers(1, 600).map(lambda minutes: minutes * MIN), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_a_node_is_away_for_exactly_the_time_to_rejoin(kind, rejoin_us, seed):
    trace = KINDS[kind](NODES, 30 * MIN, D, seed, rejoin_us)
    spans = [span for spans in absences(trace).values() for span in spans]
    assert all(back == left + rejoin_us for left, back in spans if back is not None)
    assert all(left + rejoin_us >= D for left, back in spans if back is None)


def test_every_is_one_departure_at_each_interval_before_the_end():
    trace = periodic_trace(NODES, 30 * MIN, 6 * H, 1)
    assert [change.at_us for change in trace.later] == [number * 30 * MIN for number in range(1, 12)]
    assert len({change.node for change in trace.later}) == 11


def test_every_stops_when_one_node_is_left():
    trace = periodic_trace(node_names(5), MIN, D, 1)
    assert list(live_counts(trace)) == [(0, 5), (MIN, 4), (2 * MIN, 3), (3 * MIN, 2), (4 * MIN, 1)]


def test_every_waits_for_a_return_when_one_node_is_left():
    trace = periodic_trace(node_names(2), 10 * MIN, 65 * MIN, 1, rejoin_us=25 * MIN)
    assert [(change.at_us // MIN, change.joins) for change in trace.later] == [(10, False), (35, True), (40, False)]
    # Where one leaves as the other comes back, there is always one.
    swapping = periodic_trace(node_names(2), 10 * MIN, 65 * MIN, 1, rejoin_us=10 * MIN)
    assert [count for _, count in live_counts(swapping)] == [2, 1, 1, 1, 1, 1, 1]
    left = [change.node for change in swapping.later if not change.joins]
    assert all(before != after for before, after in pairwise(left))


def test_every_chooses_all_nodes_alike():
    chosen = Counter(
        change.node for change in periodic_trace(node_names(8), MIN, 8001 * MIN, 5, 30 * S).later if not change.joins
    )
    assert sum(chosen.values()) == 8000
    # 1000 each is expected, with a deviation of 30.
    assert all(880 < count < 1120 for count in chosen.values())


def test_poisson_failures_come_as_often_as_their_mean_says():
    num_failures = poisson_trace(node_names(2000), 10 * H, 5 * H, 11).num_failures
    expected, spread = 2000 * (1 - math.exp(-0.5)), math.sqrt(2000 * (1 - math.exp(-0.5)) * math.exp(-0.5))
    assert abs(num_failures - expected) < 4 * spread


def test_poisson_lives_are_exponential():
    spans = absences(poisson_trace(node_names(200), 10 * H, 2000 * H, 4, MIN))
    lives = [left - back for node in spans.values() for (_, back), (left, _) in pairwise(node)]
    assert len(lives) > 30_000
    assert sum(lives) / len(lives) == pytest.approx(10 * H, rel=0.02)
    for num_means in (0.1, 0.5, 1, 2, 3):
        share = sum(life > num_means * 10 * H for life in lives) / len(lives)
        assert share == pytest.approx(math.exp(-num_means), abs=0.01)


@given(st.integers(1, 12), st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_what_happens_to_a_node_does_not_depend_on_how_many_others_there_are(num_nodes, seed):
    few, many = (absences(poisson_trace(node_names(num), 3 * H, D, seed, H)) for num in (num_nodes, num_nodes + 5))
    assert all(few[node] == many[node] for node in node_names(num_nodes))


def test_poisson_is_racks_of_one():
    assert poisson_trace(NODES, H, D, 9, H) == rack_trace(NODES, 1, H, D, 9, H)


def test_a_rack_leaves_and_returns_as_one():
    trace = rack_trace(node_names(10), 4, 6 * H, 30 * D, 2, H)
    spans = absences(trace)
    rows = [[f"node{number}" for number in row] for row in (range(4), range(4, 8), range(8, 10))]
    assert all(spans[node] == spans[row[0]] for row in rows for node in row)
    assert len({tuple(spans[row[0]]) for row in rows}) == 3
    assert all(len(spans[row[0]]) > 50 for row in rows)


def test_bursts_take_up_to_the_most_at_random_times_and_leave_one():
    trace = burst_trace(NODES, 8, 2 * H, 200 * D, 6, 5 * MIN)
    sizes = Counter(len(group) for group in departures(trace).values())
    assert set(sizes) == set(range(1, 9))
    # 2400 bursts are expected, with a deviation of 49, and each size in an eighth of them.
    assert abs(sum(sizes.values()) - 2400) < 200
    assert all(abs(sizes[size] - 300) < 80 for size in range(1, 8))
    assert min(count for _, count in live_counts(burst_trace(NODES, 32, MIN, D, 6, H))) == 1


def test_a_burst_comes_back_a_few_at_a_time():
    trace = burst_trace(NODES, 32, 30 * D, 365 * D, 8, 10 * MIN)
    spans = absences(trace)
    for left_us, group in departures(trace).items():
        away = [dict(spans[node])[left_us] - left_us for node in group]
        assert all(time_us % (10 * MIN) == 0 for time_us in away)
        assert max(Counter(away).values()) <= 4
        assert sorted(set(away)) == [number * 10 * MIN for number in range(1, len(set(away)) + 1)]


def test_traces_of_a_seed_never_change():
    """Held as text: another machine or another numpy must make the same."""
    nodes = node_names(6)
    assert departures_text(periodic_trace(nodes, H, 4 * H, 1)) == "3600000,4 7200000,0 10800000,2"
    assert departures_text(poisson_trace(nodes, 10 * H, 4 * H, 1)) == "4362446,3 9557566,2 11975208,5"
    assert departures_text(burst_trace(nodes, 3, 2 * H, 4 * H, 1)) == "8645471,3 11424385,4 12602994,0 12602994,1 12602994,5"
    assert departures_text(rack_trace(nodes, 2, 8 * H, 4 * H, 1)) == "7646053,4 7646053,5"


def departures_text(trace: Trace) -> str:
    """Who leaves when: milliseconds and the number of the node."""
    return " ".join(f"{change.at_us // MS},{change.node[-1]}" for change in trace.later)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: periodic_trace(NODES, 0, H, 1), "the interval is 0 s, but it must be from 1 ms to 30 years"),
        (lambda: periodic_trace(NODES, -MIN, H, 1), "the interval is -60000000 µs, but it must be from 1 ms"),
        (lambda: periodic_trace(NODES, 999, H, 1), "the interval is 999 µs, but it must be from 1 ms"),
        (lambda: periodic_trace(NODES, math.nan, H, 1), "the interval is nan µs, but it must be from 1 ms"),
        (lambda: burst_trace(NODES, 4, 0, H, 1), "the interval is 0 s"),
        (lambda: poisson_trace(NODES, 0, H, 1), "the mean time between failures is 0 s"),
        (lambda: poisson_trace(NODES, math.inf, H, 1), "the mean time between failures is"),
        (lambda: rack_trace(NODES, 4, 0, H, 1), "the mean time between failures is 0 s"),
        (lambda: periodic_trace(NODES, MIN, 0, 1), "the end is 0 s"),
        (lambda: periodic_trace(NODES, MIN, 10**16, 1), r"the end is 115,740\.7 d, but it must be from 1 ms to 30 years"),
        (lambda: periodic_trace(NODES, MIN, H, 1, 0), "the time to rejoin is 0 s"),
        (lambda: periodic_trace(NODES, MIN, H, -1), "the seed is -1, but it must be a whole number of at least 0"),
        (lambda: poisson_trace(NODES, MIN, H, -1), "the seed is -1"),
        (
            lambda: rack_trace(NODES, 33, H, D, 1),
            "a rack of 33 nodes is not possible: there are 32, so give a number from 1 to 32",
        ),
        (lambda: rack_trace(NODES, 0, H, D, 1), "a rack of 0 nodes is not possible"),
        (lambda: burst_trace(NODES, 33, H, D, 1), "a burst of 33 nodes is not possible"),
        (lambda: burst_trace(NODES, 0, H, D, 1), "a burst of 0 nodes is not possible"),
        (lambda: periodic_trace((), MIN, H, 1), "the trace has no node: give"),
        (lambda: periodic_trace(("a", "a"), MIN, H, 1), "a is added, but it is there already"),
        (lambda: worker_names(0, 4), "the number of pipelines is 0, but it must be a whole number of at least 1"),
        (lambda: worker_names(4, -1), "the number of stages is -1"),
        (lambda: node_names(0), "the number of nodes is 0"),
        (lambda: worker_names(10**9, 10**9), "would have about 1,000,000,000,000,000,000 changes, more than the 1,000,000"),
        (lambda: node_names(10**12), "would have about 1,000,000,000,000 changes"),
        (
            lambda: periodic_trace(NODES, MS, D, 1, H),
            "would have about 172,800,030 changes, more than the 1,000,000 that are allowed",
        ),
        (lambda: poisson_trace(NODES, S, 365 * D, 1, S), "would have about 1,009,152,032 changes"),
        (lambda: burst_trace(NODES, 9, MS, D, 1, MS), "would have about 864,000,022 changes"),
    ],
)
def test_numbers_that_make_no_trace_are_refused_before_any_work(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


def test_a_failure_each_millisecond_is_no_work_when_nobody_comes_back():
    assert periodic_trace(NODES, MS, 10_000 * D, 1).num_failures == 31
    assert burst_trace(NODES, 4, MS, 10_000 * D, 1).num_failures == 31
    assert poisson_trace(NODES, MS, 10_000 * D, 1).num_failures == 32


# Slow nodes


def test_nodes_are_slow_as_often_and_as_long_as_asked():
    rate = SlowRate(10 * H, 30 * MIN, 0.6)
    found = slow_spells(node_names(500), rate, 100 * H, seed=3)
    # A node begins to be slow every 10 h and 30 min, the end of the trace cuts nothing off.
    assert len(found) == pytest.approx(500 * 100 / 10.5, rel=0.03)
    lengths = [slow.end_us - slow.start_us for slow in found]
    assert sum(lengths) / len(lengths) == pytest.approx(30 * MIN, rel=0.03)
    assert {slow.speed for slow in found} == {0.6}
    assert not any(slow.is_link for slow in found)
    assert [slow.start_us for slow in found] == sorted(slow.start_us for slow in found)


def test_a_node_is_not_slow_twice_at_a_time():
    found = slow_spells(node_names(20), SlowRate(H, H, 0.5), 50 * H, seed=1)
    for node in node_names(20):
        own = [slow for slow in found if slow.node == node]
        assert all(before.end_us < after.start_us for before, after in pairwise(own))


def test_the_published_rates_give_the_published_shares():
    """In an hour computation is slow on 2 % of single nodes, and a link on about 40 % of groups of four nodes."""
    nodes = node_names(4000)
    slow = {one.node for one in slow_spells(nodes, PUBLISHED_SLOW, H, seed=1)}
    links = {one.node for one in slow_spells(nodes, PUBLISHED_SLOW_LINKS, H, seed=1, is_link=True)}
    assert len(slow) / 4000 == pytest.approx(0.02, abs=0.006)
    groups = sum(any(node in links for node in nodes[first : first + 4]) for first in range(0, 4000, 4))
    assert groups / 1000 == pytest.approx(0.4, abs=0.1)
    assert (PUBLISHED_SLOW.time_us, PUBLISHED_SLOW_LINKS.time_us) == (10 * MIN, 24 * MIN)


def test_slow_nodes_of_a_seed_are_the_same_again_and_do_not_depend_on_how_many_nodes_there_are():
    rate = SlowRate(5 * H, H, 0.7)
    few, many = (slow_spells(node_names(num), rate, 50 * H, seed=9) for num in (3, 8))
    assert slow_spells(node_names(3), rate, 50 * H, seed=9) == few
    assert tuple(slow for slow in many if slow.node in node_names(3)) == few
    assert slow_spells(node_names(3), rate, 50 * H, seed=10) != few


def test_speeds_drift_between_the_slowest_and_1():
    found = drift_spells(node_names(50), H, 0.9, 10 * H, seed=1)
    assert {slow.end_us - slow.start_us for slow in found} == {H}
    speeds = {slow.speed for slow in found}
    assert min(speeds) == 0.9
    assert max(speeds) == 0.99  # those at full speed are left out
    with pytest.raises(UserError, match="slowest speed of a drift is 0"):
        drift_spells(node_names(5), H, 0.0, 10 * H, seed=1)


def test_a_quiet_trace_has_all_nodes_from_start_to_end():
    trace = quiet_trace(node_names(3), H)
    assert trace.initial == node_names(3)
    assert trace.later == ()
    assert trace.end_us == H
