"""The coordinator from its first member to its last: how a job begins, who is heard and who is suspected, how it ends."""

import pytest

from recycle.control.decide.coordinator import CoordinatorPhase
from recycle.control.decide.messages import EpochBegun, EpochStopped, JobEnded, ProgressReport, RenewLease, StartEpoch, StoreEntry
from recycle.core.cluster import Worker
from tests.control.decide.coordinator_harness import LEASE_S, W0_0, Office, dead, with_a_place_free

pytestmark = pytest.mark.timeout(60)


# How a job begins.


def test_a_job_begins_when_every_row_of_its_plan_has_a_worker() -> None:
    office = Office()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.come(name)
        assert office.phase is CoordinatorPhase.FORMING
    office.come("W1_1")
    assert office.phase is CoordinatorPhase.RUNNING
    assert office.go() == StartEpoch(1, office.initial.plan.dumps(), {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}, 0)


def test_a_job_does_not_begin_before_plans_can_be_made() -> None:
    office = Office()
    office.desk.is_prepared = False
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.phase is CoordinatorPhase.FORMING
    office.desk.is_prepared = True
    office.coordinator.seat_newcomers()
    assert office.phase is CoordinatorPhase.RUNNING


def test_who_wishes_for_nothing_gets_what_is_left_even_if_it_came_first() -> None:
    office = Office()
    anybody = office.come()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.come(name)
    assert office.go().seats == {"W0_0": 2, "W0_1": 3, "W1_0": 4, "W1_1": anybody.number}


def test_a_place_that_is_claimed_or_does_not_exist_is_refused_with_a_reason() -> None:
    office = Office()
    office.come("W0_0")
    assert office.coordinator.why_not(W0_0) == "W0_0 is taken: another worker has come for it"
    assert office.coordinator.why_not(Worker(2, 0)) == "W2_0 is no place in this job of 2 pipelines of 2 stages"
    for name in ("W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.coordinator.why_not(None) == "all 4 places are taken"


def test_who_dies_before_the_job_begins_is_waited_for_again() -> None:
    office = Office()
    office.come("W0_0")
    office.die("W0_0")
    for name in ("W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.phase is CoordinatorPhase.FORMING
    office.come("W0_0")
    assert office.go().seats == {"W0_1": 2, "W1_0": 3, "W1_1": 4, "W0_0": 5}


def test_one_more_than_the_first_plan_needs_joins_right_after_the_beginning() -> None:
    office = Office(initially=dead("W1_1"))
    office.come("W1_1")
    for name in ("W0_0", "W0_1"):
        office.come(name)
    assert (
        office.phase is CoordinatorPhase.RUNNING
    )  # whoever wished for a place that the plan leaves empty sits where it is needed
    office.begin()
    office.come()
    assert office.phase is CoordinatorPhase.PAUSING
    office.recover()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0", "W1_1"]


# Who is silent, who is late, who is done.


def test_a_suspect_is_fenced_before_anybody_takes_its_work() -> None:
    office = Office().form()
    others = ("W0_0", "W0_1", "W1_0")
    office.wait(LEASE_S, *others)
    office.stop_all()
    names = [entry[0] for entry in office.desk.log]
    assert names == ["began", "suspected", "fence", "hang up", "left", "ask"]
    assert office.desk.said("suspected") == [("suspected", "W1_1", "silent for 2.0 s, with a lease of 2 s")]


def test_who_computes_one_op_for_too_long_is_suspected_though_it_speaks() -> None:
    office = Office().form()
    office.coordinator.longest_op_s = 0.3
    for busy_us, phase in ((2_900_000, CoordinatorPhase.RUNNING), (3_100_000, CoordinatorPhase.STOPPING)):
        office.coordinator.hear(office.at("W1_1"), RenewLease(3, busy_us))
        office.coordinator.tick()
        assert office.phase is phase


def test_words_of_another_epoch_are_not_listened_to() -> None:
    office = Office().form()
    office.die("W1_1")
    office.recover()
    heard = {caller: len(said) for caller, said in office.desk.sent.items()}
    for epoch in (1, 3):
        office.stop("W0_0", ProgressReport(99), epoch=epoch)
        office.coordinator.hear(office.at("W0_0"), StoreEntry(epoch, "key", "value"))
        office.coordinator.hear(office.at("W0_0"), EpochBegun(epoch, 1))
    assert office.phase is CoordinatorPhase.RUNNING
    assert {caller: len(said) for caller, said in office.desk.sent.items()} == heard
    office.die("W1_0")
    office.coordinator.hear(office.at("W0_0"), EpochStopped(1, ProgressReport(99)))
    assert not office.at("W0_0").has_stopped


def test_what_is_shared_goes_to_all_who_sit() -> None:
    office = Office().form()
    office.coordinator.hear(office.at("W0_0"), StoreEntry(1, "key", "value"))
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        assert office.last(name) == StoreEntry(1, "key", "value")


def test_a_job_is_done_when_all_have_finished() -> None:
    office = Office().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
        assert office.phase is CoordinatorPhase.RUNNING
    office.coordinator.finished(office.at("W1_1"))
    assert office.phase is CoordinatorPhase.DONE
    assert office.last("W0_0") == JobEnded("the job is done")
    assert office.coordinator.why_not(None) == "the job is done"


def test_who_dies_while_others_have_finished_does_not_end_the_job_before_the_rest_have_its_work() -> None:
    office = Office().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
    office.die("W1_1")
    assert office.phase is CoordinatorPhase.STOPPING
    office.recover(9)
    assert office.phase is CoordinatorPhase.RUNNING
    for name in ("W0_0", "W0_1", "W1_0"):
        assert not office.at(name).has_finished
        office.coordinator.finished(office.at(name))
    assert office.phase is CoordinatorPhase.DONE


def test_all_may_finish_while_somebody_waits_to_be_let_in() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
    assert office.phase is CoordinatorPhase.DONE
    assert newcomer.caller is not None
    assert office.desk.sent[newcomer.caller][-1] == JobEnded("the job is done")


def test_an_epoch_is_in_the_journal_before_anybody_is_told_of_it() -> None:
    office = Office().form()
    told: list[int] = []
    office.desk.send_all = lambda callers, message: told.append(office.journal.last().epoch)  # type: ignore[assignment,union-attr]
    office.die("W1_1")
    told.clear()
    office.stop_all()
    office.answer()
    assert told == [2]
