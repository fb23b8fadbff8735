"""The coordinator when members die: one recovery for all that happens at once, from what survivors hold or a checkpoint."""

import pytest

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.coordinator import CoordinatorPhase
from recycle.control.decide.messages import Ballot, EpochBegun, ProgressReport, StopEpoch
from recycle.core.cluster import Cluster
from tests.control.decide.coordinator_harness import SHAPE, Office, answer_for, dead, plan_for

pytestmark = pytest.mark.timeout(60)


# A death.


def test_after_a_death_all_are_stopped_and_go_on_where_they_agree() -> None:
    office = Office().form()
    office.die("W1_1")
    assert office.phase is CoordinatorPhase.STOPPING
    assert office.desk.said("left") == [("left", "W1_1", "its connection closed")]
    for name in ("W0_0", "W0_1", "W1_0"):
        assert office.last(name) == StopEpoch(1)
    whole = Ballot(4, (1.0, 2.0))
    office.stop("W0_0", ProgressReport(5, None, whole))
    office.stop("W1_0", ProgressReport(4, Ballot(4, (1.0, ABSENT))))
    assert office.desk.questions == []
    office.stop("W0_1", ProgressReport(5, Ballot(4, (ABSENT, 2.0))))
    assert office.phase is CoordinatorPhase.PLANNING
    assert office.desk.questions == [dead("W1_1")]
    office.answer()
    go = office.go()
    assert (go.epoch, go.iteration, go.ballot, go.sources, go.checkpoint) == (2, 5, whole, {}, -1)
    assert go.seats == {"W0_0": 1, "W0_1": 2, "W1_0": 3}
    assert go.plan == plan_for(Cluster(SHAPE, dead("W1_1"))).dumps()


def test_every_microsecond_of_a_recovery_is_handed_over_once_all_have_begun() -> None:
    office = Office().form()
    office.desk.at_us, office.desk.went_us = 2_000_000, 1_990_000
    office.die("W1_1")
    office.desk.at_us = 2_001_000
    for name in ("W0_0", "W0_1", "W1_0"):
        office.stop(name, ProgressReport(5))
    office.desk.at_us = 2_004_000
    office.answer()
    for at_us, name in ((2_009_000, "W0_0"), (2_009_500, "W0_1")):
        office.desk.at_us = at_us
        office.coordinator.hear(office.at(name), EpochBegun(2, 20))
    assert office.desk.recoveries == []
    office.coordinator.hear(office.at("W1_0"), EpochBegun(2, 5))
    (recovery,) = office.desk.recoveries
    assert (recovery.at_us, recovery.noticed_us, recovery.stopped_us) == (1_990_000, 2_000_000, 2_001_000)
    assert (recovery.planned_us, recovery.begun_us) == (2_004_000, 2_009_000)
    assert recovery.transfer_us == 20
    assert (recovery.left, recovery.joined, recovery.joins, recovery.cause) == (["W1_1"], [], False, "its connection closed")
    assert (recovery.epoch, recovery.iteration, recovery.num_live) == (2, 5, 3)


def test_what_a_member_says_twice_counts_once() -> None:
    office = Office().form()
    office.die("W1_1")
    for _ in range(2):
        office.stop("W0_0", ProgressReport(5))
    office.stop("W0_1", ProgressReport(5))
    assert office.phase is CoordinatorPhase.STOPPING


def test_a_second_death_while_all_stop_makes_one_recovery_of_both() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop("W0_0", ProgressReport(5))
    office.stop("W0_1", ProgressReport(5))
    office.die("W1_0")
    assert office.desk.questions == [dead("W1_0", "W1_1")]
    office.answer()
    office.begin()
    assert office.go().seats == {"W0_0": 1, "W0_1": 2}
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1", "W1_0"]]


def test_two_deaths_at_once_are_one_recovery() -> None:
    office = Office().form()
    office.die("W1_1")
    office.die("W0_0")
    office.recover()
    assert office.go().epoch == 2
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1", "W0_0"]]


