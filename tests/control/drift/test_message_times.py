"""Times of messages: neither clocks that differ, nor a sender or receiver that is late, change what is measured of a link."""

import random

from hypothesis import given
from hypothesis import strategies as st

from recycle.control.drift.message_times import UNKNOWN_LAG_US, LinkLag, MessageStamp, MessageTimer
from recycle.control.drift.relative_links import WorkerPair, message_times_us
from recycle.core.cluster import Worker

LOWER, UPPER = Worker(0, 0), Worker(0, 1)
PAIR = WorkerPair(LOWER, UPPER)


class TwoWorkers:
    """Two workers that send to each other, in true time; each reads a clock that is off by its own offset.

    A receive ends when the message is there, or at once if it was there before. By sender, `ways_us` has the true times on the
    way of messages that came while their receiver waited, and `waited_us` of those for which it waited when they were sent.
    """

    def __init__(self, offsets_us=(0, 0), clocks=(1, 2)):
        self.offset_us = dict(zip(PAIR, offsets_us, strict=True))
        self.timers = {worker: MessageTimer(clock) for worker, clock in zip(PAIR, clocks, strict=True)}
        self.ways_us, self.waited_us = {LOWER: [], UPPER: []}, {LOWER: [], UPPER: []}

    def message(self, sender, sent_us, asked_us, way_us):
        """Let the other worker ask for a message at `asked_us` that is on its way for `way_us` from `sent_us` on."""
        receiver = UPPER if sender == LOWER else LOWER
        stamp = self.timers[sender].stamp(receiver, sent_us + self.offset_us[sender])
        received_us, offset_us = max(asked_us, sent_us + way_us), self.offset_us[receiver]
        self.timers[receiver].received(sender, stamp, asked_us + offset_us, received_us + offset_us)
        if asked_us <= sent_us + way_us:
            self.ways_us[sender].append(way_us)
        if asked_us <= sent_us:
            self.waited_us[sender].append(way_us)

    def take(self):
        return {worker: timer.take() for worker, timer in self.timers.items()}

    def time_us(self):
        return message_times_us(self.take()).get(PAIR)


moments = st.integers(0, 10**6)
messages = st.lists(st.tuples(st.sampled_from(PAIR), moments, moments, st.integers(0, 10**5)), max_size=40)
offsets = st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))


@given(messages, offsets)
def test_whatever_the_clocks_and_whoever_is_late_only_the_way_of_a_message_counts(sent, offsets_us):
    """Each lag that counts is that of a message that came while its receiver waited, and the difference of clocks, if any."""
    world = TwoWorkers(offsets_us)
    for each in sent:
        world.message(*each)
    ahead_us = offsets_us[1] - offsets_us[0]
    for receiver, lags in world.take().items():
        for lag in lags.values():
            sender, difference_us = (LOWER, ahead_us) if receiver == UPPER else (UPPER, -ahead_us)
            assert lag.num <= len(world.ways_us[sender])
            assert lag.least_us - difference_us in world.ways_us[sender]
            assert not lag.is_one_clock


@given(messages, st.integers(-(10**12), 10**12))
def test_with_one_clock_every_message_counts_that_its_receiver_was_waiting_for(sent, offset_us):
    world = TwoWorkers((offset_us, offset_us), (7, 7))
    for each in sent:
        world.message(*each)
    lags = world.take()
    for sender, receiver in ((LOWER, UPPER), (UPPER, LOWER)):
        ways_us = world.waited_us[sender]
        expected = {str(sender): LinkLag(len(ways_us), min(ways_us), True)} if ways_us else {}
        assert lags[receiver] == expected


def test_a_late_sender_changes_nothing_and_a_late_receiver_is_not_asked():
    world = TwoWorkers((0, 3_600_000_000))
    for number in range(8):
        begin_us = 100_000 * number
        world.message(LOWER, begin_us + 50_000, begin_us, 300)  # the receiver waits for 50 ms
        world.message(UPPER, begin_us + 60_000, begin_us + 59_000, 500)
        world.message(UPPER, begin_us + 60_000, begin_us + 90_000, 500)  # and this one is 30 ms late
    assert world.time_us() == 400


def test_clocks_that_differ_by_hours_show_the_time_of_both_ways_from_the_second_message_on():
    world = TwoWorkers((-7_200_000_000, 5_000_000_000))
    world.message(LOWER, 1_000, 0, 250)  # nothing is known of the other clock yet
    assert world.time_us() is None
    for number in range(1, 4):
        world.message(UPPER, 10_000 * number, 0, 150)
        world.message(LOWER, 10_000 * number + 5_000, 0, 250)
    assert world.time_us() == 200


def test_what_is_known_of_a_clock_is_forgotten_with_the_iteration_after_the_next():
    """Clocks drift: the least lag of long ago says nothing of now."""
    timer = MessageTimer(1)
    timer.received(LOWER, MessageStamp(100, 2), 0, 150)
    assert timer.stamp(LOWER, 0).least_lag_us == 50
    timer.take()
    assert timer.stamp(LOWER, 0).least_lag_us == 50
    timer.take()
    assert timer.stamp(LOWER, 0).least_lag_us == UNKNOWN_LAG_US


def test_a_new_epoch_knows_nothing_of_the_last_one():
    timer = MessageTimer(1)
    timer.received(LOWER, MessageStamp(100, 1), 0, 150)
    timer.reset()
    assert timer.take() == {}
    assert timer.stamp(LOWER, 0) == MessageStamp(0, 1)


def test_clocks_that_nobody_knows_to_be_one_are_two():
    timer = MessageTimer(0)
    timer.received(LOWER, MessageStamp(100, 0), 0, 150)
    assert timer.take() == {}


def test_with_two_clocks_one_way_is_not_enough():
    lag = LinkLag(3, 700, False)
    assert message_times_us({UPPER: {"W0_0": lag}}) == {}
    assert message_times_us({UPPER: {"W0_0": lag}, LOWER: {"W0_1": LinkLag(1, -300, False)}}) == {PAIR: 200}
    assert message_times_us({UPPER: {"W0_0": LinkLag(3, 700, True)}}) == {PAIR: 700}


def test_jitter_leaves_the_fastest_message():
    chance, world = random.Random(3), TwoWorkers((12_345, -9_876))
    for number in range(20):
        begin_us = 200_000 * number
        world.message(UPPER, begin_us, begin_us - 50_000, 400 + round(chance.expovariate(1 / 2_000)))
        world.message(LOWER, begin_us, begin_us - 50_000, 400 + round(chance.expovariate(1 / 2_000)))
    assert 400 <= world.time_us() <= 700
