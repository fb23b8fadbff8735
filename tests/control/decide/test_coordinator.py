"""The coordinator without failures of epochs: how a job starts, which members are suspected, how the job ends."""

import pytest

from recycle.control.decide.messages import (
    Ack,
    EpochBegun,
    EpochStopped,
    JobEnded,
    PauseAtBoundary,
    ProgressReport,
    RenewLease,
    StartEpoch,
    StoreEntry,
    StoreRequest,
)
from recycle.control.decide.new_epoch import NewEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.core.cluster import Worker
from recycle.core.plans.packed_plan import pack_plan
from tests.builders import dead
from tests.control.decide.coordinator_harness import LEASE_S, W0_0, CoordinatorHarness, answer_for, with_a_place_free

pytestmark = pytest.mark.timeout(60)


# The start of a job.


def test_a_job_begins_when_every_row_of_its_plan_has_a_worker() -> None:
    harness = CoordinatorHarness()
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.join(name)
        assert harness.phase is CoordinatorPhase.FORMING
    harness.join("W1_1")
    assert harness.phase is CoordinatorPhase.RUNNING
    assert harness.started() == NewEpoch(1, pack_plan(harness.initial.plan), {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}, 0)


def test_a_job_does_not_begin_before_plans_can_be_made() -> None:
    harness = CoordinatorHarness()
    harness.effects.is_prepared = False
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        harness.join(name)
    assert harness.phase is CoordinatorPhase.FORMING
    harness.effects.is_prepared = True
    harness.coordinator.update_membership()
    assert harness.phase is CoordinatorPhase.RUNNING


def test_a_worker_without_a_preferred_place_gets_a_free_one_even_if_it_joined_first() -> None:
    harness = CoordinatorHarness()
    anybody = harness.join()
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.join(name)
    assert harness.started().places == {"W0_0": 2, "W0_1": 3, "W1_0": 4, "W1_1": anybody.number}


def test_a_place_that_is_claimed_or_does_not_exist_is_refused_with_a_reason() -> None:
    harness = CoordinatorHarness()
    harness.join("W0_0")
    assert harness.coordinator.refusal(W0_0) == "W0_0 is taken: another worker has come for it"
    assert harness.coordinator.refusal(Worker(2, 0)) == "W2_0 is no place in this job of 2 pipelines of 2 stages"


def test_a_member_that_dies_before_the_first_epoch_must_be_replaced() -> None:
    harness = CoordinatorHarness()
    harness.join("W0_0")
    harness.die("W0_0")
    for name in ("W0_1", "W1_0", "W1_1"):
        harness.join(name)
    assert harness.phase is CoordinatorPhase.FORMING
    harness.join("W0_0")
    assert harness.started().places == {"W0_1": 2, "W1_0": 3, "W1_1": 4, "W0_0": 5}


def test_a_member_that_the_first_plan_does_not_need_joins_after_the_start() -> None:
    harness = CoordinatorHarness(initially=dead("W1_1"))
    harness.join("W1_1")
    for name in ("W0_0", "W0_1"):
        harness.join(name)
    # The member that prefers a place without a row in the plan has got another place.
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.begin()
    harness.join()
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.recover()
    assert sorted(harness.started().places) == ["W0_0", "W0_1", "W1_0", "W1_1"]


# Suspicion, messages of former epochs, and the end of a job.


def test_a_suspected_member_is_fenced_before_others_take_its_work() -> None:
    harness = CoordinatorHarness().form()
    others = ("W0_0", "W0_1", "W1_0")
    harness.wait(LEASE_S, *others)
    harness.stop_all()
    names = [entry[0] for entry in harness.effects.log]
    assert names == ["epoch started", "suspected", "fence", "disconnect", "left", "request plan"]
    assert harness.effects.logged("suspected") == [("suspected", "W1_1", "silent for 2.0 s, with a lease of 2 s")]


@pytest.mark.parametrize("stalled_s", [1.9, 12.0, 3600.0])
def test_nobody_is_suspected_for_the_time_in_which_the_coordinator_itself_stood_still(stalled_s: float) -> None:
    harness = CoordinatorHarness().form()
    names = ("W0_0", "W0_1", "W1_0", "W1_1")
    harness.wait(4.0, *names)
    harness.effects.at_us += round(stalled_s * 1e6)
    harness.coordinator.tick()
    harness.coordinator.tick()
    assert harness.effects.logged("stalled") == [("stalled", stalled_s)]
    harness.wait(4.0, *names)
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.wait(LEASE_S, *names[1:])  # a silence after it counts as ever
    assert harness.effects.logged("suspected") == [("suspected", "W0_0", "silent for 2.0 s, with a lease of 2 s")]


def test_a_recovery_begins_with_the_last_sign_of_life_of_a_silent_member() -> None:
    harness = CoordinatorHarness().form()
    harness.wait(1.0, "W0_0", "W0_1", "W1_0", "W1_1")
    seen_us = harness.effects.at_us
    harness.wait(LEASE_S, "W0_0", "W0_1", "W1_0")
    harness.recover()
    (recovery,) = harness.effects.recoveries
    assert (recovery.at_us, recovery.noticed_us - recovery.at_us) == (seen_us, 2_000_000)


