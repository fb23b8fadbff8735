"""A connection with a purpose is served by a coordinator that leads for certain, and by no other."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from recycle.control.decide.messages import Hello, Refused, Welcome
from recycle.control.net.file_transfer import PURPOSE
from recycle.control.net.leader_probe import PROBE_PURPOSE
from recycle.control.net.wire import MOST_BYTES, FrameReader, Seal, Session
from recycle.runtime.coordinator.connection_tasks import task_of_purpose

RUN: Any = SimpleNamespace(transfer_task=lambda: "the task of a file")


def ask(purpose: str, is_certain: bool = True, job: str = "a", run: Any = RUN) -> Any:
    gate: Any = SimpleNamespace(is_certain=is_certain, journal=SimpleNamespace(term=7))
    hello = Hello(release="", job=job, host="", pid=1, nonce="", clock_us=0, purpose=purpose)
    return task_of_purpose(hello, "a", run, gate)


def test_a_leader_serves_files_and_says_its_term() -> None:
    assert ask(PURPOSE) == "the task of a file"
    worker, coordinator = socket.socketpair()
    with worker:
        ask(PROBE_PURPOSE)(Session(coordinator, FrameReader(MOST_BYTES), Seal("token", "coordinator")))
        reader = FrameReader(MOST_BYTES, Seal("token", "coordinator"))
        answer = reader.receive(worker.recv, "closed")
    assert isinstance(answer, Welcome)
    assert answer.term == 7


@pytest.mark.parametrize("purpose", [PURPOSE, PROBE_PURPOSE])
def test_one_that_may_not_lead_refuses_so_that_another_is_tried(purpose: str) -> None:
    refused = ask(purpose, is_certain=False)
    assert isinstance(refused, Refused)
    assert refused.tries_again


@pytest.mark.parametrize("given", [{"purpose": "tea"}, {"purpose": PURPOSE, "job": "b"}, {"purpose": PURPOSE, "run": None}])
def test_what_no_coordinator_of_the_job_serves_is_refused_for_good(given: dict[str, Any]) -> None:
    refused = ask(**given)
    assert isinstance(refused, Refused)
    assert not refused.tries_again
    assert refused.reason.startswith("job a serves no connection for")
