"""The coordinator's end of all connections: one thread that listens, reads, writes and keeps the time.

A stranger gets a challenge, and is let in only with an answer that proves the job's token; until then it may say little, and not
for long. Whatever goes wrong with one connection closes that one alone.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from recycle.control.decide.messages import Challenge, ControlMessage, Hello, ProtocolError, Refused, Welcome
from recycle.control.net.wire import MOST_BYTES, MOST_BYTES_OF_STRANGERS, FrameReader, encode_frame, is_proof, new_nonce, proof
from recycle.core.errors import PortInUse, UserError
from recycle.core.release import RELEASE

_STRANGER_S = 5.0
_MOST_STRANGERS = 64
_MOST_ERRANDS = 256
_TICK_S = 0.05


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise UserError(f"the port is {port!r}, but it must be a whole number from 0 to 65535, where 0 is any free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as problem:
        listener.close()
        raise PortInUse(
            f"{host} port {port} cannot be listened on, another program probably does: name a free one, or 0 for any "
            f"({problem.strerror or problem})"
        ) from None
    return listener


ConnectionTask = Callable[[socket.socket], None]


class ServerCallbacks(Protocol):
    """Who decides. A caller is a number that stands for a connection."""

    def admit(self, caller: int, hello: Hello) -> Welcome | Refused:
        """Say whether a worker that has the token may take part; the proof of a welcome is the server's."""
        ...

    def entered(self, caller: int) -> None:
        """Whoever was admitted has been sent its welcome."""
        ...

    def receive(self, caller: int, message: ControlMessage) -> None: ...

    def errand(self, hello: Hello) -> ConnectionTask | Refused:
        """Say what is to be done with a connection that is for an errand alone, in a thread of its own."""
        ...

    def lost(self, caller: int) -> None:
        """The connection closed, and not by us."""
        ...

    def tick(self) -> None: ...


class _Connection:
    def __init__(self, number: int, stream: socket.socket) -> None:
        self.number, self.stream = number, stream
        self.nonce = new_nonce()
        self.since_s = time.monotonic()
        self.is_known = False
        self.inbox = FrameReader(MOST_BYTES_OF_STRANGERS)
        self.outbox: deque[memoryview] = deque()
        self.is_closing = False