def test_a_silent_member_whose_process_runs_gets_five_leases() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.running = {harness.at("W1_1").pid}
    others = ("W0_0", "W0_1", "W1_0")
    harness.wait(4.5 * LEASE_S, *others)
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.wait(LEASE_S, *others)
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.effects.logged("suspected") == [("suspected", "W1_1", "silent for 10.2 s, with a lease of 2 s")]


def test_a_member_that_computes_one_op_for_too_long_is_suspected_though_it_renews_its_lease() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.longest_op_s = 0.3
    for busy_us, phase in ((2_900_000, CoordinatorPhase.RUNNING), (3_100_000, CoordinatorPhase.STOPPING)):
        harness.coordinator.receive(harness.at("W1_1"), RenewLease(3, busy_us))
        harness.coordinator.tick()
        assert harness.phase is phase


@pytest.mark.parametrize("doing", ["reduce", "optimizer"])
def test_a_member_that_hangs_outside_an_op_is_suspected(doing: str) -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.longest_op_s = 0.3
    for busy_us, phase in ((9_900_000, CoordinatorPhase.RUNNING), (10_100_000, CoordinatorPhase.STOPPING)):
        harness.coordinator.receive(harness.at("W1_1"), RenewLease(3, busy_us, doing))
        harness.coordinator.tick()
        assert harness.phase is phase


def test_a_cut_link_between_two_members_is_named_and_one_of_them_is_given_up() -> None:
    harness = CoordinatorHarness().form()
    waits = {"W0_0": "W0_1", "W0_1": "W1_1", "W1_0": "W1_1", "W1_1": "W0_1, W1_0"}
    for waited_us, phase in ((5_900_000, CoordinatorPhase.RUNNING), (6_100_000, CoordinatorPhase.STOPPING)):
        for name, others in waits.items():
            more_us = 500_000 if name == "W0_1" else 0
            harness.coordinator.receive(harness.at(name), RenewLease(3, 0, "0F0@0", others, waited_us + more_us))
        harness.coordinator.tick()
        assert harness.phase is phase
    reason = "W0_1 has waited 6.6 s for W1_1, and nobody computes: their link seems to be cut"
    assert harness.effects.logged("suspected") == [("suspected", "W1_1", reason)]
    assert len(harness.effects.logged("fence")) == 1
    harness.recover()
    (recovery,) = harness.effects.recoveries
    assert recovery.noticed_us - recovery.at_us == 6_600_000


def test_a_member_that_does_not_stop_is_given_up_and_the_others_go_on() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    for name in ("W0_0", "W0_1"):
        harness.stop(name, ProgressReport(5))
    harness.wait(9.5, "W0_0", "W0_1", "W1_0")
    assert harness.phase is CoordinatorPhase.STOPPING
    harness.wait(0.25, "W0_0", "W0_1", "W1_0")
    harness.wait(0.5, "W0_0", "W0_1")
    assert harness.phase is CoordinatorPhase.PLANNING
    assert [entry[1] for entry in harness.effects.logged("suspected")] == ["W1_0"]


def test_a_plan_that_never_comes_ends_the_job() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all()
    harness.wait(599.0, "W0_0", "W0_1", "W1_0")
    assert harness.effects.logged("planning failed") == []
    harness.wait(2.0, "W0_0", "W0_1", "W1_0")
    assert harness.effects.logged("planning failed")[0] == ("planning failed", "no plan has come for 600 s")


def test_a_checkpoint_may_take_longer_to_find_than_a_plan() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.stop(name, None)
    failed = harness.effects.plan_requests[-1]
    harness.coordinator.plan_received(failed, answer_for(harness.shape, failed))
    harness.wait(610.0, "W0_0", "W0_1", "W1_0")  # terabytes are read
    assert harness.effects.logged("planning failed") == []
    harness.coordinator.checkpoint_found(3)
    assert harness.phase is CoordinatorPhase.RUNNING
    assert harness.started().checkpoint == 3


def test_a_member_that_gave_up_a_stalled_coordinator_reconnects_and_goes_on() -> None:
    harness = CoordinatorHarness().form()
    harness.effects.at_us += 130_000_000
    harness.coordinator.tick()
    harness.coordinator.connection_lost(harness.at("W0_0"))  # found closed
    assert harness.rejoin(harness.at("W0_0")) is not None
    assert harness.rejoin(harness.at("W1_0")) is not None  # its old connection still counts as open
    assert len(harness.effects.logged("disconnect")) == 1
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.wait(3.0, "W0_0", "W0_1", "W1_0", "W1_1")
    harness.coordinator.connection_lost(harness.at("W0_0"))  # no stall explains this one
    assert harness.phase is CoordinatorPhase.STOPPING


def test_every_heartbeat_is_answered() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.receive(harness.at("W0_0"), RenewLease())
    assert harness.last("W0_0") == Ack(0)


