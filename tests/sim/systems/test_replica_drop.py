"""Replica drop, worked out by hand: a dead worker takes its pipeline out, and the batch shrinks."""

from recycle.sim.systems.replica_drop import ReplicaDrop
from tests.sim.hand_made import SECOND, HandMade, spell_rows, spells, trace

# Three pipelines of two stages: a step takes 1 s and adds 4 samples for each pipeline that is whole.
JOB = HandMade(num_pipelines=3)
SYSTEM = ReplicaDrop(JOB, JOB.timing, reconfigure_us=3 * SECOND)
WAITS = "every pipeline misses a worker: the job waits"


def test_a_dead_worker_takes_its_pipeline_out_and_the_batch_shrinks():
    assert spell_rows(spells(SYSTEM, trace(JOB, (10.5, "remove", "W0_1"), end_s=20))) == [
        (0.0, 10.0, "train", "", 120, 0),
        (10.0, 10.5, "redo", "dropped", 0, 6),  # half a step of 12 samples
        (10.5, 13.5, "pause", "reconfigure", 0, 0),
        (13.5, 20.0, "train", "", 48, 0),  # six whole steps of 8 samples
    ]


def test_the_step_takes_as_long_as_before_and_live_workers_are_as_busy():
    found = spells(SYSTEM, trace(JOB, (10, "remove", "W0_1"), end_s=23))
    assert [(spell.length_us / SECOND, spell.busy_us / SECOND) for spell in found if spell.state == "train"] == [(10, 8), (10, 8)]


def test_a_second_death_in_the_same_pipeline_costs_nothing_more():
    found = spells(SYSTEM, trace(JOB, (10.5, "remove", "W0_1"), (16, "remove", "W0_0"), end_s=20))
    assert sum(spell.samples for spell in found) == 120 + 48
    assert sum(spell.length_us for spell in found if spell.state in ("pause", "redo")) == 3.5 * SECOND


def test_a_second_death_in_another_pipeline_starts_the_pause_again():
    assert spell_rows(spells(SYSTEM, trace(JOB, (10, "remove", "W0_1"), (12, "remove", "W1_0"), end_s=20))) == [
        (0.0, 10.0, "train", "", 120, 0),
        (10.0, 12.0, "pause", "reconfigure", 0, 0),
        (12.0, 15.0, "pause", "reconfigure", 0, 0),
        (15.0, 20.0, "train", "", 20, 0),  # five steps of one pipeline
    ]


def test_two_deaths_at_once_are_one_pause():
    assert spell_rows(spells(SYSTEM, trace(JOB, (10, "remove", "W0_1"), (10, "remove", "W1_0"), end_s=20))) == [
        (0.0, 10.0, "train", "", 120, 0),
        (10.0, 13.0, "pause", "reconfigure", 0, 0),
        (13.0, 20.0, "train", "", 28, 0),
    ]


def test_with_no_pipeline_whole_the_job_is_down():
    deaths = [(10 + number, "remove", f"W{number}_0") for number in range(3)]
    found = spell_rows(spells(SYSTEM, trace(JOB, *deaths, end_s=100)))
    assert found[-1] == (12.0, 100.0, "down", WAITS, 0, 0)


def test_a_pipeline_that_is_whole_again_enters_after_the_step_in_flight():
    given_trace = trace(JOB, (10.5, "remove", "W0_1"), (16.2, "add", "W0_1"), end_s=22.5)
    assert spell_rows(spells(SYSTEM, given_trace)) == [
        (0.0, 10.0, "train", "", 120, 0),
        (10.0, 10.5, "redo", "dropped", 0, 6),
        (10.5, 13.5, "pause", "reconfigure", 0, 0),
        # Steps of 8 samples end at 14.5, 15.5 and 16.5; the last is in flight when the worker is back.
        (13.5, 15.5, "train", "", 16, 0),
        (15.5, 16.5, "train", "", 8, 0),
        (16.5, 19.5, "pause", "reconfigure", 0, 0),
        (19.5, 22.5, "train", "", 36, 0),
    ]


def test_a_job_that_was_down_goes_on_when_one_pipeline_is_whole():
    deaths = [(10, "remove", f"W{number}_0") for number in range(3)]
    assert spell_rows(spells(SYSTEM, trace(JOB, *deaths, (30, "add", "W2_0"), end_s=40))) == [
        (0.0, 10.0, "train", "", 120, 0),
        (10.0, 30.0, "down", WAITS, 0, 0),
        (30.0, 33.0, "pause", "reconfigure", 0, 0),
        (33.0, 40.0, "train", "", 28, 0),
    ]


def test_a_spare_that_steps_in_at_once_saves_the_batch_but_not_the_step():
    assert spell_rows(spells(SYSTEM, trace(JOB, (10.5, "remove", "W0_1"), end_s=20.5, spares=["node7"])))[1:] == [
        (10.0, 10.5, "redo", "dropped", 0, 6),
        (10.5, 13.5, "pause", "reconfigure", 0, 0),
        (13.5, 20.5, "train", "", 84, 0),
    ]


def test_one_pipeline_that_leaves_as_another_one_returns_is_no_bargain():
    # Two pipelines train before and after 20.5 s, but they are not the same two.
    given_trace = trace(JOB, (20.5, "remove", "W0_0"), (20.5, "add", "W1_0"), end_s=30.5, absent=["W1_0"])
    assert spell_rows(spells(SYSTEM, given_trace)) == [
        (0.0, 20.0, "train", "", 160, 0),
        (20.0, 20.5, "redo", "dropped", 0, 4),
        (20.5, 23.5, "pause", "reconfigure", 0, 0),
        (23.5, 30.5, "train", "", 56, 0),
    ]


def test_a_job_that_begins_with_a_worker_missing_begins_with_fewer_pipelines():
    assert spell_rows(spells(SYSTEM, trace(JOB, end_s=5, absent=["W2_1"]))) == [(0.0, 5.0, "train", "", 40, 0)]
    absent = ["W0_0", "W1_1", "W2_0"]
    assert spell_rows(spells(SYSTEM, trace(JOB, end_s=5, absent=absent))) == [(0.0, 5.0, "down", WAITS, 0, 0)]
