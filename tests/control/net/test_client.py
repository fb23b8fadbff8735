"""The client: it reconnects by itself, sends unacknowledged reports again, never sends its token, and leaves nothing behind."""

import base64
import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from queue import Empty, SimpleQueue

import pytest

from recycle.control.decide.messages import (
    Challenge,
    ControlMessage,
    EpochBegun,
    Hello,
    JobEnded,
    PauseAtBoundary,
    Refused,
    RenewLease,
    StopEpoch,
    StoreEntry,
    Welcome,
)
from recycle.control.net import client, handshake
from recycle.control.net.handshake import Endpoint, JoinRefused, this_host
from recycle.control.net.wire import encode, make_frame, new_nonce
from recycle.core.release import RELEASE
from tests.control.net.endpoint_harness import (
    JOB,
    LEASE_S,
    PATIENCE_S,
    TOKEN,
    FakeCoordinator,
    FakeMember,
    ServerHarness,
    closed_endpoint,
    num_open,
)
from tests.processes import depends_on_load, wait_for

pytestmark = pytest.mark.timeout(60)


def wait_until_closed(fake: FakeMember) -> None:
    wait_for(lambda: not fake.client.send(RenewLease()), PATIENCE_S)


class Restarts:
    """A coordinator that stops and restarts at the same port, with the same or with new callbacks."""

    def __init__(self) -> None:
        self.harness = ServerHarness()

    def stop(self) -> None:
        self.harness.close()

    def restart(self, is_another: bool = False) -> ServerHarness:
        callbacks = FakeCoordinator() if is_another else self.harness.callbacks
        callbacks.is_acknowledging = True
        self.harness = ServerHarness(self.harness.port, callbacks)
        return self.harness


@pytest.fixture
def restarts() -> Iterator[Restarts]:
    before, threads = num_open(), threading.active_count()
    made = Restarts()
    yield made
    made.stop()
    wait_for(lambda: (num_open(), threading.active_count()) == (before, threads), PATIENCE_S, "files or threads are left")


@pytest.fixture
def harness(restarts: Restarts) -> ServerHarness:
    return restarts.harness


# A coordinator that hangs.


def test_no_report_waits_for_a_coordinator_that_hangs_and_all_arrive_when_it_goes_on(harness: ServerHarness) -> None:
    fake, goes_on = harness.member(), threading.Event()
    harness.server.call_soon(lambda: goes_on.wait(PATIENCE_S) and None)
    start_s = time.monotonic()
    for _ in range(40):
        fake.client.report({"much": "x" * 1_000_000})  # more than any buffer of the kernel takes
    with depends_on_load():
        assert time.monotonic() - start_s < PATIENCE_S / 2
    goes_on.set()
    harness.callbacks.wait_for(lambda: len(harness.callbacks.received) >= 40)
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    assert harness.callbacks.report_numbers() == list(range(1, 41))
    fake.client.close()


