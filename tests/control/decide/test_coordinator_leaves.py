"""The coordinator when a member asks to leave: it goes at an iteration boundary, and nothing is redone."""

import pytest

from recycle.control.decide.members import LEAVES, Member
from recycle.control.decide.messages import JobEnded, Leaving, PauseAtBoundary, StopEpoch
from recycle.control.decide.phases import CoordinatorPhase
from tests.builders import dead
from tests.control.decide.coordinator_harness import CoordinatorHarness, with_a_place_free

pytestmark = pytest.mark.timeout(60)


def was_let_go(harness: CoordinatorHarness, member: Member) -> bool:
    assert member.connection is not None
    return harness.effects.sent[member.connection][-1] == JobEnded(LEAVES)


def test_a_member_leaves_at_a_boundary_and_the_others_go_on_from_it() -> None:
    harness = CoordinatorHarness().form()
    member = harness.leave("W1_1")
    assert harness.phase is CoordinatorPhase.PAUSING
    assert [harness.last(name) for name in ("W0_0", "W1_1")] == [PauseAtBoundary(1)] * 2
    harness.stop_all(7)
    assert was_let_go(harness, member)
    assert harness.effects.plan_requests == [dead("W1_1")]
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.checkpoint, start.only_saves) == (2, 7, -1, False)
    assert sorted(start.places) == ["W0_0", "W0_1", "W1_0"]
    harness.begin()
    (recovery,) = harness.effects.recoveries
    assert (recovery.at_boundary, recovery.joins, recovery.left, recovery.cause) == (True, False, ["W1_1"], LEAVES)
    assert harness.effects.logged("left") == [("left", "W1_1", LEAVES)]


def test_a_member_that_left_ends_by_itself_and_nobody_fences_it() -> None:
    harness = CoordinatorHarness().form()
    member = harness.leave("W1_1")
    harness.recover(7)
    assert member.number in harness.coordinator.members  # until its reports are acknowledged
    harness.coordinator.connection_lost(member)
    assert member.number not in harness.coordinator.members
    assert (harness.phase, harness.effects.logged("fence")) == (CoordinatorPhase.RUNNING, [])


def test_a_member_that_left_and_reconnects_hears_again_that_it_may_go() -> None:
    harness = CoordinatorHarness().form()
    member = harness.leave("W1_1")
    harness.recover(7)
    harness.rejoin(member, epoch=1)
    assert was_let_go(harness, member)
    assert harness.phase is CoordinatorPhase.RUNNING


def test_if_those_that_stay_lack_a_stage_all_save_it_first() -> None:
    harness = CoordinatorHarness().form()
    leaving = [harness.leave("W0_1"), harness.leave("W1_1")]
    harness.stop_all(7)
    assert harness.effects.plan_requests == [frozenset()]
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.only_saves, len(start.places)) == (2, 7, True, 4)
    harness.begin()
    assert harness.effects.recoveries == []  # nobody has left yet
    harness.finish_all()
    assert all(was_let_go(harness, member) for member in leaving)
    assert [harness.last(name) for name in ("W0_0", "W1_0")] == [StopEpoch(2)] * 2
    harness.effects.num_steps_saved = 7
    harness.stop_all(7)
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.checkpoint, start.only_saves) == (3, 7, 7, False)
    harness.begin()
    (recovery,) = harness.effects.recoveries
    assert (recovery.at_boundary, recovery.left) == (True, ["W0_1", "W1_1"])


def test_a_death_while_all_save_for_those_that_leave_makes_them_save_again() -> None:
    harness = CoordinatorHarness().form()
    harness.leave("W0_1")
    harness.leave("W1_1")
    harness.stop_all(7)
    harness.answer()
    harness.die("W1_0")
    harness.stop_all(7)
    harness.answer()
    assert not harness.started().only_saves  # they leave at the next boundary
    harness.begin()
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.stop_all(8)
    harness.answer()
    assert (harness.started().iteration, harness.started().only_saves) == (8, True)


