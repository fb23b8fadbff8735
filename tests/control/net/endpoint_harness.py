"""ServerHarness: a server in a thread of its own with fake callbacks, and its clients: members and raw connections."""

import hashlib
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from recycle.control.decide.messages import (
    Ack,
    Challenge,
    ControlMessage,
    Hello,
    Refused,
    RenewLease,
    Report,
    StoreEntry,
    Welcome,
    loads,
)
from recycle.control.net.client import Client
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.control.net.listener import listen
from recycle.control.net.server import Server
from recycle.control.net.wire import COORDINATOR, WORKER, EncodedMessage, Seal, make_frame
from recycle.core.release import RELEASE

TOKEN, JOB, LEASE_S, PATIENCE_S = "the job's own secret", "a1b2c3d4", 2.0, 10.0


def num_open() -> int:
    """The number of files and sockets that this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def closed_endpoint() -> Iterator[Endpoint]:
    """A endpoint at which no server listens, with a port that no other process gets meanwhile."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield Endpoint("127.0.0.1", nobody.getsockname()[1], TOKEN, JOB)


class FakeCoordinator:
    """Callbacks that admit any worker to a free place, echo store entries, and record the messages."""

    def __init__(self) -> None:
        self.server: Server
        self.numbers: dict[int, int] = {}
        self.places: dict[int, str] = {}
        self.hellos: list[Hello] = []
        self.received: list[ControlMessage] = []
        self.num_disconnected = 0
        self.violations: list[str] = []
        self.fenced: set[int] = set()
        self.is_acknowledging = True
        self.changed = threading.Condition()

    def admit(self, connection: int, hello: Hello) -> Welcome | Refused:
        with self.changed:
            self.hellos.append(hello)
            if hello.job not in ("", JOB):
                return Refused(f"this is job {JOB}, not {hello.job}")
            if hello.member in self.fenced:
                return Refused("it was taken for dead, and others do its work", may_retry=True)
            if hello.member < 0 and hello.preferred_place and hello.preferred_place in self.places.values():
                return Refused(f"{hello.preferred_place} is taken: another worker has come for it")
            number = hello.member if hello.member >= 0 else len(self.places) + 1
            self.numbers[connection], self.places[number] = number, hello.preferred_place
            return Welcome(number, LEASE_S, JOB)

    def admitted(self, connection: int) -> None:
        with self.changed:
            self.changed.notify_all()

    def receive(self, connection: int, message: ControlMessage) -> None:
        with self.changed:
            self.received.append(message)
            self.changed.notify_all()
        if isinstance(message, StoreEntry):
            self.server.send(connection, message)
        if isinstance(message, Report) and self.is_acknowledging:
            self.server.send(connection, Ack(message.number))

    def violated(self, connection: int, reason: str) -> None:
        with self.changed:
            self.violations.append(reason)

    def disconnected(self, connection: int) -> None:
        with self.changed:
            self.num_disconnected += 1
            self.places.pop(self.numbers.pop(connection), None)
            self.changed.notify_all()

    def tick(self) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def report_numbers(self) -> list[int]:
        with self.changed:
            return [message.number for message in self.received if isinstance(message, Report)]


class ServerHarness:
    """A server in a thread of its own, on a port of this machine."""

    def __init__(self, port: int = 0, callbacks: FakeCoordinator | None = None, **options: object) -> None:
        self.callbacks = callbacks or FakeCoordinator()
        listener = listen("127.0.0.1", port)
        self.port = listener.getsockname()[1]
        self.server = self.callbacks.server = Server(listener, TOKEN, self.callbacks, **options)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.call_soon(self.server.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def endpoint(self, token: str = TOKEN, job: str = JOB) -> Endpoint:
        return Endpoint("127.0.0.1", self.port, token, job)

    def member(self, place: str = "") -> "FakeMember":
        """A worker that has joined."""
        fake = FakeMember(self.endpoint(), place)
        fake.client.join(PATIENCE_S)
        return fake

    def connect(self) -> "RawConnection":
        return RawConnection(self.port)


class FakeMember:
    """A client, and the messages that it received."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: str = "",
        heartbeat: Callable[[], RenewLease] = RenewLease,
        on_silent: Callable[[float], None] = lambda silent_s: None,
    ) -> None:
        self.received: SimpleQueue[ControlMessage] = SimpleQueue()
        self.refusals: SimpleQueue[JoinRefused] = SimpleQueue()
        self.violations: SimpleQueue[str] = SimpleQueue()
        self.client = Client(
            endpoint, place, self.received.put, self.refusals.put, heartbeat, on_silent, on_violation=self.violations.put
        )

    def next(self, kind: type[ControlMessage]) -> ControlMessage:
        while not isinstance(message := self.received.get(timeout=PATIENCE_S), kind):
            pass
        return message

    def echo_s(self) -> float:
        """The time until a message is answered."""
        start_s, key = time.monotonic(), secrets.token_hex(4)
        assert self.client.send(StoreEntry(1, key, "x"))
        while self.next(StoreEntry) != StoreEntry(1, key, "x"):
            pass
        return time.monotonic() - start_s


class RawConnection:
    """A connection without a client."""

    def __init__(self, port: int) -> None:
        self.stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self.seal = Seal("", "")
        self._bytes = b""
        self._seals: list[Seal] = []

    def next(self) -> ControlMessage | None:
        """The next message, or None when the connection is closed. All but the challenge have a tag of the coordinator."""
        header = self._take(4)
        if header is None:
            return None
        body = self._take(*struct.unpack(">I", header))
        assert body is not None
        message = loads(body)
        if isinstance(message, Challenge):
            # It has the nonce of a hello if the hello was taken.
            self._seals = [Seal(TOKEN, COORDINATOR, message.nonce, nonce) for nonce in ("", "n")]
        else:
            assert self._take(16) in {seal.next_tag(hashlib.sha256(body).digest()) for seal in self._seals}
        return message

    def _take(self, number: int) -> bytes | None:
        while len(self._bytes) < number:
            try:
                some = self.stream.recv(1 << 16)
            except ConnectionResetError:
                some = b""
            if not some:
                return None
            self._bytes += some
        taken, self._bytes = self._bytes[:number], self._bytes[number:]
        return taken

    def hello(self, token: str = TOKEN, **changes: object) -> bytes:
        """The frame of a hello that answers the challenge, with changes."""
        self.prove(token)
        nonce, hello_seal = str(changes.get("nonce", "n")), self.seal
        self.seal = Seal(token, WORKER, self._nonce, nonce)
        values = {"type": "hello", "release": RELEASE, "job": JOB, "host": "there", "pid": 7, "nonce": "n"}
        return self.frame(json.dumps({**values, **changes}).encode(), hello_seal)

    def prove(self, token: str = TOKEN) -> None:
        """Read the challenge: the tags of `frame` prove this token then."""
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        self._nonce = challenge.nonce
        self.seal = Seal(token, WORKER, challenge.nonce)

    def frame(self, body: bytes, seal: Seal | None = None) -> bytes:
        """The next frame, with the tag of a worker."""
        return b"".join(make_frame(EncodedMessage(body, hashlib.sha256(body).digest()), seal or self.seal))

    def refusal(self) -> str:
        """The reason with which the connection is closed."""
        messages: list[ControlMessage] = []
        while (message := self.next()) is not None:
            messages.append(message)
        self.stream.close()
        last = messages[-1]
        assert isinstance(last, Refused)
        return last.reason