def test_a_worker_says_once_that_the_coordinator_is_silent(restarts: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_SILENT_LEASES", 0.25)
    said: SimpleQueue[float] = SimpleQueue()
    fake = FakeMember(restarts.harness.endpoint(), on_silent=said.put)
    fake.client.join(PATIENCE_S)  # the coordinator of this test answers no heartbeat
    assert said.get(timeout=PATIENCE_S) > 0.5
    with pytest.raises(Empty):
        said.get(timeout=1.0)
    assert fake.echo_s() < PATIENCE_S
    fake.client.close()


def test_a_worker_leaves_a_connection_that_stays_silent_and_connects_again(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a firewall or a switch has forgotten the connection: neither end is told."""
    monkeypatch.setattr(client, "_GIVE_UP_S", 0.5)
    callbacks = restarts.harness.callbacks
    callbacks.is_acknowledging = False  # and it answers no heartbeat
    fake = restarts.harness.member("W0_1")
    fake.client.epoch = 4
    fake.client.report({"what": 1})
    callbacks.wait_for(lambda: callbacks.report_numbers() == [1])
    callbacks.is_acknowledging = True
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    assert [(hello.member, hello.epoch) for hello in callbacks.hellos[:2]] == [(-1, -1), (1, 4)]
    assert callbacks.report_numbers() == [1, 1]
    assert fake.refusals.empty()
    fake.client.close()


def test_a_worker_that_finds_no_coordinator_for_long_ends(restarts: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ORPHAN_S", 0.5)
    fake = restarts.harness.member()
    restarts.stop()
    assert "no coordinator has answered" in str(fake.refusals.get(timeout=PATIENCE_S))
    restarts.restart()


# Joining.


def test_a_worker_is_welcomed_and_identifies_itself(harness: ServerHarness) -> None:
    fake = FakeMember(harness.endpoint(), "W1_0")
    welcome = fake.client.join(PATIENCE_S)
    assert (welcome.member, welcome.lease_s, welcome.job) == (1, LEASE_S, JOB)
    assert fake.received.get(timeout=PATIENCE_S) == welcome
    (hello,) = harness.callbacks.hellos
    assert (hello.release, hello.job, hello.preferred_place, hello.pid, hello.host) == (
        RELEASE,
        JOB,
        "W1_0",
        os.getpid(),
        this_host(),
    )
    assert (hello.member, hello.epoch) == (-1, -1)
    fake.client.close()


def test_a_worker_renews_its_lease_before_it_is_over(harness: ServerHarness) -> None:
    numbers = count()
    fake = FakeMember(harness.endpoint(), heartbeat=lambda: RenewLease(next(numbers), 5))
    start_s = time.monotonic()
    fake.client.join(PATIENCE_S)
    harness.callbacks.wait_for(lambda: RenewLease(1, 5) in harness.callbacks.received)
    with depends_on_load():
        assert time.monotonic() - start_s < LEASE_S
    assert harness.callbacks.received[:2] == [RenewLease(0, 5), RenewLease(1, 5)]
    fake.client.close()


def test_a_worker_connects_until_a_coordinator_answers() -> None:
    restarts = Restarts()
    restarts.stop()
    fake = FakeMember(restarts.harness.endpoint())
    joining = threading.Thread(target=lambda: fake.client.join(PATIENCE_S), daemon=True)
    joining.start()
    restarts.restart()
    joining.join(PATIENCE_S)
    assert fake.echo_s() < PATIENCE_S
    fake.client.close()
    restarts.stop()


def test_a_worker_gives_up_when_no_coordinator_answers_in_time() -> None:
    with closed_endpoint() as endpoint, pytest.raises(OSError, match="refused"):
        FakeMember(endpoint).client.join(0.2)


def test_a_worker_that_joins_says_once_that_no_coordinator_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_UNANSWERED_S", 0.1)
    problems: list[OSError] = []
    with closed_endpoint() as endpoint, pytest.raises(OSError, match="refused"):
        FakeMember(endpoint).client.join(0.5, problems.append)
    assert [problem.strerror for problem in problems] == ["Connection refused"]


@pytest.mark.parametrize("token", ["", "another secret"])
def test_a_worker_without_the_token_is_refused_at_once(token: str, harness: ServerHarness) -> None:
    with pytest.raises(JoinRefused, match="this is not the job's token"):
        FakeMember(harness.endpoint(token)).client.join(PATIENCE_S)


def test_a_worker_of_another_job_is_refused_with_both_names(harness: ServerHarness) -> None:
    with pytest.raises(JoinRefused, match="this is job a1b2c3d4, not deadbeef"):
        FakeMember(harness.endpoint(job="deadbeef")).client.join(PATIENCE_S)


class Impostor:
    """A server that sends given bytes to its first connection, and then nothing more."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1], TOKEN, JOB)
        self._answers = answers
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        stream, _ = self._listener.accept()
        with stream:
            stream.settimeout(PATIENCE_S)
            for index, answer in enumerate(self._answers):
                if index:
                    stream.recv(1 << 16)
                stream.sendall(answer)
            while stream.recv(1 << 16):
                pass

    def close(self) -> None:
        self._thread.join(PATIENCE_S)
        self._listener.close()


def plain(message: ControlMessage) -> bytes:
    """A frame without a tag."""
    return b"".join(make_frame(encode(message), None))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([plain(Challenge(new_nonce(), RELEASE)), plain(Welcome(1, 2.0, JOB)) + bytes(16)], "is not its coordinator"),
        ([plain(Challenge("\ud800", RELEASE)), plain(Welcome(1, 2.0, JOB)) + bytes(16)], "is not its coordinator"),
        ([plain(Challenge(new_nonce(), RELEASE)), plain(Refused("go away")) + bytes(16)], "is not its coordinator"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "is no coordinator"),
        ([b"\x00\x00\x00\x04oops"], "is no coordinator"),
        ([plain(StopEpoch(1))], "is no coordinator"),
    ],
    ids=["no tag", "lone surrogates", "a refusal", "a web server", "no json", "no challenge"],
)
def test_a_worker_trusts_no_server_that_cannot_prove_the_token(answers: list[bytes], reason: str) -> None:
    before = num_open()
    impostor = Impostor(*answers)
    fake = FakeMember(impostor.endpoint)
    with pytest.raises(JoinRefused, match=reason):
        fake.client.join(PATIENCE_S)
    impostor.close()
    assert fake.received.empty()
    assert num_open() == before


