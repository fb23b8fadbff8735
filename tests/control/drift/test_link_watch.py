"""Slow links are named with how long a message takes on them; late workers, clocks and jitter never make one look slow."""

import random

import pytest

from recycle.control.drift.link_watch import HOLD_LINKS, LinkWatch
from recycle.control.drift.message_times import LinkLag, MessageTimer
from recycle.control.drift.relative_links import LinkEstimate, WorkerPair, compare_links
from recycle.core.cluster import Worker

OP_US, LINK_US, NUM_MICROBATCHES = 20_000, 400, 4


class Links:
    """Workers of D pipelines and S stages, their messages in each iteration, and what is found by their reports.

    Each worker has a clock of its own, which is off by up to a day and drifts. A sender hands over its messages late by chance,
    and if it is one of `late`, by ten ops more. A receiver asks by chance before or after that. A message takes the time of its
    link, and `jitter_us` more on average.
    """

    def __init__(self, num_pipelines=3, num_stages=3, seed=0, jitter_us=0.0, late=()):
        self.chance, self.jitter_us, self.late = random.Random(seed), jitter_us, set(late)
        self.members = dict(enumerate(Worker(p, s) for p in range(num_pipelines) for s in range(num_stages)))
        self.pairs = [WorkerPair(Worker(p, s), Worker(p, s + 1)) for p in range(num_pipelines) for s in range(num_stages - 1)]
        self.offset_us = {worker: self.chance.randrange(-(10**11), 10**11) for worker in self.members.values()}
        self.drift = {worker: self.chance.uniform(-3e-5, 3e-5) for worker in self.members.values()}
        self.timers = {worker: MessageTimer(number + 1) for number, worker in self.members.items()}
        self.watch, self.iteration, self.slow_us = LinkWatch(), 0, {}
        assert list(self.watch.start_epoch(self.members, 0)) == []

    def clock_us(self, worker, now_us):
        return round(self.offset_us[worker] + now_us * (1 + self.drift[worker]))

    def send(self, sender, receiver, begin_us, way_us):
        sent_us = begin_us + self.chance.uniform(0, OP_US) + (10 * OP_US if sender in self.late else 0)
        asked_us = begin_us + self.chance.uniform(-1, 1) * OP_US
        way_us += self.chance.expovariate(1 / self.jitter_us) if self.jitter_us else 0
        stamp = self.timers[sender].stamp(receiver, self.clock_us(sender, sent_us))
        received_us = max(asked_us, sent_us + way_us)
        times_us = self.clock_us(receiver, asked_us), self.clock_us(receiver, received_us)
        self.timers[receiver].received(sender, stamp, *times_us)

    def iterate(self, num):
        """Run iterations; return the links whose speed changes."""
        changes = []
        for _ in range(num):
            begin_us = 2_000_000.0 * self.iteration
            for pair in self.pairs:
                for number in range(NUM_MICROBATCHES):
                    way_us = self.slow_us.get(pair, LINK_US)
                    self.send(*pair, begin_us + 4 * OP_US * number, way_us)
                    self.send(*reversed(pair), begin_us + 4 * OP_US * number + 2 * OP_US, way_us)
            lags = {number: self.timers[worker].take() for number, worker in self.members.items()}
            changes += self.watch.add(self.iteration, lags, [{"F": (NUM_MICROBATCHES, OP_US)}])
            self.iteration += 1
        return changes


SLOW = WorkerPair(Worker(1, 1), Worker(1, 2))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("factor", [6, 50])
def test_a_slow_link_is_named_with_the_time_of_its_messages_and_since_when(seed, factor):
    links = Links(seed=seed, jitter_us=50)
    assert links.iterate(6) == []
    links.slow_us[SLOW] = factor * LINK_US
    (change,) = links.iterate(HOLD_LINKS + 3)
    assert (change.pair, change.since) == (SLOW, 6)
    assert change.time_us == pytest.approx(factor * LINK_US, rel=0.15)
    assert change.usual_us == pytest.approx(LINK_US, rel=0.3)
    assert change.speed == pytest.approx(1 / factor, rel=0.25, abs=0.006)
    assert list(links.watch.slow.values()) == [change]


