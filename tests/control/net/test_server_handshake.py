"""The handshake at the server: connections without the token are refused with a reason, and disturb no member."""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from recycle.control.decide.messages import Challenge, Report, StopEpoch, Welcome, dumps
from recycle.control.net import handshake, server
from recycle.control.net.handshake import JoinRefused
from recycle.core.release import RELEASE
from tests.control.net.endpoint_harness import LEASE_S, PATIENCE_S, FakeMember, RawConnection, ServerHarness
from tests.processes import depends_on_load

pytestmark = pytest.mark.timeout(60)


def wrong_token(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(token="another secret"))


def no_tag(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello()[:-16] + bytes(16))


def a_changed_hello(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello().replace(b"there", b"where"))


def a_number_for_a_nonce(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(nonce=5))


def another_release(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(release="0.0.9"))


def another_job(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(job="deadbeef"))


def a_place_that_is_taken(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(preferred_place="W0_0"))


def a_web_browser(raw: RawConnection) -> None:
    raw.stream.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def a_huge_length(raw: RawConnection) -> None:
    raw.stream.sendall(struct.pack(">I", 0xFFFFFFFF))


def a_long_hello(raw: RawConnection) -> None:
    raw.stream.sendall(raw.hello(host="x" * 5000))


def no_json(raw: RawConnection) -> None:
    raw.prove()
    raw.stream.sendall(raw.frame(b"\x80\x03}q\x00X.\xff"))


def no_json_and_no_tag(raw: RawConnection) -> None:
    raw.stream.sendall(struct.pack(">I", 8) + b"\x80\x03}q\x00X.\xff" + bytes(16))


def a_number_that_is_too_large(raw: RawConnection) -> None:
    body = b'{"type":"epoch_stopped","epoch":1,"progress":{"num_steps":1,"own":{"iteration":1,"norms":[1' + b"0" * 400 + b"]}}}"
    raw.prove()
    raw.stream.sendall(raw.frame(body))


def another_first_message(raw: RawConnection) -> None:
    raw.prove()
    raw.stream.sendall(raw.frame(dumps(StopEpoch(1))))


REFUSED = {
    wrong_token: "this is not the job's token",
    no_tag: "this is not the job's token",
    a_changed_hello: "this is not the job's token",
    a_number_for_a_nonce: "this is no message: TypeError",
    another_release: f"the worker is of release 0.0.9, but the job runs {RELEASE}",
    another_job: "this is job a1b2c3d4, not deadbeef",
    a_place_that_is_taken: "W0_0 is taken: another worker has come for it",
    a_web_browser: "a message of 1195725856 bytes, where 4096 are the most",
    a_huge_length: "a message of 4294967295 bytes, where 4096 are the most",
    a_long_hello: "bytes, where 4096 are the most",
    no_json: "this is no message",
    no_json_and_no_tag: "this is not the job's token",
    a_number_that_is_too_large: "this is no message: OverflowError",
    another_first_message: "the first message must be a hello",
}


@pytest.mark.parametrize("attack", REFUSED, ids=lambda attack: attack.__name__)
def test_a_wrong_connection_is_refused_with_a_reason_and_disturbs_no_member(
    attack: Callable[[RawConnection], None], harness: ServerHarness, member: FakeMember
) -> None:
    for _ in range(3):
        raw = harness.connect()
        attack(raw)
        assert REFUSED[attack] in raw.refusal()


def test_a_hello_cannot_be_replayed(harness: ServerHarness, member: FakeMember) -> None:
    worker, thief = harness.connect(), harness.connect()
    hello = worker.hello()
    worker.stream.sendall(hello)
    assert isinstance(worker.next(), Welcome)
    assert isinstance(thief.next(), Challenge)
    thief.stream.sendall(hello)
    assert thief.refusal() == "this is not the job's token"
    worker.stream.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    harness.callbacks.num_disconnected = 0


