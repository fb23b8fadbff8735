"""A coordinator that replaces a killed one, with the journal as its only knowledge."""

from dataclasses import replace
from pathlib import Path

import pytest

from recycle.control.decide.coordinator import Coordinator
from recycle.control.decide.members import Member
from recycle.control.decide.messages import Ack, PauseAtBoundary, ProgressReport, StopEpoch, StoreEntry, StoreRequest
from recycle.control.decide.phases import CoordinatorPhase
from recycle.control.store.file_store import FileStore
from tests.builders import dead
from tests.control.decide.coordinator_harness import LEASE_S, CoordinatorHarness, MemoryJournal

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def restarted(tmp_path: Path) -> tuple[CoordinatorHarness, dict[str, Member]]:
    """A harness in its second epoch with W1_1 dead, whose coordinator has read the journal; and its former members."""
    journal = FileStore(tmp_path / "journal.jsonl")
    journal.campaign()
    harness = CoordinatorHarness(journal=journal).form()
    harness.die("W1_1")
    harness.recover()
    members = {str(member.place): replace(member) for member in harness.coordinator.members.values()}
    harness.start_coordinator()
    harness.effects.sent.clear()
    return harness, members


def test_members_that_reconnect_in_the_same_epoch_train_on(restarted: tuple[CoordinatorHarness, dict[str, Member]]) -> None:
    harness, members = restarted
    assert (harness.phase, harness.coordinator.epoch) == (CoordinatorPhase.RUNNING, 2)
    for member in members.values():
        assert harness.rejoin(member) is not None
    harness.wait(5, *members)
    assert harness.phase is CoordinatorPhase.RUNNING
    assert {message for sent in harness.effects.sent.values() for message in sent} == {Ack(0)}
    assert harness.effects.logged("suspected") == []


def test_members_have_a_lease_more_to_come_back_if_the_coordinator_is_on_another_machine() -> None:
    harness = CoordinatorHarness().form()
    members = {str(member.place): replace(member) for member in harness.coordinator.members.values()}
    assert isinstance(harness.journal, MemoryJournal)
    harness.journal = MemoryJournal(harness.journal)
    harness.journal.lease_s = LEASE_S
    harness.coordinator = Coordinator(harness.shape, harness.initial, 0, harness.effects, harness.journal, LEASE_S)
    harness.wait(1.5 * LEASE_S)
    assert harness.effects.logged("suspected") == []
    for name in ("W0_0", "W0_1", "W1_0"):
        assert harness.rejoin(members[name]) is not None
    harness.wait(LEASE_S, "W0_0", "W0_1", "W1_0")
    assert [name for _, name, _ in harness.effects.logged("suspected")] == ["W1_1"]


def test_a_member_that_missed_the_beginning_of_an_epoch_has_all_stopped(
    restarted: tuple[CoordinatorHarness, dict[str, Member]],
) -> None:
    harness, members = restarted
    harness.rejoin(members["W0_0"], epoch=1)
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.last("W0_0") == StopEpoch(2)
    for name in ("W0_1", "W1_0"):
        harness.rejoin(members[name])
        assert harness.last(name) == StopEpoch(2)
    harness.recover()
    assert (harness.started().epoch, sorted(harness.started().places)) == (3, ["W0_0", "W0_1", "W1_0"])


def test_a_member_that_missed_the_beginning_has_all_stopped_also_while_they_pause_for_a_new_one(
    restarted: tuple[CoordinatorHarness, dict[str, Member]],
) -> None:
    harness, members = restarted
    harness.rejoin(members["W1_0"])
    harness.join("W1_1")
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.rejoin(members["W0_0"], epoch=1)
    assert harness.phase is CoordinatorPhase.STOPPING
    assert harness.last("W0_0") == StopEpoch(2)


def test_a_member_that_does_not_reconnect_within_its_lease_is_removed(
    restarted: tuple[CoordinatorHarness, dict[str, Member]],
) -> None:
    harness, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        harness.rejoin(member)
    harness.wait(LEASE_S - 0.5, *members)
    assert harness.phase is CoordinatorPhase.RUNNING
    harness.wait(0.5, *members)
    assert harness.phase is CoordinatorPhase.STOPPING
    harness.recover()
    assert harness.effects.plan_requests == [dead("W1_1"), dead("W1_0", "W1_1")]
    assert sorted(harness.started().places) == ["W0_0", "W0_1"]
    assert harness.rejoin(gone) is None


def test_a_member_that_never_reconnects_is_fenced_by_its_host_and_pid(
    restarted: tuple[CoordinatorHarness, dict[str, Member]],
) -> None:
    harness, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        harness.rejoin(member)
    harness.wait(LEASE_S + 0.5, *members)
    assert harness.effects.logged("fence") == [("fence", gone.host, gone.pid)]


def test_another_process_cannot_reconnect_as_a_member(restarted: tuple[CoordinatorHarness, dict[str, Member]]) -> None:
    harness, members = restarted
    assert harness.rejoin(replace(members["W0_0"], pid=4)) is None
    assert harness.rejoin(members["W0_0"]) is not None
    assert harness.rejoin(members["W0_0"]) is not None  # it gave up its connection, of which the coordinator does not know
    assert len(harness.effects.logged("disconnect")) == 1
    assert harness.rejoin(replace(members["W0_0"], number=77)) is None


def test_a_new_member_gets_a_number_that_no_member_had(restarted: tuple[CoordinatorHarness, dict[str, Member]]) -> None:
    harness, members = restarted
    for member in members.values():
        harness.rejoin(member)
    newcomer = harness.join("W1_1")
    assert newcomer.number == 5
    harness.recover(9)
    assert harness.started().places["W1_1"] == 5


def test_members_that_had_stopped_report_it_again_and_resume(restarted: tuple[CoordinatorHarness, dict[str, Member]]) -> None:
    harness, members = restarted
    for name, member in members.items():
        harness.rejoin(member)
        harness.stop(name, ProgressReport(6))
    harness.answer()
    assert (harness.started().epoch, harness.started().iteration) == (3, 6)


def test_a_member_that_reconnects_can_ask_for_the_store_entries_of_its_epoch_and_of_no_former_one() -> None:
    harness = CoordinatorHarness().form()
    harness.start_coordinator()  # the former one is gone
    members = {name: harness.at(name) for name in ("W0_0", "W0_1", "W1_0", "W1_1")}
    early, late = members["W0_0"], members["W1_1"]
    for member in (early, members["W0_1"], members["W1_0"]):
        harness.rejoin(member)
    harness.coordinator.receive(early, StoreEntry(1, "key", "value"))
    harness.rejoin(late)
    harness.coordinator.receive(late, StoreRequest(1, ("key",)))
    assert harness.last("W1_1") == StoreEntry(1, "key", "value")
    harness.die("W1_0")
    harness.recover()
    harness.at("W0_0").connection = None
    harness.rejoin(harness.at("W0_0"))
    harness.coordinator.receive(harness.at("W0_0"), StoreRequest(2, ("key",)))
    assert harness.effects.sent[harness.num_connections] == []


def test_a_member_that_reconnects_during_a_pause_hears_of_the_pause() -> None:
    harness = CoordinatorHarness().form()
    harness.die("W1_1")
    harness.recover()
    harness.start_coordinator()
    late = harness.at("W1_0")
    for name in ("W0_0", "W0_1"):
        harness.rejoin(harness.at(name))
    harness.join("W1_1")
    assert harness.phase is CoordinatorPhase.PAUSING
    harness.rejoin(late)
    assert harness.effects.sent[harness.num_connections] == [PauseAtBoundary(2)]
