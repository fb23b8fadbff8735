"""The coordinator when somebody joins: it is let in at a boundary, whatever happens meanwhile."""

import pytest

from recycle.control.decide.coordinator import CoordinatorPhase
from recycle.control.decide.messages import PauseAtBoundary, ProgressReport, StopEpoch
from recycle.core.cluster import Cluster, Shape
from recycle.core.plans.plan_source import PlanAssignment
from tests.control.decide.coordinator_harness import W0_0, W0_1, W1_0, W1_1, Office, dead, plan_for, with_a_place_free

pytestmark = pytest.mark.timeout(60)


def test_a_newcomer_is_let_in_at_a_boundary_and_copies_from_a_peer() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    assert newcomer.seat is None
    assert office.phase is CoordinatorPhase.PAUSING
    assert office.desk.said("joining") == [("joining", "W1_1")]
    assert office.last("W0_0") == PauseAtBoundary(2)
    office.stop_all(9)
    assert office.desk.questions[-1] == frozenset()
    office.answer()
    go = office.go()
    assert (go.epoch, go.iteration, go.sources, go.seats["W1_1"]) == (3, 9, {"W1_1": "W0_1"}, newcomer.number)
    office.begin()
    recovery = office.desk.recoveries[-1]
    assert (recovery.joins, recovery.joined, recovery.left, recovery.epoch) == (True, ["W1_1"], [], 3)


def test_a_newcomer_without_a_wish_gets_a_place_of_the_stage_with_the_fewest() -> None:
    shape = Shape(3, 2, 3)
    office = Office(shape).form()
    for name in ("W0_0", "W1_1", "W2_1"):
        office.die(name)
    office.recover()
    office.come()
    office.recover()
    assert office.at("W1_1").number == 7


def test_two_newcomers_at_once_are_let_in_together_and_copy_from_different_peers() -> None:
    office = Office(Shape(4, 1, 4)).form()
    office.die("W2_0")
    office.die("W3_0")
    office.recover()
    office.come()
    office.come("W3_0")
    assert office.last("W0_0") == PauseAtBoundary(2)
    office.recover(9)
    assert office.go().epoch == 3
    assert office.go().sources == {"W2_0": "W0_0", "W3_0": "W1_0"}
    assert office.desk.recoveries[-1].joined == ["W2_0", "W3_0"]


def test_a_newcomer_gets_its_wish_in_a_job_that_has_moved_workers() -> None:
    office = Office().form()
    office.die("W0_1")
    office.stop_all()
    office.answer(planned=dead("W0_0"))
    office.begin()
    mover = office.at("W0_1")
    newcomer = office.come("W0_1")  # it was there before, but somebody moved there since
    office.recover(9)
    assert office.at("W0_1") is mover
    assert office.at("W0_0") is newcomer
    assert office.go().sources == {"W0_0": "W1_0"}


def test_the_only_holder_of_a_stage_does_not_move_away_when_a_newcomer_sits_beside_it() -> None:
    office = Office(Shape(2, 2, 2)).form()
    office.die("W0_1")
    office.die("W1_0")
    office.recover()
    office.come("W0_1")  # beside W1_1, the only one of its stage
    office.stop_all(9)
    failed = office.desk.questions[-1]
    holder = office.at("W1_1")
    cluster = Cluster(office.shape, dead("W1_1"))
    moving = PlanAssignment(plan_for(cluster), {W0_0: W0_0, W0_1: W0_1, W1_0: W1_1}, "the holder moves to the other stage")
    office.coordinator.answered(failed, moving)
    assert office.go().checkpoint == -1
    assert holder.seat == W0_1
    assert office.go().sources == {"W1_0": "W0_0"}


def test_a_death_while_all_pause_stops_them_and_lets_the_newcomer_in_all_the_same() -> None:
    office = with_a_place_free()
    office.come("W1_1")
    office.stop("W0_0", ProgressReport(9))
    office.die("W1_0")
    assert office.last("W0_1") == StopEpoch(2)
    office.stop("W0_1", ProgressReport(9))
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_1"]
    recovery = office.desk.recoveries[-1]
    assert (recovery.joins, recovery.left, recovery.joined) == (False, ["W1_0"], ["W1_1"])


def test_a_newcomer_that_dies_before_the_boundary_changes_nothing() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    office.coordinator.lose(newcomer.number, "its connection closed")
    office.recover(9)
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]
    assert office.desk.recoveries[-1].joined == []


def test_a_newcomer_that_dies_before_its_epoch_begins_has_not_joined() -> None:
    office = with_a_place_free()
    office.come("W1_1")
    office.stop_all(9)
    office.die("W1_1")
    assert office.desk.questions[-1] == dead("W1_1")
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]
    assert office.desk.recoveries[-1].joined == []


def test_who_comes_while_a_plan_is_made_and_dies_at_once_has_not_left() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    visitor = office.come("W1_1")
    office.coordinator.lose(visitor.number, "its connection closed")
    assert office.desk.said("left") == [("left", "W1_1", "its connection closed")]
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]


def test_who_comes_while_a_plan_is_made_is_let_in_next_and_the_recovery_is_accounted_for() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.come("W1_1")
    office.answer()
    assert office.phase is CoordinatorPhase.RUNNING
    office.begin()
    assert office.phase is CoordinatorPhase.PAUSING
    office.recover(9)
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0", "W1_1"]
    assert [(recovery.epoch, recovery.left, recovery.joined) for recovery in office.desk.recoveries] == [
        (2, ["W1_1"], []),
        (3, [], ["W1_1"]),
    ]


def test_who_comes_while_others_regroup_waits_until_they_have_begun() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.come("W1_1")
    assert office.phase is CoordinatorPhase.RUNNING
    office.begin()
    assert office.phase is CoordinatorPhase.PAUSING
    assert [recovery.epoch for recovery in office.desk.recoveries] == [2]