def test_every_connection_gets_another_challenge(harness: ServerHarness) -> None:
    connections = [harness.connect() for _ in range(5)]
    said = [raw.next() for raw in connections]
    for raw in connections:
        raw.stream.close()
    assert len({message.nonce for message in said if isinstance(message, Challenge)}) == 5


def test_no_message_is_received_before_the_handshake(harness: ServerHarness, member: FakeMember) -> None:
    raw = harness.connect()
    raw.prove()
    raw.stream.sendall(raw.frame(dumps(Report(1, {}))))
    raw.refusal()
    assert harness.callbacks.report_numbers() == []


def test_random_bytes_close_their_own_connection_only(harness: ServerHarness, member: FakeMember) -> None:
    dice = random.Random(5)
    for size in (1, 4, 5, 100, 5000, 300_000):
        raw = harness.connect()
        try:
            raw.stream.sendall(dice.randbytes(size))
            raw.stream.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was closed before it had said everything
        while raw.next() is not None:
            pass
        raw.stream.close()
        took_s = member.echo_s()
        with depends_on_load():
            assert took_s < LEASE_S / 2


def test_many_wrong_connections_do_not_delay_a_member(harness: ServerHarness, member: FakeMember) -> None:
    dice, is_over = random.Random(7), threading.Event()

    def pester() -> None:
        while not is_over.is_set():
            try:
                with socket.create_connection(("127.0.0.1", harness.port), PATIENCE_S) as stream:
                    stream.sendall(dice.randbytes(1000))
            except OSError:
                pass

    flood = threading.Thread(target=pester, daemon=True)
    flood.start()
    try:
        worst_s = max(member.echo_s() for _ in range(200))
    finally:
        is_over.set()
        flood.join(PATIENCE_S)
    with depends_on_load():
        assert worst_s < LEASE_S / 2


@pytest.mark.parametrize("said", [b"", b"\x00\x00", struct.pack(">I", 1000) + b'{"type":'], ids=["nothing", "a little", "half"])
def test_a_handshake_that_takes_too_long_is_dropped(
    said: bytes, harness: ServerHarness, member: FakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_S", 0.3)
    raw = harness.connect()
    raw.stream.sendall(said)
    start_s = time.monotonic()
    assert isinstance(raw.next(), Challenge)
    assert raw.next() is None
    assert time.monotonic() - start_s > 0.1
    raw.stream.close()


def test_the_number_of_simultaneous_handshakes_is_limited(
    harness: ServerHarness, member: FakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_HANDSHAKES", 4)
    unproved = [harness.connect() for _ in range(4)]
    for raw in unproved:
        assert isinstance(raw.next(), Challenge)
    late = harness.connect()
    assert late.next() is None
    unproved.pop().stream.close()
    fake = harness.member("W0_1")  # it connects until there is room
    for raw in [late, *unproved]:
        raw.stream.close()
    fake.client.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    harness.callbacks.num_disconnected = 0


def test_of_two_workers_that_prefer_one_place_at_once_one_is_refused(harness: ServerHarness) -> None:
    outcomes: SimpleQueue[object] = SimpleQueue()

    def claim() -> None:
        fake = FakeMember(harness.endpoint(), "W1_1")
        try:
            fake.client.join(PATIENCE_S)
        except JoinRefused as problem:
            outcomes.put(str(problem))
        else:
            outcomes.put(fake)

    for _ in range(2):
        threading.Thread(target=claim, daemon=True).start()
    got = {type(each): each for each in (outcomes.get(timeout=PATIENCE_S) for _ in range(2))}
    assert got[str] == "W1_1 is taken: another worker has come for it"
    winner = got[FakeMember]
    assert isinstance(winner, FakeMember)
    winner.client.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)


def test_a_worker_of_another_release_is_refused_with_both_releases(
    harness: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "RELEASE", "9.9")
    with pytest.raises(JoinRefused, match=rf"the worker is of release 9\.9, but the job runs {RELEASE}"):
        FakeMember(harness.endpoint()).client.join(PATIENCE_S)
