"""The coordinator when members die: one recovery for simultaneous deaths, from the survivors' state or from a checkpoint."""

import pytest

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.messages import Ballot, EpochBegun, EpochStopped, ProgressReport, StopEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.plans.packed_plan import pack_plan
from tests.builders import dead
from tests.control.decide.coordinator_harness import SHAPE, W1_1, CoordinatorHarness, answer_for, plan_for

pytestmark = pytest.mark.timeout(60)


# A death.


def test_after_a_death_all_are_stopped_and_resume_where_they_agree() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.effects.logged("left") == [("left", "W1_1", "its connection closed")]
    for name in ("W0_0", "W0_1", "W1_0"):
        assert harness.last(name) == StopEpoch(1)
    whole = Ballot(4, (1.0, 2.0))
    harness.stop("W0_0", ProgressReport(5, None, whole))
    harness.stop("W1_0", ProgressReport(4, Ballot(4, (1.0, ABSENT))))
    assert harness.effects.plan_requests == []
    harness.stop("W0_1", ProgressReport(5, Ballot(4, (ABSENT, 2.0))))
    assert harness.phase is CoordinatorPhase.PLANNING
    assert harness.effects.plan_requests == [dead("W1_1")]
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.ballot, start.sources, start.checkpoint) == (2, 5, whole, {}, -1)
    assert start.places == {"W0_0": 1, "W0_1": 2, "W1_0": 3}
    assert harness.effects.expected == harness.effects.plan_requests[-1] == {Worker(1, 1)}
    assert start.plan == pack_plan(plan_for(Cluster(SHAPE, dead("W1_1"))))


def test_the_times_of_a_recovery_are_reported_once_all_have_begun() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.at_us, harness.effects.died_us = 2_000_000, 1_990_000
    harness.die("W1_1")
    harness.effects.at_us = 2_001_000
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.stop(name, ProgressReport(5))
    harness.effects.at_us = 2_004_000
    harness.answer()
    for at_us, name in ((2_009_000, "W0_0"), (2_009_500, "W0_1")):
        harness.effects.at_us = at_us
        harness.coordinator.receive(harness.at(name), EpochBegun(2, 20))
    assert harness.effects.recoveries == []
    harness.coordinator.receive(harness.at("W1_0"), EpochBegun(2, 5))
    (recovery,) = harness.effects.recoveries
    assert (recovery.at_us, recovery.noticed_us, recovery.stopped_us) == (1_990_000, 2_000_000, 2_001_000)
    assert (recovery.planned_us, recovery.begun_us) == (2_004_000, 2_009_000)
    assert recovery.transfer_us == 20
    assert (recovery.left, recovery.joined, recovery.joins, recovery.cause) == (["W1_1"], [], False, "its connection closed")
    assert (recovery.epoch, recovery.iteration, recovery.num_live) == (2, 5, 3)


def test_a_message_that_is_sent_twice_counts_once() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    for _ in range(2):
        harness.stop("W0_0", ProgressReport(5))
    harness.stop("W0_1", ProgressReport(5))
    assert harness.phase is CoordinatorPhase.STOPPING


def test_a_second_death_while_all_stop_makes_one_recovery_of_both() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop("W0_0", ProgressReport(5))
    harness.stop("W0_1", ProgressReport(5))
    harness.die("W1_0")
    assert harness.effects.plan_requests == [dead("W1_0", "W1_1")]
    harness.answer()
    harness.begin()
    assert harness.started().places == {"W0_0": 1, "W0_1": 2}
    assert [recovery.left for recovery in harness.effects.recoveries] == [["W1_1", "W1_0"]]


def test_two_deaths_at_once_are_one_recovery() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.die("W0_0")
    harness.recover()
    assert harness.started().epoch == 2
    assert [recovery.left for recovery in harness.effects.recoveries] == [["W1_1", "W0_0"]]