def test_a_link_that_is_itself_again_is_named_again():
    links = Links()
    links.slow_us[SLOW] = 20 * LINK_US
    links.iterate(HOLD_LINKS + 2)
    links.slow_us.clear()
    (change,) = links.iterate(3 * HOLD_LINKS)
    assert (change.pair, change.speed) == (SLOW, 1)
    assert links.watch.slow == {}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("jitter_us", [0, 300, 3_000, 30_000])
def test_healthy_links_are_never_named_whatever_the_jitter_and_whoever_is_late(seed, jitter_us):
    links = Links(3, 3, seed, jitter_us, late=[Worker(1, 1), Worker(2, 0)])
    assert links.iterate(100) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_is_found_beside_late_workers(seed):
    links = Links(seed=seed, jitter_us=300, late=[Worker(1, 1), Worker(0, 2)])
    links.slow_us[SLOW] = 20_000
    assert {change.pair for change in links.iterate(20)} == {SLOW}


def test_a_difference_that_nobody_would_notice_is_not_named():
    links = Links()
    links.slow_us[SLOW] = LINK_US + OP_US // 25
    assert links.iterate(40) == []


def test_if_all_links_of_a_boundary_become_slow_nobody_is():
    links = Links()
    links.iterate(5)
    links.slow_us.update((pair, 50_000) for pair in links.pairs if pair.first.stage == 1)
    assert links.iterate(30) == []


def test_the_only_link_of_a_boundary_is_named_when_it_becomes_slow():
    links = Links(num_pipelines=1, num_stages=4)
    assert links.iterate(12) == []
    slow = WorkerPair(Worker(0, 1), Worker(0, 2))
    links.slow_us[slow] = 40_000
    assert [change.pair for change in links.iterate(20)] == [slow]


def test_members_take_their_links_along_and_those_that_are_gone_are_forgotten():
    links = Links()
    links.slow_us[SLOW] = 20 * LINK_US
    links.iterate(HOLD_LINKS + 2)
    exchanged = {**links.members, 4: Worker(0, 1), 1: Worker(1, 1)}
    well, slow = links.watch.start_epoch(exchanged, 30)
    moved = WorkerPair(Worker(0, 1), Worker(1, 2))
    assert (well.pair, well.speed, well.since) == (SLOW, 1.0, 30)
    assert (slow.pair, slow.speed < 0.1, slow.since) == (moved, True, 30)
    assert [change.pair for change in links.watch.slow.values()] == [moved]
    left = {number: place for number, place in exchanged.items() if number != 4}
    assert list(links.watch.start_epoch(left, 40)) == []  # nobody is there to have that link
    assert links.watch.slow == {}


def test_a_worker_that_is_not_in_the_epoch_is_left_out():
    watch = LinkWatch()
    assert list(watch.start_epoch({0: Worker(0, 0), 1: Worker(0, 1)}, 0)) == []
    lags = {0: {"W7_1": LinkLag(1, 500, True)}, 1: {"W0_0": LinkLag(1, 500, True)}}
    assert list(watch.add(0, lags, [])) == []


def test_links_are_compared_with_those_of_their_boundary_and_a_lone_one_with_all():
    times_us = {WorkerPair(Worker(p, 0), Worker(p, 1)): time_us for p, time_us in enumerate([300.0, 900.0, 1200.0])}
    lone = WorkerPair(Worker(0, 1), Worker(0, 2))
    compared = compare_links({**times_us, lone: 600.0})
    assert [compared[pair] for pair in times_us] == [LinkEstimate(time_us, 900.0) for time_us in times_us.values()]
    assert compared[lone] == LinkEstimate(600.0, 600.0, is_lone=True)
    (first, second, _) = times_us
    assert compare_links({first: 300.0, second: 900.0})[second] == LinkEstimate(900.0, 300.0)


def test_a_pair_prints_itself_as_users_write_it():
    assert str(SLOW) == "W1_1-W1_2"
