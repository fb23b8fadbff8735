"""The coordinator was killed, and another one takes its place, who knows what the journal says."""

from dataclasses import replace
from pathlib import Path

import pytest

from recycle.control.decide.coordinator import CoordinatorPhase
from recycle.control.decide.journal import FileJournal
from recycle.control.decide.members import Member
from recycle.control.decide.messages import PauseAtBoundary, ProgressReport, StopEpoch, StoreEntry
from tests.control.decide.coordinator_harness import LEASE_S, Office, dead

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def restarted(tmp_path: Path) -> tuple[Office, dict[str, Member]]:
    """An office in its second epoch, W1_1 being dead, and a coordinator who knows it from the journal; its former members."""
    office = Office(journal=FileJournal(tmp_path / "journal.jsonl")).form()
    office.die("W1_1")
    office.recover()
    members = {str(member.seat): replace(member) for member in office.coordinator.members.values()}
    office.hire()
    office.desk.sent.clear()
    return office, members


def test_members_that_come_back_with_the_same_epoch_train_on(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    assert (office.phase, office.coordinator.epoch) == (CoordinatorPhase.RUNNING, 2)
    for member in members.values():
        assert office.come_back(member) is not None
    office.wait(5, *members)
    assert office.phase is CoordinatorPhase.RUNNING
    assert not any(office.desk.sent.values())
    assert office.desk.said("suspected") == []


def test_a_member_that_missed_the_beginning_of_an_epoch_has_all_stopped(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    office.come_back(members["W0_0"], epoch=1)
    assert office.phase is CoordinatorPhase.STOPPING
    assert office.last("W0_0") == StopEpoch(2)
    for name in ("W0_1", "W1_0"):
        office.come_back(members[name])
        assert office.last(name) == StopEpoch(2)
    office.recover()
    assert (office.go().epoch, sorted(office.go().seats)) == (3, ["W0_0", "W0_1", "W1_0"])


def test_a_member_that_does_not_come_back_within_its_lease_is_lost(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        office.come_back(member)
    office.wait(LEASE_S - 0.5, *members)
    assert office.phase is CoordinatorPhase.RUNNING
    office.wait(0.5, *members)
    assert office.phase is CoordinatorPhase.STOPPING
    office.recover()
    assert office.desk.questions == [dead("W1_1"), dead("W1_0", "W1_1")]
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]
    assert office.come_back(gone) is None


def test_a_member_that_never_came_back_is_fenced_where_it_was_last_seen(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        office.come_back(member)
    office.wait(LEASE_S + 0.5, *members)
    assert office.desk.said("fence") == [("fence", gone.host, gone.pid)]


def test_another_process_cannot_come_back_as_a_member(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    assert office.come_back(replace(members["W0_0"], pid=4)) is None
    assert office.come_back(members["W0_0"]) is not None
    assert office.come_back(members["W0_0"]) is None  # it is here already
    assert office.come_back(replace(members["W0_0"], number=77)) is None


def test_a_newcomer_gets_a_number_that_nobody_had(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    for member in members.values():
        office.come_back(member)
    newcomer = office.come("W1_1")
    assert newcomer.number == 5
    office.recover(9)
    assert office.go().seats["W1_1"] == 5


def test_members_that_had_stopped_say_so_again_and_go_on(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    for name, member in members.items():
        office.come_back(member)
        office.stop(name, ProgressReport(6))
    office.answer()
    assert (office.go().epoch, office.go().iteration) == (3, 6)


def test_who_was_away_gets_what_was_shared_meanwhile_and_nothing_of_epochs_that_are_over() -> None:
    office = Office().form()
    office.hire()  # the one before is gone
    members = {name: office.at(name) for name in ("W0_0", "W0_1", "W1_0", "W1_1")}
    early, late = members["W0_0"], members["W1_1"]
    for member in (early, members["W0_1"], members["W1_0"]):
        office.come_back(member)
    office.coordinator.hear(early, StoreEntry(1, "key", "value"))
    office.come_back(late)
    assert office.last("W1_1") == StoreEntry(1, "key", "value")
    office.die("W1_0")
    office.recover()
    office.at("W0_0").caller = None
    office.come_back(office.at("W0_0"))
    assert office.desk.sent[office.num_callers] == []


def test_who_comes_back_while_others_pause_for_a_newcomer_gets_both_what_was_shared_and_the_pause() -> None:
    office = Office().form()
    office.die("W1_1")
    office.recover()
    office.hire()
    early, late = office.at("W0_0"), office.at("W1_0")
    for name in ("W0_0", "W0_1"):
        office.come_back(office.at(name))
    office.coordinator.hear(early, StoreEntry(2, "key", "value"))
    office.come("W1_1")
    assert office.phase is CoordinatorPhase.PAUSING
    office.come_back(late)
    assert office.desk.sent[office.num_callers] == [StoreEntry(2, "key", "value"), PauseAtBoundary(2)]