def test_a_plan_that_was_requested_before_a_second_death_is_not_used() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.die("W0_0")
    assert harness.effects.plan_requests == [dead("W1_1"), dead("W0_0", "W1_1")]
    harness.coordinator.plan_received(dead("W1_1"), answer_for(SHAPE, dead("W1_1")))
    assert harness.phase is CoordinatorPhase.PLANNING
    harness.answer()
    assert harness.started().places == {"W0_1": 2, "W1_0": 3}


def test_a_death_before_the_new_epoch_has_begun_belongs_to_the_same_recovery() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.answer()
    harness.die("W1_0")
    assert harness.last("W0_0") == StopEpoch(2)
    harness.recover()
    assert harness.started().epoch == 3
    assert [(recovery.epoch, recovery.left) for recovery in harness.effects.recoveries] == [(3, ["W1_1", "W1_0"])]


def test_a_death_after_the_first_op_is_a_recovery_of_its_own() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.answer()
    harness.coordinator.receive(harness.at("W0_0"), EpochBegun(2, 20))
    harness.die("W1_0")
    harness.recover()
    assert [recovery.left for recovery in harness.effects.recoveries] == [["W1_1"], ["W1_0"]]


def test_a_member_that_leaves_its_epoch_without_a_death_has_all_stopped() -> None:
    harness = CoordinatorHarness().form()
    harness.stop("W0_0", ProgressReport(5))
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.last("W1_1") == StopEpoch(1)
    harness.recover()
    assert harness.started().places == {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}
    assert harness.effects.recoveries[0].cause == "W0_0 lost its links: it was asked to"


def test_a_member_that_was_stopped_before_it_had_its_new_state_copies_it_again() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W0_1")
    harness.stop_all()
    harness.answer(planned=dead("W0_0"))  # the member at W0_0 moves to W0_1
    assert harness.started().sources == {"W0_1": "W1_1"}
    assert harness.started().places == {"W0_1": 1, "W1_0": 3, "W1_1": 4}
    harness.stop("W0_1", None)
    harness.recover()
    assert harness.started().sources == {"W0_1": "W1_1"}


# A stage without a live member.


def test_all_load_a_checkpoint_if_no_member_holds_the_state_of_a_stage() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.num_steps_saved = 4
    harness.die("W0_1")
    harness.die("W1_1")
    harness.stop_all(9)
    harness.answer()
    start = harness.started()
    assert (start.iteration, start.checkpoint, start.sources, start.ballot) == (4, 4, {}, None)
    assert start.places == {"W0_0": 1, "W0_1": 3}


def test_survivors_too_far_apart_go_back_to_a_checkpoint() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.num_steps_saved = 4
    harness.die("W1_1")
    harness.stop("W0_0", ProgressReport(9))
    harness.stop("W0_1", ProgressReport(7))
    harness.stop("W1_0", ProgressReport(9))
    harness.answer()
    assert (harness.started().iteration, harness.started().checkpoint) == (4, 4)


def test_too_few_members_wait_with_a_reason_and_resume_when_one_joins() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.num_steps_saved = 4
    for name in ("W0_1", "W1_1", "W1_0"):
        harness.die(name)
    harness.stop_all(9)
    harness.answer()
    assert harness.phase is CoordinatorPhase.WAITING
    assert harness.effects.waits == [
        "no worker is left for stage 1: 1 live worker cannot hold 2 stages; start 1 more, and training goes on"
    ]
    harness.join()
    assert harness.phase is CoordinatorPhase.PLANNING
    harness.answer()
    assert harness.started().checkpoint == 4
    assert sorted(harness.started().places) == ["W0_0", "W0_1"]


def test_the_reason_for_waiting_is_renewed_when_another_member_dies() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        harness.die(name)
    harness.stop_all(9)
    harness.answer()
    harness.die("W0_0")
    harness.answer()
    assert harness.phase is CoordinatorPhase.WAITING
    assert harness.effects.waits[-1].startswith(
        "no worker is left for stages 0, 1: 0 live workers cannot hold 2 stages; start 2 more"
    )
    harness.join()
    harness.answer()
    assert harness.phase is CoordinatorPhase.WAITING
    harness.join()
    harness.answer()
    assert harness.phase is CoordinatorPhase.RUNNING