class Server:
    """Serves an actor until it is told to stop."""

    def __init__(self, listener: socket.socket, token: str, actor: ServerCallbacks) -> None:
        self._listener, self._token, self._actor = listener, token, actor
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._alarm, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, self._wake)
        self._connections: dict[int, _Connection] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._errands = threading.BoundedSemaphore(_MOST_ERRANDS)
        self._next, self._is_running = 0, True

    def run(self) -> None:
        """Serve; returns after `stop`, when all that was said has been sent."""
        next_tick_s = time.monotonic()
        while self._is_running:
            for key, events in self._selector.select(max(0.0, next_tick_s - time.monotonic())):
                key.data(events)
            while self._calls:
                self._calls.popleft()()
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                self._send_strangers_away()
                self._actor.tick()
        self._drain()
        self._take_leave()
        self.close()

    def stop(self) -> None:
        self._is_running = False

    def call(self, what: Callable[[], None]) -> None:
        """Have something called by the serving thread; any thread may ask for it."""
        self._calls.append(what)
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")

    def send(self, caller: int, message: ControlMessage) -> None:
        self.send_bytes(caller, encode_frame(message))

    def send_bytes(self, caller: int, encode_frame: bytes) -> None:
        """Send what is framed already: the same to many costs less so."""
        connection = self._connections.get(caller)
        if connection is not None and not connection.is_closing:
            connection.outbox.append(memoryview(encode_frame))
            self._write(connection)

    def hang_up(self, caller: int) -> None:
        """Close a connection; its actor is not told."""
        connection = self._connections.get(caller)
        if connection is not None:
            self._forget(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._forget(connection)
        self._selector.close()
        self._listener.close()
        # Who calls after this must not ring at whatever has these numbers by then.
        alarm, bell, self._alarm, self._bell = self._alarm, self._bell, -1, -1
        os.close(alarm)
        os.close(bell)

    def _accept(self, events: int) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return
        strangers = sum(not connection.is_known for connection in self._connections.values())
        if strangers >= _MOST_STRANGERS:
            stream.close()
            return
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next += 1
        connection = self._connections[self._next] = _Connection(self._next, stream)
        self._selector.register(stream, selectors.EVENT_READ, lambda events: self._serve(connection, events))
        self.send(connection.number, Challenge(connection.nonce, RELEASE))

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if events & selectors.EVENT_READ and connection.number in self._connections:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            some = connection.stream.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        if not some:
            self._lose(connection)
            return
        try:
            for message in connection.inbox.take(some):
                if connection.is_known:
                    self._actor.receive(connection.number, message)
                else:
                    self._meet(connection, message)
                if connection.number not in self._connections or connection.is_closing:
                    return
        except ProtocolError as problem:
            self._turn_away(connection, str(problem))

    def _meet(self, connection: _Connection, message: ControlMessage) -> None:
        if not isinstance(message, Hello):
            self._turn_away(connection, "the first word must be a hello")
        elif not is_proof(message.proof, self._token, "worker", connection.nonce):
            self._turn_away(connection, "this is not the job's token")
        elif message.release != RELEASE:
            self._turn_away(connection, f"the worker is of release {message.release}, but the job runs {RELEASE}")
        elif message.errand:
            self._send_on(connection, message)
        else:
            answer = self._actor.admit(connection.number, message)
            if isinstance(answer, Refused):
                self._turn_away(connection, answer.reason)
                return
            connection.is_known = True
            connection.inbox.most_bytes = MOST_BYTES
            self.send(connection.number, replace(answer, proof=proof(self._token, "coordinator", message.nonce)))
            self._actor.entered(connection.number)

    def _send_on(self, connection: _Connection, hello: Hello) -> None:
        """Have an errand done in a thread of its own: it may take long, and must not keep others waiting."""
        errand = self._actor.errand(hello)
        if isinstance(errand, Refused):
            self._turn_away(connection, errand.reason)
            return
        if not self._errands.acquire(blocking=False):
            self._turn_away(connection, "too many errands at once: try again later")
            return
        self._selector.unregister(connection.stream)
        self._connections.pop(connection.number)
        connection.stream.setblocking(True)
        welcome = encode_frame(Welcome(proof(self._token, "coordinator", hello.nonce), -1, 0.0, hello.job))
        run = partial(_run_errand, connection.stream, welcome, errand, self._errands)
        threading.Thread(target=run, name="errand", daemon=True).start()

    def _turn_away(self, connection: _Connection, reason: str) -> None:
        """Say why, and close when that is sent."""
        was_known = connection.is_known
        if not was_known:
            self.send(connection.number, Refused(reason))
        connection.is_closing = True
        if not connection.outbox or was_known:
            self._lose(connection)

    def _lose(self, connection: _Connection) -> None:
        if connection.number in self._connections:
            self._forget(connection)
            if connection.is_known:
                self._actor.lost(connection.number)

    def _forget(self, connection: _Connection) -> None:
        self._connections.pop(connection.number, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.stream)
        connection.stream.close()

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.outbox:
                part = connection.outbox[0]
                sent = connection.stream.send(part)
                if sent == len(part):
                    connection.outbox.popleft()
                else:
                    connection.outbox[0] = part[sent:]
        except BlockingIOError:
            pass
        except OSError:
            # Not now: whoever sends must not be told of a death in the middle of it.
            self.call(lambda: self._lose(connection))
            connection.is_closing = True
            return
        if connection.is_closing and not connection.outbox:
            self._lose(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        with contextlib.suppress(KeyError, ValueError):
            key = self._selector.get_key(connection.stream)
            if key.events != wanted:
                self._selector.modify(connection.stream, wanted, key.data)

    def _wake(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._alarm, 1 << 12)

    def _send_strangers_away(self) -> None:
        late_s = time.monotonic() - _STRANGER_S
        for connection in [each for each in self._connections.values() if not each.is_known and each.since_s < late_s]:
            self._forget(connection)

    def _drain(self, patience_s: float = 2.0) -> None:
        """Send what is still to be sent."""
        end_s = time.monotonic() + patience_s
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.stream.settimeout(max(0.01, end_s - time.monotonic()))
                for part in connection.outbox:
                    connection.stream.sendall(part)
                connection.stream.shutdown(socket.SHUT_WR)

    def _take_leave(self, patience_s: float = 0.5) -> None:
        """Wait until members have hung up, too: who talks into a connection that is closed may miss what was said to it last."""
        end_s = time.monotonic() + patience_s
        with selectors.DefaultSelector() as open_ones:
            for connection in [each for each in self._connections.values() if each.is_known]:
                open_ones.register(connection.stream, selectors.EVENT_READ, connection.stream)
            while open_ones.get_map() and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in open_ones.select(left_s):
                    try:
                        is_open = bool(key.data.recv(1 << 18))
                    except OSError:
                        is_open = False
                    if not is_open:
                        open_ones.unregister(key.fileobj)


def _run_errand(stream: socket.socket, welcome: bytes, errand: ConnectionTask, errands: threading.BoundedSemaphore) -> None:
    try:
        with stream, contextlib.suppress(OSError):
            stream.sendall(welcome)
            errand(stream)
    finally:
        errands.release()