def test_a_worker_does_not_wait_for_ever_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_CONNECT_S", 0.2)
    monkeypatch.setattr(client, "_ORPHAN_S", 0.3)  # it listens: it may be reading a long record
    impostor = Impostor()
    with pytest.raises(TimeoutError):
        FakeMember(impostor.endpoint).client.join(0.1)
    impostor.close()


def test_a_machine_that_does_not_exist_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    begin_s = time.monotonic()
    with pytest.raises(JoinRefused, match=r"there is no machine nowhere \(Name or service not known\)"):
        FakeMember(Endpoint("nowhere", 1, "token")).client.join(60.0)
    assert time.monotonic() < begin_s + 30


# The coordinator stops, and restarts.


def test_a_worker_reconnects_with_its_member_number_and_epoch(restarts: Restarts) -> None:
    fake = restarts.harness.member("W0_1")
    fake.client.epoch = 4
    restarts.stop()
    again = restarts.restart()
    again.callbacks.wait_for(lambda: len(again.callbacks.hellos) == 2)
    assert (again.callbacks.hellos[-1].member, again.callbacks.hellos[-1].epoch, again.callbacks.hellos[-1].preferred_place) == (
        1,
        4,
        "W0_1",
    )
    fake.next(Welcome)
    fake.next(Welcome)
    assert fake.echo_s() < PATIENCE_S
    fake.client.close()


def test_unacknowledged_reports_are_sent_again_exactly_and_in_order(restarts: Restarts) -> None:
    fake = restarts.harness.member()
    for number in range(3):
        fake.client.report({"what": number})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    restarts.harness.callbacks.is_acknowledging = False
    for number in range(3, 6):
        fake.client.report({"what": number})
    restarts.harness.callbacks.wait_for(lambda: len(restarts.harness.callbacks.report_numbers()) == 6)
    assert not fake.client.wait_until_acknowledged(0.05)
    restarts.stop()
    wait_until_closed(fake)
    for number in range(6, 9):
        fake.client.report({"what": number})  # without a coordinator
    fake.client.greeting = begun = EpochBegun(2, 20)
    again = restarts.restart(is_another=True)
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    fake.client.report({"what": 9})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    assert again.callbacks.report_numbers() == [4, 5, 6, 7, 8, 9, 10]
    # A step of an epoch never comes before the epoch in the record: one who reads it would take the step for redone.
    first, *reports = [message for message in again.callbacks.received if not isinstance(message, RenewLease)]
    assert first == begun
    assert [message.body for message in reports] == [{"what": number} for number in range(3, 10)]
    fake.client.close()


def test_no_report_is_lost_or_out_of_order_while_the_coordinator_restarts(restarts: Restarts) -> None:
    fake, is_over, callbacks = restarts.harness.member(), threading.Event(), restarts.harness.callbacks

    def report_on() -> None:
        while not is_over.wait(0.001):
            fake.client.report({"what": "something"})

    reporter = threading.Thread(target=report_on, daemon=True)
    reporter.start()
    for _ in range(3):
        num_reports = len(callbacks.report_numbers())
        callbacks.wait_for(lambda most=num_reports + 20: len(callbacks.report_numbers()) > most)  # type: ignore[misc]
        restarts.stop()
        restarts.restart()
    is_over.set()
    reporter.join(PATIENCE_S)
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    numbers = list(dict.fromkeys(callbacks.report_numbers()))
    assert numbers == list(range(1, len(numbers) + 1))
    fake.client.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28" + bytes(16)])
def test_a_worker_reconnects_although_another_program_answers_for_a_while(answer: bytes, restarts: Restarts) -> None:
    fake = restarts.harness.member()
    restarts.stop()
    with socket.create_server(("127.0.0.1", restarts.harness.port)) as other:
        stream, _ = other.accept()
        stream.sendall(answer)
        stream.close()
    again = restarts.restart()
    again.callbacks.wait_for(lambda: len(again.callbacks.hellos) == 2)
    fake.next(Welcome)
    fake.next(Welcome)
    assert fake.refusals.empty()
    fake.client.close()


def test_a_worker_that_was_taken_for_dead_is_refused_and_stays_away(restarts: Restarts) -> None:
    fake = restarts.harness.member()
    restarts.harness.callbacks.fenced.add(1)
    restarts.stop()
    restarts.restart()
    refusal = fake.refusals.get(timeout=PATIENCE_S)
    assert (str(refusal), refusal.may_retry) == ("it was taken for dead, and others do its work", True)
    assert not fake.client.send(RenewLease())
    assert len(restarts.harness.callbacks.hellos) == 2
    fake.client.close()


