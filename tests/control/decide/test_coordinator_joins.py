"""The coordinator when a member joins: it gets a place at an iteration boundary, whatever happens meanwhile."""

import pytest

from recycle.control.decide.failure_detection import LOADING_S
from recycle.control.decide.messages import PauseAtBoundary, ProgressReport, Ready, RenewLease, StopEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.core.cluster import Cluster, Shape
from recycle.core.plans.plan_source import PlanAssignment
from tests.builders import dead
from tests.control.decide.coordinator_harness import (
    LEASE_S,
    W0_0,
    W0_1,
    W1_0,
    W1_1,
    CoordinatorHarness,
    plan_for,
    with_a_place_free,
)

pytestmark = pytest.mark.timeout(60)


def test_a_new_member_gets_a_place_at_a_boundary_and_copies_from_a_peer() -> None:
    harness = with_a_place_free()
    newcomer = harness.join("W1_1")
    assert newcomer.place is None
    assert harness.phase is CoordinatorPhase.PAUSING
    assert harness.effects.logged("joining") == [("joining", "W1_1")]
    assert harness.last("W0_0") == PauseAtBoundary(2)
    harness.stop_all(9)
    assert harness.effects.plan_requests[-1] == frozenset()
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.sources, start.places["W1_1"]) == (3, 9, {"W1_1": "W0_1"}, newcomer.number)
    harness.begin()
    recovery = harness.effects.recoveries[-1]
    assert (recovery.joins, recovery.joined, recovery.left, recovery.epoch) == (True, ["W1_1"], [], 3)


def test_nobody_waits_for_a_member_that_still_loads_the_job() -> None:
    harness = with_a_place_free()
    member = harness.coordinator.join(77, "here", 77, W1_1)
    harness.coordinator.update_membership()
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.coordinator.receive(member, Ready())
    assert harness.phase is CoordinatorPhase.PAUSING


def test_the_first_epoch_begins_when_all_have_loaded_the_job() -> None:
    harness = CoordinatorHarness()
    loading = harness.coordinator.join(77, "here", 77, W1_1)
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.join(name)
    assert harness.phase is CoordinatorPhase.FORMING
    harness.coordinator.receive(loading, Ready())
    assert harness.phase is CoordinatorPhase.RUNNING


def test_a_new_member_without_a_preferred_place_gets_one_of_the_stage_with_the_fewest_members() -> None:
    shape = Shape(3, 2, 3)
    harness = CoordinatorHarness(shape).form()
    for name in ("W0_0", "W1_1", "W2_1"):
        harness.die(name)
    harness.recover()
    harness.join()
    harness.recover()
    assert harness.at("W1_1").number == 7


def test_two_new_members_get_places_together_and_copy_from_different_peers() -> None:
    harness = CoordinatorHarness(Shape(4, 1, 4)).form()
    harness.die("W2_0")
    harness.die("W3_0")
    harness.recover()
    harness.join()
    harness.join("W3_0")
    assert harness.last("W0_0") == PauseAtBoundary(2)
    harness.recover(9)
    assert harness.started().epoch == 3
    assert harness.started().sources == {"W2_0": "W0_0", "W3_0": "W1_0"}
    assert harness.effects.recoveries[-1].joined == ["W2_0", "W3_0"]


def test_a_new_member_gets_a_place_in_a_job_that_has_moved_workers() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W0_1")
    harness.stop_all()
    harness.answer(planned=dead("W0_0"))
    harness.begin()
    mover = harness.at("W0_1")
    newcomer = harness.join("W0_1")  # its place of before, but another member has moved there
    harness.recover(9)
    assert harness.at("W0_1") is mover
    assert harness.at("W0_0") is newcomer
    assert harness.started().sources == {"W0_0": "W1_0"}


def test_the_only_holder_of_a_stage_does_not_move_away_when_a_new_member_is_beside_it() -> None:
    harness = CoordinatorHarness(Shape(2, 2, 2)).form()
    harness.die("W0_1")
    harness.die("W1_0")
    harness.recover()
    harness.join("W0_1")  # beside W1_1, the only one of its stage
    harness.stop_all(9)
    failed = harness.effects.plan_requests[-1]
    holder = harness.at("W1_1")
    cluster = Cluster(harness.shape, dead("W1_1"))
    moving = PlanAssignment(plan_for(cluster), {W0_0: W0_0, W0_1: W0_1, W1_0: W1_1}, "the holder moves to the other stage")
    harness.coordinator.plan_received(failed, moving)
    assert harness.started().checkpoint == -1
    assert holder.place == W0_1
    assert harness.started().sources == {"W1_0": "W0_0"}