def test_messages_of_another_epoch_are_ignored() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.recover()
    num_sent = {connection: len(sent) for connection, sent in harness.effects.sent.items()}
    for epoch in (1, 3):
        harness.stop("W0_0", ProgressReport(99), epoch=epoch)
        harness.coordinator.receive(harness.at("W0_0"), StoreEntry(epoch, "key", "value"))
        harness.coordinator.receive(harness.at("W0_0"), StoreRequest(epoch, ("key",)))
        harness.coordinator.receive(harness.at("W0_0"), EpochBegun(epoch, 1))
    assert harness.phase is CoordinatorPhase.RUNNING
    assert {connection: len(sent) for connection, sent in harness.effects.sent.items()} == num_sent
    harness.die("W1_0")
    harness.coordinator.receive(harness.at("W0_0"), EpochStopped(1, ProgressReport(99)))
    assert not harness.at("W0_0").has_stopped


def test_a_store_entry_goes_to_the_members_that_ask_for_it_and_to_no_other() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.receive(harness.at("W0_1"), StoreRequest(1, ("key",)))
    harness.coordinator.receive(harness.at("W0_0"), StoreEntry(1, "key", "value"))
    harness.coordinator.receive(harness.at("W1_0"), StoreRequest(1, ("key", "another")))
    for name in ("W0_1", "W1_0"):
        assert harness.last(name) == StoreEntry(1, "key", "value")
    for name in ("W0_0", "W1_1"):
        assert isinstance(harness.last(name), StartEpoch)


def test_a_job_is_done_when_all_have_finished() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.coordinator.member_finished(harness.at(name))
        assert harness.phase is CoordinatorPhase.RUNNING
    harness.coordinator.member_finished(harness.at("W1_1"))
    assert harness.phase is CoordinatorPhase.DONE
    assert harness.last("W0_0") == JobEnded("the job is done")
    assert harness.coordinator.refusal(None) == "the job is done"


def test_a_death_after_others_have_finished_does_not_end_the_job_before_its_work_is_done() -> None:
    harness = CoordinatorHarness().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.coordinator.member_finished(harness.at(name))
    harness.die("W1_1")
    assert harness.phase is CoordinatorPhase.STOPPING
    harness.recover(9)
    assert harness.phase is CoordinatorPhase.RUNNING
    for name in ("W0_0", "W0_1", "W1_0"):
        assert not harness.at(name).has_finished
        harness.coordinator.member_finished(harness.at(name))
    assert harness.phase is CoordinatorPhase.DONE


def test_all_may_finish_while_a_new_member_waits_for_a_place() -> None:
    harness = with_a_place_free()
    newcomer = harness.join("W1_1")
    for name in ("W0_0", "W0_1", "W1_0"):
        harness.coordinator.member_finished(harness.at(name))
    assert harness.phase is CoordinatorPhase.DONE
    assert newcomer.connection is not None
    assert harness.effects.sent[newcomer.connection][-1] == JobEnded("the job is done")


def test_an_epoch_is_in_the_journal_before_any_member_receives_it() -> None:
    harness = CoordinatorHarness().form()
    journaled: list[int] = []
    harness.effects.send = lambda connection, message: journaled.append(harness.journal.last().epoch)  # type: ignore[assignment,union-attr]
    harness.die("W1_1")
    journaled.clear()
    harness.stop_all()
    harness.answer()
    assert journaled == [2, 2, 2]


# A job that is asked to stop.


def test_a_job_that_is_asked_to_stop_pauses_and_its_last_epoch_only_saves() -> None:
    harness = CoordinatorHarness().form()
    harness.coordinator.stop_early()
    assert harness.phase is CoordinatorPhase.PAUSING
    assert harness.last("W0_0") == PauseAtBoundary(1)
    harness.stop_all(7)
    harness.answer()
    start = harness.started()
    assert (start.epoch, start.iteration, start.only_saves) == (2, 7, True)
    harness.begin()
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.join()  # too late
    assert harness.phase is CoordinatorPhase.RUNNING
    for member in harness.coordinator.members.placed:
        harness.coordinator.member_finished(member)
    assert harness.phase is CoordinatorPhase.DONE


def test_a_job_that_is_asked_to_stop_in_a_recovery_stops_after_it() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.coordinator.stop_early()
    assert harness.phase is CoordinatorPhase.STOPPING
    harness.recover(4)
    assert (harness.started().iteration, harness.started().only_saves) == (4, True)
    assert harness.phase is CoordinatorPhase.RUNNING


def test_a_job_that_is_asked_to_stop_while_members_begin_an_epoch_stops_when_they_have() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.stop_all(4)
    harness.answer()
    harness.coordinator.stop_early()
    assert not harness.started().only_saves
    harness.begin()
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.stop_all(5)
    harness.answer()
    assert (harness.started().iteration, harness.started().only_saves) == (5, True)


def test_without_members_for_every_stage_there_is_nothing_to_save() -> None:
    harness = CoordinatorHarness()
    harness.coordinator.stop_early()
    assert harness.effects.logged("cannot save") == [("cannot save",)]
