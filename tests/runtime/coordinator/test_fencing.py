"""Fencing: the member's own process is killed, and no other."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.control.decide.members import Member, MemberTable
from recycle.control.decide.new_epoch import NewEpoch, journal_entry
from recycle.control.net.handshake import this_host
from recycle.control.store.file_store import FileStore
from recycle.core.cluster import Worker
from recycle.runtime.coordinator.fencing import fence, identify, is_running
from tests.processes import until, wait_for


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def member_of(process: subprocess.Popen[bytes]) -> Member:
    member = Member(1, None, this_host(), process.pid, None, 0.0)
    identify(member)
    return member


def test_a_member_on_this_machine_is_killed(process: subprocess.Popen[bytes]) -> None:
    member = member_of(process)
    assert is_running(member)
    fence(member)
    wait_for(lambda: process.poll() is not None, 10)
    assert not is_running(member)
    fence(member)  # it is gone already


def test_a_later_process_with_its_id_is_not(process: subprocess.Popen[bytes]) -> None:
    fence(replace(member_of(process), started="1"))
    assert not until(lambda: process.poll() is not None, 0.3)


def test_nor_is_one_of_which_a_coordinator_that_took_over_does_not_know_the_start(process: subprocess.Popen[bytes]) -> None:
    fence(replace(member_of(process), started=""))
    assert not until(lambda: process.poll() is not None, 0.3)


def test_a_coordinator_that_takes_over_knows_the_start_from_the_journal(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    member, journal = member_of(process), FileStore(tmp_path / "journal.jsonl")
    journal.campaign()
    journal.append(journal_entry(NewEpoch(1, "", {"W0_0": 1}, 0), {Worker(0, 0): member}, "the job began", 1, {}))
    entry = journal.last()
    assert entry is not None
    fence(MemberTable.of(entry, 0.0)[1])
    wait_for(lambda: process.poll() is not None, 10)


def test_nor_is_a_process_with_its_id_if_the_member_is_on_another_machine_or_in_another_container() -> None:
    """A container has ids of its own: the member's may be that of this very process."""
    elsewhere = Member(1, None, "elsewhere", os.getpid(), None, 0.0)
    identify(elsewhere)
    assert not is_running(elsewhere)
    fence(elsewhere)
