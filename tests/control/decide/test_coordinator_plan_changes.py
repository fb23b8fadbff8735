"""A change of plans without a change of members: all pause at an iteration boundary, and go on in a new epoch."""

from recycle.control.decide.messages import PauseAtBoundary, StopEpoch
from recycle.control.decide.phases import CoordinatorPhase
from tests.builders import dead
from tests.control.decide.coordinator_harness import CoordinatorHarness, with_a_place_free

CAUSE = "W1_1 at 0.6 of the speed of peers"


def test_all_pause_and_go_on_with_the_plan_that_is_answered_then() -> None:
    harness = CoordinatorHarness().form()
    assert harness.coordinator.change_plan(CAUSE)
    assert harness.phase is CoordinatorPhase.PAUSING
    assert harness.last("W0_0") == PauseAtBoundary(1)
    harness.stop_all(7)
    assert harness.effects.plan_requests[-1] == frozenset()
    harness.answer()
    started = harness.started()
    assert (started.epoch, started.iteration, started.sources) == (2, 7, {})
    harness.begin()
    (recovery,) = harness.effects.recoveries
    assert (recovery.at_boundary, recovery.left, recovery.joined, recovery.cause) == (True, [], [], CAUSE)


def test_who_dies_while_the_plan_changes_is_answered_like_any_death() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.change_plan(CAUSE)
    harness.stop("W0_0", None)
    harness.die("W1_1")
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.last("W1_0") == StopEpoch(1)
    harness.recover()
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0"]
    assert harness.effects.plan_requests == [dead("W1_1")]


def test_who_dies_when_all_have_paused_is_answered_with_another_plan() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.change_plan(CAUSE)
    harness.stop_all(7)
    harness.die("W1_1")
    harness.answer()
    harness.begin()
    assert harness.effects.plan_requests == [frozenset(), dead("W1_1")]
    assert harness.effects.recoveries[-1].left == ["W1_1"]


def test_it_is_refused_while_something_else_changes() -> None:
    harness = with_a_place_free()
    harness.join("W1_1")
    assert not harness.coordinator.change_plan(CAUSE)
    harness.stop_all()
    assert not harness.coordinator.change_plan(CAUSE)
    harness.answer()
    assert not harness.coordinator.change_plan(CAUSE), "not all have begun the epoch"
    harness.begin()
    assert harness.coordinator.change_plan(CAUSE)


def test_a_job_that_stops_keeps_its_plan() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.stop_early()
    assert not harness.coordinator.change_plan(CAUSE)


def test_a_member_that_is_left_out_leaves_at_a_boundary_for_its_own_reason() -> None:
    harness = CoordinatorHarness().form()
    member = harness.at("W1_1")
    member.is_leaving, member.leaves_because = True, "it is left out: too slow"
    harness.coordinator.update_membership()
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.stop_all(7)
    harness.answer()
    harness.begin()
    assert harness.effects.logged("left") == [("left", "W1_1", "it is left out: too slow")]
    assert (harness.effects.recoveries[-1].cause, harness.effects.recoveries[-1].left) == ("it is left out: too slow", ["W1_1"])
