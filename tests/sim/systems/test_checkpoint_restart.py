"""Checkpoint and restart, worked out by hand: what a failure takes back, and how long the job stands still."""

import pytest

from recycle.sim.systems.checkpoint_restart import CheckpointRestart
from recycle.sim.systems.constants import CheckpointConstants, Constants
from recycle.sim.systems.registry import SystemContext
from tests.sim.hand_made import SECOND, HandMade, spell_rows, spells, trace

# Two pipelines of two stages: a step takes 1 s and adds 8 samples; after five steps a checkpoint of 2 s; a restart of 10 s.
JOB = HandMade(num_pipelines=2)
WAITS = "the job waits until every place is filled again"
# Steps end at 5 s and 12 s, checkpoints at 7 s and 14 s; a failure at 17.5 s takes back the three steps and a half since then.
UNTIL_THE_FAILURE = [
    (0.0, 5.0, "train", "", 40, 0),
    (5.0, 7.0, "checkpoint", "", 0, 0),
    (7.0, 12.0, "train", "", 40, 0),
    (12.0, 14.0, "checkpoint", "", 0, 0),
    (14.0, 17.0, "redo", "rolled back", 0, 24),
    (17.0, 17.5, "redo", "step in flight", 0, 4),
]


def system(has_spares=False):
    return CheckpointRestart(
        JOB, JOB.timing, checkpoint_every=5, checkpoint_us=2 * SECOND, restart_us=10 * SECOND, has_spares=has_spares
    )


def test_without_a_spare_the_job_waits_for_the_node_and_then_starts_again():
    given_trace = trace(JOB, (17.5, "remove", "W1_0"), (30, "add", "W1_0"), end_s=50)
    assert spell_rows(spells(system(), given_trace)) == [
        *UNTIL_THE_FAILURE,
        (17.5, 30.0, "down", WAITS, 0, 0),
        (30.0, 40.0, "pause", "restart", 0, 0),
        (40.0, 45.0, "train", "", 40, 0),
        (45.0, 47.0, "checkpoint", "", 0, 0),
        (47.0, 50.0, "train", "", 24, 0),
    ]


def test_with_a_spare_the_job_starts_again_at_once():
    assert spell_rows(spells(system(has_spares=True), trace(JOB, (17.5, "remove", "W1_0"), end_s=35))) == [
        *UNTIL_THE_FAILURE,
        (17.5, 27.5, "pause", "restart", 0, 0),
        (27.5, 32.5, "train", "", 40, 0),
        (32.5, 34.5, "checkpoint", "", 0, 0),
        (34.5, 35.0, "train", "", 0, 0),
    ]


def test_a_spare_node_of_the_trace_serves_as_well():
    given_trace = trace(JOB, (17.5, "remove", "W1_0"), end_s=32.5, spares=["node9"])
    assert spell_rows(spells(system(), given_trace)) == [
        *UNTIL_THE_FAILURE,
        (17.5, 27.5, "pause", "restart", 0, 0),
        (27.5, 32.5, "train", "", 40, 0),
    ]


def test_two_dead_of_which_one_returns_is_not_enough():
    given_trace = trace(JOB, (17.5, "remove", "W1_0"), (18, "remove", "W0_0"), (30, "add", "W1_0"), end_s=50)
    found = spell_rows(spells(system(), given_trace))
    assert found[: len(UNTIL_THE_FAILURE)] == UNTIL_THE_FAILURE
    assert {spell[2:4] for spell in found[len(UNTIL_THE_FAILURE) :]} == {("down", WAITS)}


def test_a_failure_during_the_restart_starts_it_again():
    given_trace = trace(JOB, (17.5, "remove", "W1_0"), (20, "remove", "W0_0"), end_s=31)
    assert spell_rows(spells(system(has_spares=True), given_trace)) == [
        *UNTIL_THE_FAILURE,
        (17.5, 20.0, "pause", "restart", 0, 0),
        (20.0, 30.0, "pause", "restart", 0, 0),
        (30.0, 31.0, "train", "", 8, 0),
    ]


def test_a_failure_while_a_checkpoint_is_written_takes_back_what_it_would_have_saved():
    found = spells(system(has_spares=True), trace(JOB, (6, "remove", "W1_0"), end_s=16))
    assert spell_rows(found) == [(0.0, 6.0, "redo", "rolled back", 0, 40), (6.0, 16.0, "pause", "restart", 0, 0)]


def test_a_failure_just_after_a_checkpoint_takes_back_nothing():
    found = spells(system(has_spares=True), trace(JOB, (7, "remove", "W1_0"), end_s=17))
    assert spell_rows(found) == [*UNTIL_THE_FAILURE[:2], (7.0, 17.0, "pause", "restart", 0, 0)]


def test_a_node_that_joins_a_full_cluster_stops_nobody():
    for when in (2.5, 6.0):  # within a step, and within a checkpoint
        found = spells(system(), trace(JOB, (when, "add", "node9"), end_s=12))
        assert sum(spell.samples for spell in found) == 80
        assert sum(spell.length_us for spell in found if spell.state == "checkpoint") == 2 * SECOND


def test_a_job_that_begins_with_a_place_empty_waits():
    assert spell_rows(spells(system(), trace(JOB, (20, "add", "W0_1"), end_s=35, absent=["W0_1"]))) == [
        (0.0, 20.0, "down", WAITS, 0, 0),
        (20.0, 30.0, "pause", "restart", 0, 0),
        (30.0, 35.0, "train", "", 40, 0),
    ]


# The root of 2 * 10 s * 2,000 s is 200 s.
@pytest.mark.parametrize(
    ("interval_s", "checkpoint_s", "step_s", "steps"),
    [(0, 10, 1, 200), (0, 10, 3, 66), (50, 10, 1, 50), (50, 10, 60, 1), (0, 0, 1, 1)],
)
def test_checkpoints_are_as_far_apart_as_configured_or_by_youngs_rule(interval_s, checkpoint_s, step_s, steps):
    setting = SystemContext(JOB, Constants.for_model(1e9), mtbf_us=2000 * SECOND)
    costs = CheckpointConstants(checkpoint_s * SECOND, checkpoint_interval_us=interval_s * SECOND)
    assert setting.steps_between_checkpoints(costs, step_s * SECOND) == steps