def test_a_death_while_all_pause_stops_them_and_the_new_member_gets_its_place_all_the_same() -> None:
    harness = with_a_place_free()
    harness.join("W1_1")
    harness.stop("W0_0", ProgressReport(9))
    harness.die("W1_0")
    assert harness.last("W0_1") == StopEpoch(2)
    harness.stop("W0_1", ProgressReport(9))
    harness.answer()
    harness.begin()
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_1"]
    recovery = harness.effects.recoveries[-1]
    assert (recovery.joins, recovery.left, recovery.joined) == (False, ["W1_0"], ["W1_1"])


def test_a_new_member_that_dies_before_the_boundary_changes_nothing() -> None:
    harness = with_a_place_free()
    newcomer = harness.join("W1_1")
    harness.coordinator.remove(newcomer.number, "its connection closed")
    harness.recover(9)
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0"]
    assert harness.effects.recoveries[-1].joined == []


def test_a_new_member_that_dies_before_its_epoch_starts_has_not_joined() -> None:
    harness = with_a_place_free()
    harness.join("W1_1")
    harness.stop_all(9)
    harness.die("W1_1")
    assert harness.effects.plan_requests[-1] == dead("W1_1")
    harness.answer()
    harness.begin()
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0"]
    assert harness.effects.recoveries[-1].joined == []


def test_a_member_that_joins_during_planning_and_dies_at_once_has_not_left() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    newcomer = harness.join("W1_1")
    harness.coordinator.remove(newcomer.number, "its connection closed")
    assert harness.effects.logged("left") == [("left", "W1_1", "its connection closed")]
    harness.answer()
    harness.begin()
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0"]


def test_a_member_that_joins_during_planning_gets_a_place_next_and_both_recoveries_are_reported() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.join("W1_1")
    harness.answer()
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.begin()
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.recover(9)
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0", "W1_1"]
    assert [(recovery.epoch, recovery.left, recovery.joined) for recovery in harness.effects.recoveries] == [
        (2, ["W1_1"], []),
        (3, [], ["W1_1"]),
    ]


def test_a_member_that_joins_while_others_regroup_waits_until_they_have_begun() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.answer()
    harness.join("W1_1")
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.begin()
    assert harness.phase is CoordinatorPhase.PAUSING
    assert [recovery.epoch for recovery in harness.effects.recoveries] == [2]


# Spares.


def test_a_worker_too_many_waits_as_a_spare_and_takes_the_place_of_the_next_that_dies() -> None:
    harness = CoordinatorHarness().form()
    spare = harness.join()
    assert (harness.phase, spare.place) == (CoordinatorPhase.RUNNING, None)
    harness.wait(3 * LEASE_S, "W0_0", "W0_1", "W1_0", "W1_1")  # it is silent: nobody waits for it
    assert spare.number not in harness.coordinator.members
    spare = harness.join("W0_1")
    harness.die("W1_0")
    harness.recover()
    assert harness.effects.plan_requests[-1] == frozenset()
    start = harness.started()
    assert (start.places["W1_0"], start.sources) == (spare.number, {"W1_0": "W0_0"})


def test_a_spare_that_comes_before_the_first_epoch_does_not_delay_it() -> None:
    harness = CoordinatorHarness()
    for _ in range(5):
        harness.join()
    harness.begin()
    assert harness.phase is CoordinatorPhase.RUNNING
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0", "W1_1"]
    assert len(harness.coordinator.members.unplaced) == 1


def test_a_worker_that_joins_while_a_new_coordinator_still_waits_for_the_dead_is_a_spare_until_then() -> None:
    harness = CoordinatorHarness().form()
    members = {str(member.place): member for member in harness.coordinator.members.values()}
    harness.start_coordinator()
    gone = members.pop("W1_1")
    for member in members.values():
        harness.rejoin(member)
    spare = harness.join("W1_1")
    assert harness.phase is CoordinatorPhase.RUNNING
    for _ in range(4):
        harness.coordinator.receive(spare, RenewLease())
        harness.wait(LEASE_S / 3, *members)
    assert gone.number not in harness.coordinator.members
    harness.recover()
    assert harness.started().places["W1_1"] == spare.number


def test_one_that_loads_may_be_silent_and_is_a_member_like_any_other_when_it_is_ready() -> None:
    """An import may keep a process from everything else for seconds, and nobody waits for it."""
    harness, others = with_a_place_free(), ("W0_0", "W0_1", "W1_0")
    loading = harness.coordinator.join(77, "there", 77, W1_1)
    harness.wait(20 * LEASE_S, *others)
    assert harness.effects.logged("suspected") == []
    harness.coordinator.receive(loading, Ready())
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.wait(LEASE_S, *others)
    assert [event[2] for event in harness.effects.logged("suspected")] == ["silent for 2.0 s, with a lease of 2 s"]


def test_one_that_loads_for_ever_is_given_up() -> None:
    harness = with_a_place_free()
    harness.coordinator.join(77, "there", 77, W1_1)
    harness.wait(LOADING_S + LEASE_S, "W0_0", "W0_1", "W1_0")
    assert [event[2] for event in harness.effects.logged("suspected")] == ["silent for 60.2 s, with a lease of 2 s"]
