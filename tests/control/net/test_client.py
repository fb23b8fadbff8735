"""A worker's end: it comes back by itself, tells again what was not heard, never says its token, and leaves nothing behind."""

import base64
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from recycle.control.decide.messages import (
    Challenge,
    Hello,
    JobEnded,
    PauseAtBoundary,
    Refused,
    RenewLease,
    StopEpoch,
    StoreEntry,
    Welcome,
)
from recycle.control.net import handshake as knock
from recycle.control.net.handshake import Endpoint, JoinRefused, this_host
from recycle.control.net.wire import encode_frame, new_nonce
from recycle.core.release import RELEASE
from tests.control.net.endpoint_harness import JOB, LEASE_S, PATIENCE_S, TOKEN, Guest, Porter, Post, closed_door, num_open

pytestmark = pytest.mark.timeout(60)


def wait_until_closed(guest: Guest) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while guest.client.send(RenewLease()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


class Absences:
    """A coordinator that goes away and comes back at the same port, with a porter who remembers or not."""

    def __init__(self) -> None:
        self.post = Post()

    def go_away(self) -> None:
        self.post.close()

    def come_back(self, is_another: bool = False) -> Post:
        porter = Porter() if is_another else self.post.porter
        porter.is_hearing = True
        self.post = Post(self.post.port, porter)
        return self.post


@pytest.fixture
def absences() -> Iterator[Absences]:
    before, threads = num_open(), threading.active_count()
    made = Absences()
    yield made
    made.go_away()
    deadline_s = time.monotonic() + PATIENCE_S
    while (num_open(), threading.active_count()) != (before, threads):
        assert time.monotonic() < deadline_s, "files or threads are left"
        time.sleep(0.01)


@pytest.fixture
def post(absences: Absences) -> Post:
    return absences.post


# Getting in.


def test_a_worker_is_welcomed_and_says_who_it_is(post: Post) -> None:
    guest = Guest(post.door(), "W1_0")
    welcome = guest.client.join(PATIENCE_S)
    assert (welcome.member, welcome.lease_s, welcome.job) == (1, LEASE_S, JOB)
    assert guest.heard.get(timeout=PATIENCE_S) == welcome
    (hello,) = post.porter.hellos
    assert (hello.release, hello.job, hello.seat, hello.pid, hello.host) == (RELEASE, JOB, "W1_0", os.getpid(), this_host())
    assert (hello.member, hello.epoch) == (-1, -1)
    guest.client.close()


def test_a_worker_renews_its_lease_before_it_is_over(post: Post) -> None:
    numbers = count()
    guest = Guest(post.door(), pulse=lambda: RenewLease(next(numbers), 5))
    start_s = time.monotonic()
    guest.client.join(PATIENCE_S)
    post.porter.wait_for(lambda: RenewLease(1, 5) in post.porter.heard)
    assert time.monotonic() - start_s < LEASE_S
    assert post.porter.heard[:2] == [RenewLease(0, 5), RenewLease(1, 5)]
    guest.client.close()


def test_a_worker_knocks_until_somebody_opens() -> None:
    absences = Absences()
    absences.go_away()
    guest = Guest(absences.post.door())
    knocking = threading.Thread(target=lambda: guest.client.join(PATIENCE_S), daemon=True)
    knocking.start()
    absences.come_back()
    knocking.join(PATIENCE_S)
    assert guest.echo_s() < PATIENCE_S
    guest.client.close()
    absences.go_away()


def test_a_worker_gives_up_when_nobody_opens_for_too_long() -> None:
    with closed_door() as door, pytest.raises(OSError, match="refused"):
        Guest(door).client.join(0.2)


@pytest.mark.parametrize("token", ["", "another secret"])
def test_a_worker_without_the_token_is_turned_away_at_once(token: str, post: Post) -> None:
    with pytest.raises(JoinRefused, match="this is not the job's token"):
        Guest(post.door(token)).client.join(PATIENCE_S)


def test_a_worker_of_another_job_is_turned_away_by_name(post: Post) -> None:
    with pytest.raises(JoinRefused, match="this is job a1b2c3d4, not deadbeef"):
        Guest(post.door(job="deadbeef")).client.join(PATIENCE_S)


class Impostor:
    """Something that listens, answers the first caller with what it was given, and then says nothing more."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.door = Endpoint("127.0.0.1", self._listener.getsockname()[1], TOKEN, JOB)
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


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (
            [encode_frame(Challenge(new_nonce(), RELEASE)), encode_frame(Welcome("0" * 64, 1, 2.0, JOB))],
            "does not have the job's token",
        ),
        (
            [encode_frame(Challenge("\ud800", RELEASE)), encode_frame(Welcome("\ud800", 1, 2.0, JOB))],
            "does not have the job's token",
        ),
        ([encode_frame(Challenge(new_nonce(), RELEASE)), encode_frame(StopEpoch(1))], "the coordinator did not answer a hello"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "is no coordinator"),
        ([b"\x00\x00\x00\x04oops"], "is no coordinator"),
        ([encode_frame(StopEpoch(1))], "is no coordinator"),
    ],
    ids=["no proof", "half letters", "another word", "a web server", "no json", "no challenge"],
)
def test_a_worker_trusts_nobody_who_cannot_prove_the_token(answers: list[bytes], reason: str) -> None:
    before = num_open()
    impostor = Impostor(*answers)
    guest = Guest(impostor.door)
    with pytest.raises(JoinRefused, match=reason):
        guest.client.join(PATIENCE_S)
    impostor.close()
    assert guest.heard.empty()
    assert num_open() == before


def test_a_worker_does_not_wait_for_ever_for_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knock, "_CONNECT_S", 0.2)
    impostor = Impostor()
    with pytest.raises(TimeoutError):
        Guest(impostor.door).client.join(0.1)
    impostor.close()


# The coordinator goes away, and comes back.


def test_a_worker_comes_back_as_who_it_was(absences: Absences) -> None:
    guest = absences.post.member("W0_1")
    guest.client.epoch = 4
    absences.go_away()
    again = absences.come_back()
    again.porter.wait_for(lambda: len(again.porter.hellos) == 2)
    assert (again.porter.hellos[-1].member, again.porter.hellos[-1].epoch, again.porter.hellos[-1].seat) == (1, 4, "W0_1")
    guest.next(Welcome)
    guest.next(Welcome)
    assert guest.echo_s() < PATIENCE_S
    guest.client.close()


def test_what_was_not_heard_is_told_again_exactly_and_in_order(absences: Absences) -> None:
    guest = absences.post.member()
    for number in range(3):
        guest.client.tell({"what": number})
    assert guest.client.wait_until_heard(PATIENCE_S)
    absences.post.porter.is_hearing = False
    for number in range(3, 6):
        guest.client.tell({"what": number})
    absences.post.porter.wait_for(lambda: len(absences.post.porter.told()) == 6)
    assert not guest.client.wait_until_heard(0.05)
    absences.go_away()
    wait_until_closed(guest)
    for number in range(6, 9):
        guest.client.tell({"what": number})  # nobody is there
    again = absences.come_back(is_another=True)
    assert guest.client.wait_until_heard(PATIENCE_S)
    guest.client.tell({"what": 9})
    assert guest.client.wait_until_heard(PATIENCE_S)
    assert again.porter.told() == [4, 5, 6, 7, 8, 9, 10]
    assert [message.body for message in again.porter.heard if not isinstance(message, RenewLease)] == [
        {"what": number} for number in range(3, 10)
    ]
    guest.client.close()


def test_nothing_is_lost_or_turned_round_while_the_coordinator_comes_and_goes(absences: Absences) -> None:
    guest, is_over, porter = absences.post.member(), threading.Event(), absences.post.porter

    def tell_on() -> None:
        while not is_over.wait(0.001):
            guest.client.tell({"what": "something"})

    teller = threading.Thread(target=tell_on, daemon=True)
    teller.start()
    for _ in range(3):
        num_heard = len(porter.told())
        porter.wait_for(lambda most=num_heard + 20: len(porter.told()) > most)  # type: ignore[misc]
        absences.go_away()
        absences.come_back()
    is_over.set()
    teller.join(PATIENCE_S)
    assert guest.client.wait_until_heard(PATIENCE_S)
    told = list(dict.fromkeys(porter.told()))
    assert told == list(range(1, len(told) + 1))
    guest.client.close()


def test_who_was_taken_for_dead_meanwhile_is_refused_and_stays_away(absences: Absences) -> None:
    guest = absences.post.member()
    absences.post.porter.fenced.add(1)
    absences.go_away()
    absences.come_back()
    assert guest.refusals.get(timeout=PATIENCE_S) == "it was taken for dead, and others do its work"
    assert not guest.client.send(RenewLease())
    assert len(absences.post.porter.hellos) == 2
    guest.client.close()


def test_who_hung_up_does_not_come_back(absences: Absences) -> None:
    guest = absences.post.member()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "control"]
    guest.client.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(absences.post.porter.hellos) == 1
    assert guest.refusals.empty()


def test_who_hangs_up_while_it_knocks_is_not_let_in_any_more(absences: Absences) -> None:
    """The door opens when the worker has gone already: nobody may think that it is there."""
    guest = absences.post.member()
    absences.go_away()
    is_near, may_enter = threading.Event(), threading.Event()

    class Slow(Porter):
        def admit(self, caller: int, hello: Hello) -> Welcome | Refused:
            is_near.set()
            assert may_enter.wait(PATIENCE_S)
            return super().admit(caller, hello)

    absences.post.porter = Slow()
    again = absences.come_back()
    assert is_near.wait(PATIENCE_S)
    guest.client.close()
    may_enter.set()
    again.porter.wait_for(lambda: again.porter.num_lost == 1)
    assert guest.refusals.empty()


# What goes over the wire.


class Tap:
    """Something between a worker and its coordinator that hears every byte."""

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
        sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(PATIENCE_S)
        self._listener.close()


def test_the_token_is_never_on_the_wire(post: Post) -> None:
    tap = Tap(post.port)
    guest = Guest(Endpoint("127.0.0.1", tap.port, TOKEN, JOB), "W0_0")
    guest.client.join(PATIENCE_S)
    guest.client.tell({"what": 1})
    assert guest.client.wait_until_heard(PATIENCE_S)
    guest.echo_s()
    guest.client.close()
    tap.close()
    said = bytes(tap.bytes)
    assert b"W0_0" in said  # the tap hears what is said
    secret = TOKEN.encode()
    for form in (secret, secret.hex().encode(), base64.b64encode(secret), secret[::-1]):
        assert form not in said


def test_messages_come_in_the_order_in_which_they_were_said(post: Post) -> None:
    guest = post.member()
    said = [PauseAtBoundary(1), StopEpoch(1), StoreEntry(1, "key", "value"), JobEnded("over")]
    (caller,) = post.porter.numbers
    for message in said:
        post.server.call(lambda message=message: post.server.send(caller, message))  # type: ignore[misc]
    assert [guest.heard.get(timeout=PATIENCE_S) for _ in range(5)][1:] == said
    guest.client.close()


def test_a_worker_with_thousands_of_open_files_stays_connected(post: Post) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine does not allow so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        null = stack.enter_context(open(os.devnull, "rb"))
        for _ in range(1100):
            stack.callback(os.close, os.dup(null.fileno()))
        guest = post.member()
        for _ in range(3):
            assert guest.echo_s() < PATIENCE_S
        assert len(post.porter.hellos) == 1
        guest.client.close()
        post.porter.wait_for(lambda: post.porter.num_lost == 1)


def test_sending_without_a_connection_says_that_nobody_heard_it(post: Post) -> None:
    guest = Guest(post.door())
    assert not guest.client.send(RenewLease())
    guest.client.tell({"what": 1})
    guest.client.join(PATIENCE_S)
    assert guest.client.wait_until_heard(PATIENCE_S)
    assert post.porter.told() == [1]
    guest.client.close()
    assert not guest.client.send(RenewLease())
