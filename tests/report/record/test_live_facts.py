"""The numbers of a run after each of its events."""

from functools import reduce

from recycle.core.events.record import (
    Changed,
    Event,
    Held,
    LinkChanged,
    OpRan,
    Placed,
    Recovered,
    Saved,
    SpeedChanged,
    Spell,
    Started,
    Stepped,
    Warned,
)
from recycle.report.record.live_facts import RunFacts, facts_after

SECOND = 1_000_000
RUN: list[Event] = [
    Started("train", "8-layer GPT"),
    OpRan(0, "W0_0", "0F0@0", 0, 5),
    Stepped(0, 2 * SECOND, 5.5, 1.25, 1.0),
    Spell(0, 2 * SECOND, "train", samples=36, busy_us=SECOND, num_live=12),
    Stepped(1, 5 * SECOND // 2, None, None, None),
    Spell(2 * SECOND, 5 * SECOND // 2, "train", samples=36, num_live=12),
    Changed(5 * SECOND // 2, "W1_2", False, 11),
    Spell(5 * SECOND // 2, 3 * SECOND, "pause", "regroup"),
    Spell(3 * SECOND, 4 * SECOND, "redo", discarded=7),
    Held("W0_0", 1000, 600, 500),
    Held("W0_1", 2000, 700, 650),
    Held("W0_0", 1500, 600, 500),
    Saved(4 * SECOND, 2, "runs/a", 123456),
    Warned(4 * SECOND, "the loss is not finite"),
    Stepped(2, 5 * SECOND, 4.75, 0.5, 0.25),
    Spell(4 * SECOND, 5 * SECOND, "train", samples=36, num_live=11),
    Placed(5 * SECOND, "W0_0", "node1", 7),
]


def after(events: list[Event]) -> RunFacts:
    return reduce(facts_after, events, RunFacts())


def test_every_kind_of_event_changes_its_numbers() -> None:
    facts = after(RUN)
    assert facts.step == RUN[14]
    assert (facts.iteration_us, facts.samples_per_s, facts.num_live) == (5 * SECOND // 2, 36, 11)
    assert (facts.num_samples, facts.num_discarded, facts.num_skipped, facts.num_warnings) == (108, 7, 1, 1)
    assert facts.checkpoint == RUN[12]
    assert facts.held == {"W0_0": RUN[11], "W0_1": RUN[10]}
    assert facts.state_us == {"train": 7 * SECOND // 2, "pause": SECOND // 2, "redo": SECOND}
    assert (facts.hosts, facts.is_up) == ({"W0_0": "node1"}, {"W1_2": False, "W0_0": True})


def test_a_recovery_says_who_is_up() -> None:
    lost = Recovered(0, 1, 2, ("W1_2",), False, "its connection closed", 3, moves=("W0_1>W1_2",))
    joined = Recovered(2, 3, 3, ("W0_1",), True, "it asked to join", 4)
    assert after([lost]).is_up == {"W0_1": False, "W1_2": True}
    loading = Placed(2, "W0_1", "node2", 8)
    assert after([lost, loading]).is_up == {"W0_1": False, "W1_2": True}
    assert after([lost, joined]).is_up == {"W0_1": True, "W1_2": True}


def test_the_speed_of_a_worker_is_known_until_it_is_gone() -> None:
    slow = SpeedChanged(5, "W1_2", 0.6, 4)
    assert after([slow]).speeds == {"W1_2": 0.6}
    assert after([slow, SpeedChanged(9, "W1_2", 0.3, 7)]).speeds == {"W1_2": 0.3}
    assert after([slow, Changed(9, "W1_2", False, 11)]).speeds == {}


def test_a_slow_link_is_known_until_it_is_itself_again_or_an_end_is_gone() -> None:
    slow = LinkChanged(5, "W1_1-W1_2", 0.05, 4, 20_000, 1_000)
    assert after([slow]).slow_links == {"W1_1-W1_2": slow}
    well = LinkChanged(9, "W1_1-W1_2", 1.0, 7, 1_000, 1_000)
    assert after([slow, well]).slow_links == {}
    assert after([slow, well]).links == {"W1_1-W1_2": well}
    assert after([slow, Changed(9, "W1_1", False, 11)]).links == after([slow, Changed(9, "W1_2", False, 11)]).links == {}
    assert after([slow, Changed(9, "W1_0", False, 11)]).links == {"W1_1-W1_2": slow}


def test_a_number_that_no_event_contains_is_not_known() -> None:
    facts = after(RUN[:4])
    assert (facts.iteration_us, facts.checkpoint, facts.held) == (None, None, {})
    assert facts.samples_per_s == 18
    nothing = after([])
    assert (nothing.step, nothing.samples_per_s, nothing.num_live) == (None, None, None)


def test_recoveries_are_counted_and_their_cost_part_by_part() -> None:
    left = Recovered(0, 9, 1, ("W1_2",), False, "silent for 2.0 s", 4, detect_us=2 * SECOND, regroup_us=SECOND // 2, num_live=11)
    joined = Recovered(0, 9, 2, ("W1_2",), True, "it asked to join", 8, regroup_us=SECOND // 4, transfer_us=SECOND, num_live=12)
    assert after([left]).num_live == 11
    facts = after([left, joined])
    assert (facts.num_recoveries, facts.num_live) == (2, 12)
    assert facts.lost_us == {
        "detect": 2 * SECOND,
        "abort": 0,
        "plan": 0,
        "regroup": 3 * SECOND // 4,
        "transfer": SECOND,
        "redo": 0,
    }


def test_samples_of_steps_that_a_checkpoint_threw_away_are_counted_once_and_no_counter_falls() -> None:
    def done(*iterations: int) -> list[Event]:
        return [event for n in iterations for event in (Spell(n, n + 1, "train", samples=36), Stepped(n, n + 1, 5.0, 1.0, 1.0))]

    back = Recovered(5, 9, 2, ("W0_1", "W1_1"), False, "its connection closed", 2)
    run = [*done(0, 1, 2, 3, 4), back, *done(2, 3), back, *done(2, 3, 4, 5)]
    counts = [after(run[:length]).num_samples for length in range(len(run) + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == 6 * 36
    assert after(run).num_discarded == 5 * 36


def test_an_iteration_time_is_that_of_neighbours_only() -> None:
    resumed: list[Event] = [Stepped(4, SECOND, 1.0, 1.0, 1.0), Stepped(9, 2 * SECOND, 1.0, 1.0, 1.0)]
    assert after(resumed).iteration_us is None
    assert after([*resumed, Stepped(10, 5 * SECOND, 1.0, 1.0, 1.0)]).iteration_us == 3 * SECOND


def test_a_pause_changes_neither_throughput_nor_live_workers_nor_samples() -> None:
    before, later = after(RUN[:7]), after(RUN[:9])
    assert (later.samples_per_s, later.num_live, later.num_samples) == (before.samples_per_s, before.num_live, before.num_samples)


def test_live_workers_are_known_before_the_first_step() -> None:
    assert after([Spell(0, SECOND, "pause", "start", num_live=12)]).num_live == 12
