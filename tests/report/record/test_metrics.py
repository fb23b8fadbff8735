"""The metrics of a run, from its record alone."""

import doctest

import pytest

from recycle.core.events.record import Changed, OpRan, Spell
from recycle.report.record import metrics
from recycle.report.record.metrics import measure, throughput_over_time

SECOND = 1_000_000
RECORD = [
    Changed(10 * SECOND, "W0_0", False, 3),
    Changed(15 * SECOND, "W0_0", True, 4),
    Spell(0, 8 * SECOND, "train", samples=80, busy_us=6 * SECOND, num_live=4),
    Spell(8 * SECOND, 10 * SECOND, "redo", "step in flight", discarded=7),
    Spell(10 * SECOND, 11 * SECOND, "pause", "detect"),
    Spell(11 * SECOND, 14 * SECOND, "pause", "regroup"),
    Spell(14 * SECOND, 18 * SECOND, "train", samples=20, busy_us=4 * SECOND, num_live=3),
    Spell(18 * SECOND, 19 * SECOND, "redo", "dropped", discarded=5),
    Spell(19 * SECOND, 20 * SECOND, "checkpoint"),
    Spell(20 * SECOND, 25 * SECOND, "down", "no worker is left at stage 0"),
]


def test_the_example_of_the_docstring_runs():
    assert doctest.testmod(metrics) == (0, 3)


def test_every_second_is_counted_once():
    run = measure(RECORD)
    assert run.total_us == 25 * SECOND
    parts = (run.busy_us, run.bubble_us, run.redo_us, run.checkpoint_us, run.pause_us, run.down_us)
    assert [part // SECOND for part in parts] == [10, 2, 3, 1, 4, 5]
    assert sum(parts) == run.total_us


def test_samples_are_counted_by_whether_they_were_applied_redone_or_dropped():
    run = measure(RECORD)
    assert (run.samples, run.redone_samples, run.dropped_samples) == (100, 7, 5)
    assert run.throughput == 4.0
    assert run.share_of(8.0) == 0.5
    assert run.to_json()["lost_samples"] == 12


def test_pauses_are_counted_by_cause_the_longest_first():
    run = measure(RECORD)
    assert list(run.pauses_us.items()) == [("regroup", 3 * SECOND), ("detect", SECOND)]
    assert run.downs_us == {"no worker is left at stage 0": 5 * SECOND}
    assert (run.num_failures, run.num_joins) == (1, 1)


def test_other_events_of_a_record_are_ignored():
    assert measure([OpRan(0, "W0_0", "0F0@0", 0, 5), *RECORD]) == measure(RECORD)


def test_the_bubble_share_is_of_the_training_time():
    assert measure(RECORD).bubble_share == pytest.approx(2 / 12)
    assert measure([Spell(0, 5, "down")]).bubble_share == 0


def test_throughput_over_time_spreads_a_spell_evenly_and_keeps_the_sum():
    points = throughput_over_time(RECORD, 5)
    assert [round(rate, 6) for _, rate in points] == [10.0, 6.0, 1.0, 3.0, 0.0]
    assert sum(rate * 5 for _, rate in points) == pytest.approx(100)
    assert points[0][0] == pytest.approx(2.5 / 3600)