def test_a_plan_for_who_was_there_before_a_second_death_is_not_used() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.die("W0_0")
    assert office.desk.questions == [dead("W1_1"), dead("W0_0", "W1_1")]
    office.coordinator.answered(dead("W1_1"), answer_for(SHAPE, dead("W1_1")))
    assert office.phase is CoordinatorPhase.PLANNING
    office.answer()
    assert office.go().seats == {"W0_1": 2, "W1_0": 3}


def test_a_death_between_two_epochs_begins_the_next_and_both_are_one_recovery() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.die("W1_0")
    assert office.last("W0_0") == StopEpoch(2)
    office.recover()
    assert office.go().epoch == 3
    assert [(recovery.epoch, recovery.left) for recovery in office.desk.recoveries] == [(3, ["W1_1", "W1_0"])]


def test_a_death_after_the_first_op_is_a_recovery_of_its_own() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.coordinator.hear(office.at("W0_0"), EpochBegun(2, 20))
    office.die("W1_0")
    office.recover()
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1"], ["W1_0"]]


def test_who_loses_its_links_without_a_death_has_all_stopped() -> None:
    office = Office().form()
    office.stop("W0_0", ProgressReport(5))
    assert office.phase is CoordinatorPhase.STOPPING
    assert office.last("W1_1") == StopEpoch(1)
    office.recover()
    assert office.go().seats == {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}
    assert office.desk.recoveries[0].cause == "W0_0 lost its links: it was asked to"


def test_who_moved_and_was_stopped_before_it_had_its_new_state_is_given_it_again() -> None:
    office = Office().form()
    office.die("W0_1")
    office.stop_all()
    office.answer(planned=dead("W0_0"))  # whoever sits at W0_0 goes to W0_1
    assert office.go().sources == {"W0_1": "W1_1"}
    assert office.go().seats == {"W0_1": 1, "W1_0": 3, "W1_1": 4}
    office.stop("W0_1", None)
    office.recover()
    assert office.go().sources == {"W0_1": "W1_1"}


# Nobody is left at a stage.


def test_a_stage_that_nobody_holds_is_loaded_from_a_checkpoint_by_all() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    office.die("W0_1")
    office.die("W1_1")
    office.stop_all(9)
    office.answer()
    go = office.go()
    assert (go.iteration, go.checkpoint, go.sources, go.ballot) == (4, 4, {}, None)
    assert go.seats == {"W0_0": 1, "W0_1": 3}


def test_survivors_too_far_apart_go_back_to_a_checkpoint() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    office.die("W1_1")
    office.stop("W0_0", ProgressReport(9))
    office.stop("W0_1", ProgressReport(7))
    office.stop("W1_0", ProgressReport(9))
    office.answer()
    assert (office.go().iteration, office.go().checkpoint) == (4, 4)


def test_too_few_workers_wait_say_for_what_and_go_on_when_one_comes() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.answer()
    assert office.phase is CoordinatorPhase.WAITING
    assert office.desk.waits == [
        "no worker is left for stage 1: 1 live worker cannot hold 2 stages; start 1 more, and training goes on"
    ]
    office.come()
    assert office.phase is CoordinatorPhase.PLANNING
    office.answer()
    assert office.go().checkpoint == 4
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]


def test_it_says_anew_what_it_waits_for_when_another_one_dies() -> None:
    office = Office().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.answer()
    office.die("W0_0")
    office.answer()
    assert office.phase is CoordinatorPhase.WAITING
    assert office.desk.waits[-1].startswith(
        "no worker is left for stages 0, 1: 0 live workers cannot hold 2 stages; start 2 more"
    )
    office.come()
    office.answer()
    assert office.phase is CoordinatorPhase.WAITING
    office.come()
    office.answer()
    assert office.phase is CoordinatorPhase.RUNNING


def test_who_comes_while_no_plan_is_found_ends_the_waiting() -> None:
    office = Office().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.come()  # the source is still at it
    office.answer()
    assert office.phase is CoordinatorPhase.PLANNING
    office.answer()
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]
