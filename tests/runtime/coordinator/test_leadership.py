"""What a coordinator does while the store is away, and when another coordinator leads: it waits, says so, or steps down."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from recycle.control.decide.journal import JournalEntry
from recycle.control.decide.messages import ALIVE, Ack, StopEpoch
from recycle.control.store.protocol import StoreAway
from recycle.core.errors import LeadershipLost
from recycle.runtime.coordinator import background
from recycle.runtime.coordinator.leadership import DecisionGate

pytestmark = pytest.mark.timeout(60)
ENTRY = JournalEntry(1, 0, {}, "", "a worker died", 0)


class FakeStore:
    """A store that is away, or that another coordinator leads, as a test says."""

    def __init__(self, lease_s: float = 0.2) -> None:
        self.lease_s, self.term, self.problem = lease_s, 1, None
        self.entries: list[JournalEntry] = []

    problem: Exception | None

    def renew(self) -> None:
        if self.problem is not None:
            raise self.problem

    def append(self, entry: JournalEntry) -> None:
        self.renew()
        self.entries.append(entry)

    def last(self) -> None:
        return None


class Harness:
    def __init__(self, store: FakeStore) -> None:
        self.store, self.sent, self.warnings, self.lost = store, list[Any](), list[str](), list[LeadershipLost]()
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        server: Any = SimpleNamespace(call_soon=self.calls.put, send_encoded=lambda number, message: self.sent.append(number))
        self.gate = DecisionGate(store, server, self.warnings.append, self.lost.append)  # type: ignore[arg-type]

    def serve_until(self, condition: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end_s
            while not self.calls.empty():
                self.calls.get()()
            time.sleep(0.01)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(background, "_RETRY_S", 0.02)
    made = Harness(FakeStore())
    made.serve_until(lambda: made.gate.is_certain)
    yield made
    made.gate.close()


def test_messages_wait_until_the_entry_is_stored_and_answers_to_heartbeats_do_not(harness: Harness) -> None:
    harness.store.problem = StoreAway("nobody answers")
    harness.gate.journal.append(ENTRY)
    harness.gate.send_all([1, 2], StopEpoch(1))
    harness.gate.send_all([3], Ack(0))
    harness.serve_until(lambda: any("the next epoch waits for the store" in text for text in harness.warnings))
    assert harness.sent == [3]
    harness.store.problem = None
    harness.serve_until(lambda: harness.sent == [3, 1, 2])
    assert harness.store.entries == [ENTRY]
    assert sum("waits for the store, which" in text for text in harness.warnings) == 1


def test_nobody_is_given_up_while_it_is_not_certain_who_leads(harness: Harness) -> None:
    done: list[str] = []
    harness.gate.when_certain(lambda: done.append("at once"), "W0_0 has disconnected")
    harness.store.problem = StoreAway("nobody answers")
    harness.serve_until(lambda: not harness.gate.is_certain and bool(harness.warnings))
    harness.gate.when_certain(lambda: done.append("later"), "W0_1 has disconnected")
    assert done == ["at once"]
    assert harness.warnings[0].startswith("the store does not answer: nobody answers; training goes on")
    assert "W0_1 has disconnected, but it is not certain that this coordinator leads" in harness.warnings[1]
    harness.store.problem = None
    harness.serve_until(lambda: done == ["at once", "later"])
    assert harness.warnings[-1] == "the store answers again"
    assert harness.gate.has_waited()
    assert not harness.gate.has_waited()


class PausedStore(FakeStore):
    """A store whose renewals a test holds up, as a machine that is short of time does; it is never away."""

    def __init__(self) -> None:
        super().__init__()
        self.may_renew = threading.Event()
        self.may_renew.set()

    def renew(self) -> None:
        assert self.may_renew.wait(20)
        super().renew()


def test_a_loss_is_decided_once_also_if_certainty_lapses_and_returns_within_one_renewal() -> None:
    harness, done = Harness(PausedStore()), list[str]()
    store = harness.store
    assert isinstance(store, PausedStore)
    harness.serve_until(lambda: harness.gate.is_certain)
    for name in ("W0_0", "W0_1"):
        store.may_renew.clear()
        harness.serve_until(lambda: not harness.gate.is_certain)
        harness.gate.when_certain(lambda name=name: done.append(name), f"{name} has disconnected")  # type: ignore[misc]
        store.may_renew.set()  # the renewal succeeds: nobody was told that it was uncertain
        harness.serve_until(lambda name=name: name in done)  # type: ignore[misc]
    for _ in range(3):
        time.sleep(store.lease_s / 4)
        harness.serve_until(lambda: True)
    assert done == ["W0_0", "W0_1"]
    assert not [text for text in harness.warnings if "answers again" in text]
    harness.gate.close()


def test_a_loss_waits_on_if_certainty_lapses_again_before_it_is_decided() -> None:
    harness, done = Harness(PausedStore()), list[str]()
    store = harness.store
    assert isinstance(store, PausedStore)
    harness.serve_until(lambda: harness.gate.is_certain)
    store.may_renew.clear()
    harness.serve_until(lambda: not harness.gate.is_certain)
    harness.gate.when_certain(lambda: done.append("W0_0"), "W0_0 has disconnected")
    store.may_renew.set()
    while harness.calls.empty():  # the call that the leadership is certain again waits, since the serving thread is busy
        time.sleep(0.01)
    store.may_renew.clear()
    while harness.gate.is_certain:
        time.sleep(0.01)
    harness.serve_until(lambda: True)
    assert done == []
    store.may_renew.set()
    harness.serve_until(lambda: done == ["W0_0"])
    harness.gate.close()


def test_a_coordinator_steps_down_once_when_another_leads_and_sends_nothing_that_rests_on_a_refused_entry(
    harness: Harness,
) -> None:
    harness.store.problem = LeadershipLost("another coordinator leads the job")
    harness.gate.journal.append(ENTRY)
    harness.gate.send_all([1], StopEpoch(1))
    harness.serve_until(lambda: bool(harness.lost))
    time.sleep(0.2)
    harness.serve_until(lambda: True)
    assert [str(problem) for problem in harness.lost] == ["another coordinator leads the job"]
    assert (harness.sent, harness.gate.journal.num_pending) == ([], 1)


def test_heartbeats_are_not_answered_while_it_is_not_certain_who_leads(harness: Harness) -> None:
    harness.gate.send_all([1], ALIVE)
    harness.store.problem = StoreAway("nobody answers")
    harness.serve_until(lambda: not harness.gate.is_certain)
    harness.gate.send_all([2], ALIVE)
    harness.gate.send_all([3], StopEpoch(1))
    assert harness.sent == [1, 3]
    harness.store.problem = None
    harness.serve_until(lambda: harness.gate.is_certain)
    harness.gate.send_all([4], ALIVE)
    assert harness.sent == [1, 3, 4]


def test_a_file_is_always_led() -> None:
    made = Harness(FakeStore(lease_s=0.0))
    assert made.gate.is_certain
    made.gate.close()
