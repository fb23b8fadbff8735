"""Somebody between a worker and its coordinator: no message that he changed, repeated, left out, moved or made is taken."""

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recycle.control.decide.messages import ProtocolError, RenewLease, Report, StopEpoch, StoreEntry, Welcome, dumps, loads
from recycle.control.net.file_transfer import FileTransfer
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.control.net.wire import encode, make_frame
from recycle.core.errors import FileProblem
from tests.control.net.endpoint_harness import JOB, LEASE_S, PATIENCE_S, TOKEN, FakeMember, ServerHarness
from tests.control.net.test_file_transfer import BYTES, FileCoordinator, read_all
from tests.processes import depends_on_load

pytestmark = pytest.mark.timeout(120)
TO_COORDINATOR, TO_WORKER = "to the coordinator", "to the worker"
Frames = list[bytes]
Attack = Callable[[Frames], Frames]
"""Gets the frames of a direction since the handshake, once there are enough, and returns what is passed on instead."""


class ManInTheMiddle:
    """A proxy that passes on every frame, and attacks one direction of the first connection after its handshake."""

    NUM_FRAMES = 3

    def __init__(self, port: int, direction: str, attack: Attack, num_handshake: int) -> None:
        self._port, self._direction, self._attack, self._num_handshake = port, direction, attack, num_handshake
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1], TOKEN, JOB)
        self.seen: Frames = []
        self.has_attacked = threading.Event()
        self._streams: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                coordinator = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
                coordinator.settimeout(None)
                self._streams += [worker, coordinator]
                for source, sink, direction in ((worker, coordinator, TO_COORDINATOR), (coordinator, worker, TO_WORKER)):
                    threading.Thread(target=self._pass_on, args=(source, sink, direction), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        held: Frames = []
        with suppress(OSError, EOFError):
            for number, frame in enumerate(_frames(source, tags_from=1 if direction == TO_WORKER else 0)):
                if direction == self._direction:
                    self.seen.append(frame)
                is_attacked = direction == self._direction and number >= self._num_handshake and not self.has_attacked.is_set()
                held.append(frame)
                if not is_attacked:
                    sink.sendall(b"".join(held))
                    held = []
                elif len(held) == self.NUM_FRAMES:
                    sink.sendall(b"".join(self._attack(held)))
                    held = []
                    self.has_attacked.set()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for stream in self._streams:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()


def _frames(source: socket.socket, tags_from: int) -> Iterator[bytes]:
    """The frames of a stream; those from this number on have a tag."""
    number = 0
    while True:
        header = _exactly(source, 4)
        body = _exactly(source, struct.unpack(">I", header)[0] + (16 if number >= tags_from else 0))
        number += 1
        yield header + body


def _exactly(source: socket.socket, number: int) -> bytes:
    taken = b""
    while len(taken) < number:
        some = source.recv(number - len(taken))
        if not some:
            raise EOFError
        taken += some
    return taken


def change(frames: Frames) -> Frames:
    return [frames[0][:10] + bytes([frames[0][10] ^ 1]) + frames[0][11:], *frames[1:]]


def drop(frames: Frames) -> Frames:
    return frames[1:]


def move(frames: Frames) -> Frames:
    return [frames[1], frames[0], *frames[2:]]


def repeat(frames: Frames) -> Frames:
    return [frames[0], frames[0], *frames[1:]]


def make(frames: Frames) -> Frames:
    return [b"".join(make_frame(encode(StopEpoch(1)), None)) + bytes(16), *frames]


ATTACKS = [change, drop, move, repeat, make]


@pytest.fixture
def attacked(harness: ServerHarness) -> Iterator[Callable[..., ManInTheMiddle]]:
    made: list[ManInTheMiddle] = []

    def make_one(direction: str, attack: Attack, num_handshake: int = 1) -> ManInTheMiddle:
        made.append(ManInTheMiddle(harness.port, direction, attack, num_handshake))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_coordinator_takes_no_message_that_was_tampered_with(
    attack: Attack, harness: ServerHarness, attacked: Callable[..., ManInTheMiddle]
) -> None:
    man = attacked(TO_COORDINATOR, attack)
    fake = FakeMember(man.endpoint)
    fake.client.join(PATIENCE_S)
    for number in range(1, 9):
        fake.client.report({"number": number})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)  # it has connected again, and has sent them again
    assert man.has_attacked.is_set()
    assert "a message was changed, repeated, left out or made by somebody" in harness.callbacks.violations[0]
    received = [message.body for message in harness.callbacks.received if isinstance(message, Report)]
    assert all(body == {"number": body["number"]} for body in received)
    assert list(dict.fromkeys(body["number"] for body in received)) == list(range(1, 9))
    assert not any(isinstance(message, StopEpoch) for message in harness.callbacks.received)
    fake.client.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_worker_takes_no_message_that_was_tampered_with(
    attack: Attack, harness: ServerHarness, attacked: Callable[..., ManInTheMiddle]
) -> None:
    man = attacked(TO_WORKER, attack, 2)  # after the challenge and the welcome
    fake = FakeMember(man.endpoint)
    fake.client.join(PATIENCE_S)
    for number in range(4):
        fake.client.send(StoreEntry(1, f"key {number}", "x"))  # which is sent back
    assert "the connection is closed" in fake.violations.get(timeout=PATIENCE_S)
    fake.next(Welcome)
    fake.next(Welcome)
    fake.echo_s()
    assert fake.refusals.empty()
    fake.client.close()


