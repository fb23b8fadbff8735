"""A coordinator's port in a thread of its own, an actor behind it, and both kinds of callers: members and strangers."""

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
)
from recycle.control.net.client import Client
from recycle.control.net.handshake import Endpoint
from recycle.control.net.server import Server, listen
from recycle.control.net.wire import MOST_BYTES, FrameReader, proof
from recycle.core.release import RELEASE

TOKEN, JOB, LEASE_S, PATIENCE_S = "the job's own secret", "a1b2c3d4", 2.0, 10.0


def num_open() -> int:
    """How many files and sockets this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def closed_door() -> Iterator[Endpoint]:
    """A door that nobody opens, at a port that nobody else gets meanwhile."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield Endpoint("127.0.0.1", nobody.getsockname()[1], TOKEN, JOB)


class Porter:
    """An actor that lets in whoever wants a free place, gives back what is shared, and remembers what it saw."""

    def __init__(self) -> None:
        self.server: Server
        self.numbers: dict[int, int] = {}
        self.seats: dict[int, str] = {}
        self.hellos: list[Hello] = []
        self.heard: list[ControlMessage] = []
        self.num_lost = 0
        self.fenced: set[int] = set()
        self.is_hearing = True
        self.changed = threading.Condition()

    def admit(self, caller: int, hello: Hello) -> Welcome | Refused:
        with self.changed:
            self.hellos.append(hello)
            if hello.job not in ("", JOB):
                return Refused(f"this is job {JOB}, not {hello.job}")
            if hello.member in self.fenced:
                return Refused("it was taken for dead, and others do its work")
            if hello.member < 0 and hello.seat and hello.seat in self.seats.values():
                return Refused(f"{hello.seat} is taken: another worker has come for it")
            number = hello.member if hello.member >= 0 else len(self.seats) + 1
            self.numbers[caller], self.seats[number] = number, hello.seat
            return Welcome("", number, LEASE_S, JOB)

    def entered(self, caller: int) -> None:
        with self.changed:
            self.changed.notify_all()

    def receive(self, caller: int, message: ControlMessage) -> None:
        if isinstance(message, StoreEntry):
            self.server.send(caller, message)
        if isinstance(message, Report) and self.is_hearing:
            self.server.send(caller, Ack(message.number))
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def lost(self, caller: int) -> None:
        with self.changed:
            self.num_lost += 1
            self.seats.pop(self.numbers.pop(caller), None)
            self.changed.notify_all()

    def tick(self) -> None:
        pass

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S)

    def told(self) -> list[int]:
        with self.changed:
            return [message.number for message in self.heard if isinstance(message, Report)]


class Post:
    """A server in a thread of its own, on a port of this machine."""

    def __init__(self, port: int = 0, porter: Porter | None = None) -> None:
        self.porter = porter or Porter()
        listener = listen("127.0.0.1", port)
        self.port = listener.getsockname()[1]
        self.server = self.porter.server = Server(listener, TOKEN, self.porter)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.call(self.server.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def door(self, token: str = TOKEN, job: str = JOB) -> Endpoint:
        return Endpoint("127.0.0.1", self.port, token, job)

    def member(self, seat: str = "") -> "Guest":
        """A worker that is let in."""
        guest = Guest(self.door(), seat)
        guest.client.join(PATIENCE_S)
        return guest

    def stranger(self) -> "Stranger":
        return Stranger(self.port)


class Guest:
    """A worker's end, and what it heard."""

    def __init__(self, door: Endpoint, seat: str = "", pulse: Callable[[], RenewLease] = RenewLease) -> None:
        self.heard: SimpleQueue[ControlMessage] = SimpleQueue()
        self.refusals: SimpleQueue[str] = SimpleQueue()
        self.client = Client(door, seat, self.heard.put, self.refusals.put, pulse)

    def next(self, kind: type[ControlMessage]) -> ControlMessage:
        while not isinstance(message := self.heard.get(timeout=PATIENCE_S), kind):
            pass
        return message

    def echo_s(self) -> float:
        """How long it takes to be heard and answered."""
        start_s, key = time.monotonic(), secrets.token_hex(4)
        assert self.client.send(StoreEntry(1, key, "x"))
        while self.next(StoreEntry) != StoreEntry(1, key, "x"):
            pass
        return time.monotonic() - start_s


class Stranger:
    """A bare connection to the port."""

    def __init__(self, port: int) -> None:
        self.stream = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._inbox, self._early = FrameReader(MOST_BYTES), []  # type: ignore[var-annotated]

    def next(self) -> ControlMessage | None:
        """The next message, or None when the connection is closed."""
        while not self._early:
            try:
                some = self.stream.recv(1 << 16)
            except ConnectionResetError:
                some = b""
            if not some:
                return None
            self._early += self._inbox.take(some)
        return self._early.pop(0)

    def hello(self, token: str = TOKEN, **changes: object) -> bytes:
        """What a worker says to the challenge that it got, with changes."""
        challenge = self.next()
        assert isinstance(challenge, Challenge)
        told = {"type": "hello", "proof": proof(token, "worker", challenge.nonce), "release": RELEASE, "job": JOB}
        body = json.dumps({**told, "host": "there", "pid": 7, "nonce": "n", **changes}).encode()
        return struct.pack(">I", len(body)) + body

    def refusal(self) -> str:
        """Why the connection is closed."""
        said: list[ControlMessage] = []
        while (message := self.next()) is not None:
            said.append(message)
        self.stream.close()
        last = said[-1]
        assert isinstance(last, Refused)
        return last.reason