def test_a_worker_that_is_told_that_it_was_taken_for_dead_does_not_look_for_a_coordinator(restarts: Restarts) -> None:
    fake, harness = restarts.harness.member(), restarts.harness

    def turn_away() -> None:
        (connection,) = harness.server._connections
        harness.server.send(connection, Refused("it was taken for dead: silent for 9 s", may_retry=True))
        harness.server.disconnect(connection)

    harness.server.call_soon(turn_away)
    refusal = fake.refusals.get(timeout=PATIENCE_S)
    assert (str(refusal), refusal.may_retry) == ("it was taken for dead: silent for 9 s", True)
    restarts.stop()
    assert not fake.client.send(RenewLease())
    assert len(harness.callbacks.hellos) == 1
    fake.client.close()


def test_a_closed_client_does_not_reconnect(restarts: Restarts) -> None:
    fake = restarts.harness.member()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "control"]
    fake.client.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(restarts.harness.callbacks.hellos) == 1
    assert fake.refusals.empty()


def test_a_client_that_is_closed_while_it_connects_does_not_stay_connected(restarts: Restarts) -> None:
    """The coordinator admits the worker when it is closed already: the coordinator must notice that it has disconnected."""
    fake = restarts.harness.member()
    restarts.stop()
    is_near, may_enter = threading.Event(), threading.Event()

    class Slow(FakeCoordinator):
        def admit(self, connection: int, hello: Hello) -> Welcome | Refused:
            is_near.set()
            assert may_enter.wait(PATIENCE_S)
            return super().admit(connection, hello)

    restarts.harness.callbacks = Slow()
    again = restarts.restart()
    assert is_near.wait(PATIENCE_S)
    fake.client.close()
    may_enter.set()
    again.callbacks.wait_for(lambda: again.callbacks.num_disconnected == 1)
    assert fake.refusals.empty()


# Bytes on the wire.


class Tap:
    """A proxy between a worker and its coordinator that records every byte."""

    def __init__(self, port: int) -> None:
        self._port, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.bytes = bytearray()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        worker, _ = self._listener.accept()
        coordinator = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
        for source, sink in ((worker, coordinator), (coordinator, worker)):
            self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink), daemon=True))
            self._threads[-1].start()
        for thread in self._threads[1:]:
            thread.join(PATIENCE_S)
        worker.close()
        coordinator.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        while some := source.recv(1 << 16):
            self.bytes += some
            sink.sendall(some)
        with contextlib.suppress(OSError):  # the other side may have disconnected
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(PATIENCE_S)
        self._listener.close()


def test_the_token_is_never_on_the_wire(harness: ServerHarness) -> None:
    tap = Tap(harness.port)
    fake = FakeMember(Endpoint("127.0.0.1", tap.port, TOKEN, JOB), "W0_0")
    fake.client.join(PATIENCE_S)
    fake.client.report({"what": 1})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    fake.echo_s()
    fake.client.close()
    tap.close()
    sent = bytes(tap.bytes)
    assert b"W0_0" in sent  # the tap records the messages
    secret = TOKEN.encode()
    for form in (secret, secret.hex().encode(), base64.b64encode(secret), secret[::-1]):
        assert form not in sent


def test_messages_come_in_the_order_in_which_they_were_sent(harness: ServerHarness) -> None:
    fake = harness.member()
    sent = [PauseAtBoundary(1), StopEpoch(1), StoreEntry(1, "key", "value"), JobEnded("over")]
    (connection,) = harness.callbacks.numbers
    for message in sent:
        harness.server.call_soon(lambda message=message: harness.server.send(connection, message))  # type: ignore[misc]
    assert [fake.received.get(timeout=PATIENCE_S) for _ in range(5)][1:] == sent
    fake.client.close()


def test_a_worker_with_thousands_of_open_files_stays_connected(harness: ServerHarness) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine does not allow so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        null = stack.enter_context(open(os.devnull, "rb"))
        for _ in range(1100):
            stack.callback(os.close, os.dup(null.fileno()))
        fake = harness.member()
        for _ in range(3):
            assert fake.echo_s() < PATIENCE_S
        assert len(harness.callbacks.hellos) == 1
        fake.client.close()
        harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)


def test_sending_without_a_connection_returns_false(harness: ServerHarness) -> None:
    fake = FakeMember(harness.endpoint())
    assert not fake.client.send(RenewLease())
    fake.client.report({"what": 1})
    fake.client.join(PATIENCE_S)
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    assert harness.callbacks.report_numbers() == [1]
    fake.client.close()
    assert not fake.client.send(RenewLease())