@pytest.mark.parametrize("direction", [TO_COORDINATOR, TO_WORKER])
def test_a_handshake_that_was_tampered_with_makes_no_member(
    direction: str, harness: ServerHarness, attacked: Callable[..., ManInTheMiddle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ManInTheMiddle, "NUM_FRAMES", 1)
    man = attacked(direction, change, num_handshake=0 if direction == TO_COORDINATOR else 1)
    with pytest.raises(JoinRefused, match="this is not the job's token, or what answers at"):
        FakeMember(man.endpoint).client.join(PATIENCE_S)
    assert harness.callbacks.received == []


def test_a_handshake_that_is_tampered_with_does_not_end_a_worker_that_reconnects(
    harness: ServerHarness, attacked: Callable[..., ManInTheMiddle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ManInTheMiddle, "NUM_FRAMES", 1)
    man = attacked(TO_COORDINATOR, change)
    fake = FakeMember(man.endpoint)
    fake.client.join(PATIENCE_S)  # its first heartbeat is changed, so that it connects again
    assert man.has_attacked.wait(PATIENCE_S)
    man.has_attacked.clear()
    man._num_handshake = 0  # and now its hello
    fake.next(Welcome)
    fake.next(Welcome)
    fake.echo_s()
    assert fake.refusals.empty()
    fake.client.close()


def test_a_recorded_session_cannot_be_replayed(harness: ServerHarness, attacked: Callable[..., ManInTheMiddle]) -> None:
    man = attacked(TO_COORDINATOR, lambda frames: frames)
    fake = FakeMember(man.endpoint)
    fake.client.join(PATIENCE_S)
    for number in range(4):
        fake.client.report({"number": number})
    assert fake.client.wait_until_acknowledged(PATIENCE_S)
    fake.client.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == 1)
    before = len(harness.callbacks.hellos), len(harness.callbacks.received)
    thief = harness.connect()
    thief.stream.sendall(b"".join(man.seen))
    assert thief.refusal() == "this is not the job's token"
    assert (len(harness.callbacks.hellos), len(harness.callbacks.received)) == before


def test_a_file_that_was_changed_on_its_way_is_not_taken(tmp_path: Path) -> None:
    """Its bytes have no tags, but the message with its digest has."""
    harness = ServerHarness(0, FileCoordinator(tmp_path / "kept"))
    proxy = socket.create_server(("127.0.0.1", 0))
    own = tmp_path / "own"
    own.write_bytes(BYTES)

    def serve() -> None:
        with suppress(OSError):
            while True:
                worker, _ = proxy.accept()
                coordinator = socket.create_connection(("127.0.0.1", harness.port))
                for source, sink in ((worker, coordinator), (coordinator, worker)):
                    threading.Thread(target=flip, args=(source, sink), daemon=True).start()

    def flip(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                sink.sendall(some.replace(BYTES[1 << 20 : (1 << 20) + 8], b"12345678"))
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=serve, daemon=True).start()
    transfer = FileTransfer(Endpoint("127.0.0.1", proxy.getsockname()[1], TOKEN, JOB))
    with pytest.raises(FileProblem, match="its SHA-256 differs"):
        transfer.upload(own, "a/file")
    assert list((tmp_path / "kept" / "a").iterdir()) == []
    FileTransfer(harness.endpoint()).upload(own, "a/file")
    with pytest.raises(FileProblem, match="its SHA-256 differs"):
        transfer.download("a/file", read_all)
    proxy.close()
    harness.close()


# Fuzzed frames.

# One frame a connection, which the server closes. CI sends 10,000.
NUM_FUZZED = int(os.environ.get("FUZZED_FRAMES", "500"))


def fuzzed(dice: random.Random) -> bytes:
    """A message of a worker in which something is wrong: other bytes, cut, with other values, or no JSON at all."""
    body = dumps(dice.choice([Report(1, {"a": [1, None]}), StopEpoch(3), StoreEntry(1, "key", "value")]))
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(body) + 1)
        body = dice.choice(
            [
                body[:place] + dice.randbytes(dice.randint(1, 6)) + body[place:],
                body[:place] + body[place + dice.randint(1, 6) :],
                body[:place] + dice.choice([b"null", b"[[", b'{"', b"1e999", b"-1", b'"\\ud800"', b"\x00"]) + body[place:],
                dice.randbytes(dice.randint(0, 50)),
            ]
        )
    return body