def test_a_member_that_joins_while_no_plan_is_found_ends_the_waiting() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        harness.die(name)
    harness.stop_all(9)
    harness.join()  # the source is still planning
    harness.answer()
    assert harness.phase is CoordinatorPhase.PLANNING
    harness.answer()
    assert sorted(harness.started().places) == ["W0_0", "W0_1"]


# Members whose state is wrong.


@pytest.mark.parametrize(("num_saved", "iteration", "checkpoint"), [(4, 4, 4), (0, 5, -1)])
def test_after_a_wrong_gradient_all_go_back_to_a_checkpoint_if_there_is_one(
    num_saved: int, iteration: int, checkpoint: int
) -> None:
    harness = CoordinatorHarness(Shape(3, 2, 2)).form()
    harness.effects.num_steps_saved = num_saved
    harness.coordinator.give_up_corrupt([W1_1], "its weights differ")
    assert harness.effects.logged("suspected") == [("suspected", "W1_1", "its weights differ")]
    assert len(harness.effects.logged("fence")) == 1
    harness.recover(5)
    start = harness.started()
    assert (start.iteration, start.checkpoint) == (iteration, checkpoint)
    assert harness.effects.logged("no checkpoint") == ([] if num_saved else [("no checkpoint", False)])
    harness.die("W2_0")  # a later failure is an ordinary one
    harness.recover(9)
    assert (harness.started().iteration, harness.started().checkpoint) == (9, -1)


def test_a_member_that_missed_an_epoch_that_went_back_copies_the_state_from_a_peer() -> None:
    harness = CoordinatorHarness(Shape(3, 2, 2)).form()
    harness.effects.num_steps_saved = 4
    harness.coordinator.give_up_corrupt([W1_1], "its weights differ")
    harness.stop_all(5)
    harness.answer()
    assert (harness.started().checkpoint, harness.started().origin) == (4, 2)
    harness.begin()
    harness.die("W2_0")
    # Its state is one step ahead, which it could take back, but it is of the time before.
    harness.coordinator.receive(harness.at("W0_0"), EpochStopped(2, ProgressReport(5), "", 0, origin=1))
    harness.stop_all(4)
    harness.answer()
    start = harness.started()
    assert (start.iteration, start.checkpoint, start.sources) == (4, -1, {"W0_0": "W1_0"})


def test_a_member_that_reconnects_says_again_that_it_has_begun_and_counts_once() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.answer()
    for name in ("W0_0", "W0_0", "W0_1"):
        harness.coordinator.receive(harness.at(name), EpochBegun(2, 20))
    assert harness.effects.recoveries == []
    harness.coordinator.receive(harness.at("W1_0"), EpochBegun(2, 20))
    assert len(harness.effects.recoveries) == 1


@pytest.mark.parametrize(
    ("unreachable", "lost"), [(("W1_1",), "W1_1"), (("W0_1", "W1_0", "W1_1"), "W0_0"), (("W1_1", "W7_7"), "W1_1"), ((), None)]
)
def test_of_members_that_cannot_connect_one_is_given_up_and_the_link_named(
    unreachable: tuple[str, ...], lost: str | None
) -> None:
    harness = CoordinatorHarness()
    for row in sorted(harness.initial.places):
        harness.join(str(row))
    stopped = EpochStopped(1, ProgressReport(0), "the group all could not be made", unreachable=unreachable)
    harness.coordinator.receive(harness.at("W0_0"), stopped)
    names = ", ".join(name for name in unreachable if name != "W7_7")
    reason = f"W0_0 cannot connect to {names}: their link seems to be cut"
    assert harness.effects.logged("suspected") == ([("suspected", lost, reason)] if lost else [])
    harness.recover(0)
    assert harness.effects.plan_requests == [dead(lost) if lost else frozenset()]
    assert {"W0_0", "W0_1", "W1_0", "W1_1"} - harness.started().places.keys() == ({lost} if lost else set())