def test_a_job_that_is_asked_to_stop_while_all_save_ends_with_it() -> None:
    harness = CoordinatorHarness().form()
    harness.leave("W0_1")
    harness.leave("W1_1")
    harness.stop_all(7)
    harness.answer()
    harness.coordinator.stop_early()
    harness.finish_all()
    assert harness.phase is CoordinatorPhase.DONE


def test_a_job_that_is_asked_to_stop_keeps_those_that_leave_to_its_end() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        harness.leave(name)
    harness.coordinator.stop_early()
    harness.stop_all(7)
    harness.answer()
    assert (len(harness.started().places), harness.started().only_saves) == (4, True)
    harness.finish_all()
    assert harness.phase is CoordinatorPhase.DONE


def test_if_all_leave_the_job_is_saved_and_waits_for_others() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        harness.leave(name)
    harness.stop_all(7)
    harness.answer()
    harness.finish_all()
    harness.answer()
    assert harness.phase is CoordinatorPhase.WAITING
    for member in list(harness.coordinator.members.values()):
        harness.coordinator.connection_lost(member)
    harness.effects.num_steps_saved = 7
    for name in ("W0_0", "W0_1"):
        harness.join(name)
    harness.answer()
    harness.answer()
    assert (harness.started().iteration, harness.started().checkpoint) == (7, 7)


def test_a_coordinator_that_takes_over_knows_that_the_epoch_only_saves() -> None:
    harness = CoordinatorHarness().form()
    members = [harness.leave("W0_1"), harness.leave("W1_1"), harness.at("W0_0"), harness.at("W1_0")]
    harness.stop_all(7)
    harness.answer()
    harness.start_coordinator()
    found = [harness.rejoin(member) for member in members]
    for member in found[:2]:
        assert member is not None
        harness.coordinator.receive(member, Leaving())
    harness.finish_all()
    assert harness.phase is CoordinatorPhase.STOPPING
    assert [member.has_left for member in found if member] == [True, True, False, False]


def test_a_member_that_asks_in_a_recovery_leaves_when_all_have_begun() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    member = harness.leave("W1_0")
    assert harness.phase is CoordinatorPhase.STOPPING
    harness.recover(4)
    assert harness.phase is CoordinatorPhase.PAUSING
    assert not was_let_go(harness, member)
    harness.stop_all(5)
    assert was_let_go(harness, member)


def test_a_spare_takes_the_place_of_a_member_that_leaves() -> None:
    harness = CoordinatorHarness().form()
    spare = harness.join()
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.leave("W1_0")
    harness.stop_all(7)
    harness.answer()
    start = harness.started()
    assert (start.places["W1_0"], start.sources, start.iteration) == (spare.number, {"W1_0": "W0_0"}, 7)


def test_a_spare_that_asks_to_leave_goes_at_once() -> None:
    harness = CoordinatorHarness().form()
    spare = harness.join()
    harness.coordinator.receive(spare, Leaving())
    assert was_let_go(harness, spare)
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.die("W1_0")
    harness.recover(4)
    assert spare.place is None


def test_members_leave_at_once_before_the_job_has_begun_and_while_it_waits() -> None:
    harness = CoordinatorHarness()
    harness.join()
    gone = harness.leave("W0_0")
    assert was_let_go(harness, gone)
    for _ in range(4):
        harness.join()
    assert harness.phase is CoordinatorPhase.RUNNING
    assert gone.place is None

    harness = with_a_place_free()
    for name in ("W0_0", "W0_1"):
        harness.die(name)
    harness.stop_all()
    harness.answer()
    assert harness.phase is CoordinatorPhase.WAITING
    last = harness.leave("W1_0")
    assert was_let_go(harness, last)


def test_a_member_that_asks_in_the_last_steps_is_let_go_when_the_job_is_done() -> None:
    harness = CoordinatorHarness().form()
    harness.leave("W1_1")
    harness.finish_all()
    assert harness.phase is CoordinatorPhase.DONE
