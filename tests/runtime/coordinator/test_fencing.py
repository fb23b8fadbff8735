"""Fencing: the member's own process is killed, and no other."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from recycle.control.decide.members import Member
from recycle.control.net.handshake import this_host
from recycle.runtime.coordinator.fencing import fence, identify, is_running
from tests.processes import until


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
    assert until(lambda: process.poll() is not None, 10)
    assert not is_running(member)
    fence(member)  # it is gone already


def test_a_later_process_with_its_id_is_not(process: subprocess.Popen[bytes]) -> None:
    fence(replace(member_of(process), started="1"))
    assert not until(lambda: process.poll() is not None, 0.3)


def test_nor_is_a_process_with_its_id_if_the_member_is_on_another_machine_or_in_another_container() -> None:
    """A container has ids of its own: the member's may be that of this very process."""
    elsewhere = Member(1, None, "elsewhere", os.getpid(), None, 0.0)
    identify(elsewhere)
    assert not is_running(elsewhere)
    fence(elsewhere)