def test_fuzzed_frames_before_the_handshake_disturb_nobody(harness: ServerHarness, member: FakeMember) -> None:
    dice = random.Random(11)
    num_received = len(harness.callbacks.received)
    for _ in range(NUM_FUZZED):
        raw, body = harness.connect(), fuzzed(dice)
        if dice.random() < 0.5:  # the tag of somebody who has the token
            raw.prove()
            raw.stream.sendall(raw.frame(body))
        else:
            raw.stream.sendall(struct.pack(">I", len(body)) + body + dice.randbytes(16))
        assert raw.refusal()
    assert len(harness.callbacks.hellos) == 1
    others = harness.callbacks.received[num_received:]
    assert all(isinstance(message, RenewLease) for message in others)


def test_fuzzed_frames_of_a_member_close_its_own_connection_only(harness: ServerHarness) -> None:
    dice, other = random.Random(13), harness.member("W0_0")
    num_read = 0
    for _ in range(NUM_FUZZED):
        raw, body = harness.connect(), fuzzed(dice)
        raw.stream.sendall(raw.hello())
        assert isinstance(raw.next(), Welcome)
        raw.stream.sendall(raw.frame(body))
        try:
            loads(body)
            num_read += 1  # what is wrong with it happens to be allowed
        except ProtocolError:
            assert raw.next() is None
        raw.stream.close()
    assert len(harness.callbacks.violations) == NUM_FUZZED - num_read > 0.9 * NUM_FUZZED
    took_s = other.echo_s()
    with depends_on_load():
        assert took_s < LEASE_S
    assert other.refusals.empty()
    other.client.close()
    harness.callbacks.wait_for(lambda: harness.callbacks.num_disconnected == NUM_FUZZED + 1)
