"""The coordinator's server: one thread that accepts, reads, writes and closes all control connections, and ticks.

A new connection gets a challenge, and is admitted only with a hello whose tag proves the job's token; until then its bytes and
its time are limited. An error of one connection closes that connection only.
"""

import contextlib
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from recycle.control.decide.messages import Challenge, ControlMessage, Hello, ProtocolError, Refused, Waiting, Welcome
from recycle.control.net.tls import NOT_NOW, ServerTls, TlsFiles
from recycle.control.net.wire import (
    COORDINATOR,
    MOST_BYTES,
    MOST_BYTES_UNPROVED,
    WORKER,
    EncodedMessage,
    FrameReader,
    Seal,
    Session,
    WrongTag,
    encode,
    make_frame,
    new_nonce,
)
from recycle.core.release import RELEASE

_HANDSHAKE_S = 5.0
_MOST_HANDSHAKES, _MOST_AT_ONCE = 512, 16
# So many connections with a purpose of their own are served at once. The next ones wait, at most so long.
_MOST_TASKS, _QUEUE_S, _WAITING_S = 256, 600.0, 1.0
_TICK_S = 0.05
ConnectionTask = Callable[[Session], None]


class ServerCallbacks(Protocol):
    """The reactions to what happens on connections. A connection is named by its number."""

    def admit(self, connection: int, hello: Hello) -> Welcome | Refused:
        """Decide whether a worker that has proved the token may join."""

    def admitted(self, connection: int) -> None:
        """Note that an admitted worker has been sent its welcome."""

    def receive(self, connection: int, message: ControlMessage) -> None: ...

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        """Return the task that serves a connection with a purpose of its own, in a thread of its own."""

    def violated(self, connection: int, reason: str) -> None:
        """Note that an admitted connection is closed because what came by it was not its worker's; `disconnected` follows."""

    def disconnected(self, connection: int) -> None:
        """Note that the other side has closed an admitted connection."""

    def tick(self) -> None: ...


class _Connection:
    def __init__(self, number: int, stream: socket.socket, token: str) -> None:
        self.number, self.stream = number, stream
        self.nonce = new_nonce()
        self.seal: Seal | None = None  # the challenge has no tag
        self.since_s = time.monotonic()
        self.is_secured = not isinstance(stream, ssl.SSLSocket)
        self.is_admitted = self.is_waiting = False
        self.reader = FrameReader(MOST_BYTES_UNPROVED, Seal(token, WORKER, self.nonce))
        self.outbox: deque[memoryview] = deque()
        self.is_closing = self.is_blocked = False


class Server:
    """Serves connections, and calls `callbacks`, until it is stopped. At most `most_tasks` tasks run at once.

    Raises FileProblem if connections are to use TLS, and its files cannot be used.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        callbacks: ServerCallbacks,
        most_tasks: int = _MOST_TASKS,
        queue_s: float = _QUEUE_S,
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = ServerTls(tls) if tls is not None else None
        self._listener, self._token, self._callbacks = listener, token, callbacks
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._wake)
        self._connections: dict[int, _Connection] = {}
        self._handshakes: dict[int, _Connection] = {}  # those that are neither admitted nor wait for their task
        self._calls: deque[Callable[[], None]] = deque()
        self._most_tasks, self._queue_s, self._num_tasks, self._told_s = most_tasks, queue_s, 0, 0.0
        self._queue: deque[tuple[_Connection, Hello, ConnectionTask]] = deque()
        self._last_number, self._is_running, self._is_woken = 0, True, False

    def run(self) -> None:
        """Serve until `stop`, and send all pending messages before returning."""
        next_tick_s = time.monotonic()
        while self._is_running:
            for key, events in self._selector.select(max(0.0, next_tick_s - time.monotonic())):
                key.data(events)
            while self._calls:
                self._calls.popleft()()
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                self._drop_late_handshakes()
                self._tell_queue()
                self._callbacks.tick()
        self._drain()
        self._wait_for_disconnects()
        self.close()

    def stop(self) -> None:
        self._is_running = False

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have a function called by the serving thread; any thread may call this."""
        self._calls.append(function)
        if not self._is_woken:  # else the serving thread has yet to look at the calls
            self._is_woken = True
            with contextlib.suppress(OSError):
                os.write(self._wake_writer, b"!")

    def send(self, number: int, message: ControlMessage) -> None:
        self.send_encoded(number, encode(message))

    def send_encoded(self, number: int, message: EncodedMessage) -> None:
        """Send an encoded message: many connections can share one encoding."""
        connection = self._connections.get(number)
        if connection is not None and not connection.is_closing:
            connection.outbox.extend(map(memoryview, make_frame(message, connection.seal)))
            self._write(connection)

    def disconnect(self, number: int) -> None:
        """Close a connection, without a call of `disconnected`."""
        if (connection := self._connections.get(number)) is not None:
            self._remove(connection)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._remove(connection)
        self._selector.close()
        self._listener.close()
        # A later `call_soon` must not write into another file that has got the same descriptor.
        reader, writer, self._wake_reader, self._wake_writer = self._wake_reader, self._wake_writer, -1, -1
        os.close(reader)
        os.close(writer)

    def _accept(self, events: int) -> None:
        for _ in range(_MOST_AT_ONCE):  # many come back at once when a coordinator was replaced
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self._begin_handshake(stream)

    def _begin_handshake(self, stream: socket.socket) -> None:
        if len(self._handshakes) >= _MOST_HANDSHAKES:
            stream.close()
            return
        stream.setblocking(False)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            try:
                stream = self._tls.wrap(stream)
            except OSError:  # it is gone already
                stream.close()
                return
        self._last_number += 1
        connection = self._connections[self._last_number] = _Connection(self._last_number, stream, self._token)
        self._handshakes[connection.number] = connection
        self._selector.register(stream, selectors.EVENT_READ, lambda events: self._serve(connection, events))
        if connection.is_secured:
            self._challenge(connection)

    def _secure(self, connection: _Connection) -> None:
        """Go on with the handshake of TLS."""
        wanted = selectors.EVENT_READ
        try:
            assert isinstance(connection.stream, ssl.SSLSocket)
            connection.stream.do_handshake()
            connection.is_secured = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            wanted = selectors.EVENT_WRITE
        except (OSError, ValueError):  # TLS has told the other side why
            self._drop(connection)
            return
        self._selector.modify(connection.stream, wanted, self._selector.get_key(connection.stream).data)
        if connection.is_secured:
            self._challenge(connection)

    def _challenge(self, connection: _Connection) -> None:
        self.send(connection.number, Challenge(connection.nonce, RELEASE))
        # Before the hello there is no nonce of a worker: a refusal has a tag that no worker accepts.
        connection.seal = Seal(self._token, COORDINATOR, connection.nonce, "")

    def _serve(self, connection: _Connection, events: int) -> None:
        if not connection.is_secured:
            self._secure(connection)
            return
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if events & selectors.EVENT_READ and connection.number in self._connections:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            some = connection.stream.recv(1 << 18)  # longer than a record of TLS, which would keep the rest
        except NOT_NOW:
            return
        except OSError:
            some = b""
        if not some:
            self._drop(connection)
            return
        try:
            for message in connection.reader.take(some):
                if connection.is_admitted:
                    self._callbacks.receive(connection.number, message)
                else:
                    self._handshake(connection, message)
                if connection.number not in self._connections or connection.is_closing:
                    return
        except ProtocolError as problem:
            if connection.is_admitted:
                self._callbacks.violated(connection.number, str(problem))
            self._refuse(connection, "this is not the job's token" if isinstance(problem, WrongTag) else str(problem))

    def _handshake(self, connection: _Connection, message: ControlMessage) -> None:
        if not isinstance(message, Hello) or connection.is_waiting:
            self._refuse(connection, "the first message must be a hello, and the second one follows the welcome")
            return
        connection.seal = Seal(self._token, COORDINATOR, connection.nonce, message.nonce)
        connection.reader.seal = Seal(self._token, WORKER, connection.nonce, message.nonce)
        if message.release != RELEASE:
            self._refuse(connection, f"the worker is of release {message.release}, but the job runs {RELEASE}")
        elif message.purpose:
            self._start_task(connection, message)
        else:
            answer = self._callbacks.admit(connection.number, message)
            if isinstance(answer, Refused):
                self._refuse(connection, answer.reason, answer.may_retry, answer.tries_again)
                return
            connection.is_admitted = True
            self._handshakes.pop(connection.number, None)
            connection.reader.most_bytes = MOST_BYTES
            self.send(connection.number, answer)
            self._callbacks.admitted(connection.number)

    def _start_task(self, connection: _Connection, hello: Hello) -> None:
        """Serve a connection with a purpose of its own, now or when one of too many others has been served."""
        task = self._callbacks.task_for(hello)
        if isinstance(task, Refused):
            self._refuse(connection, task.reason, task.may_retry, task.tries_again)
            return
        connection.is_waiting, connection.since_s = True, time.monotonic()
        self._handshakes.pop(connection.number, None)
        self._queue.append((connection, hello, task))
        self._serve_queue()

    def _serve_queue(self) -> None:
        """Start the tasks that may run, each in a thread: it may take long, and must not delay the others."""
        while self._queue and self._num_tasks < self._most_tasks:
            connection, hello, task = self._queue.popleft()
            if connection.number not in self._connections or connection.is_closing:
                continue
            self._num_tasks += 1
            self._selector.unregister(connection.stream)
            self._connections.pop(connection.number)
            connection.stream.setblocking(True)
            connection.outbox.extend(map(memoryview, make_frame(encode(Welcome(-1, 0.0, hello.job)), connection.seal)))
            run = partial(_run_task, connection, task, lambda: self.call_soon(self._task_ended))
            threading.Thread(target=run, name=hello.purpose, daemon=True).start()

    def _task_ended(self) -> None:
        self._num_tasks -= 1
        self._serve_queue()

    def _tell_queue(self) -> None:
        """Tell those who wait that the coordinator is there, and refuse those who have waited too long."""
        now_s = time.monotonic()
        if not self._queue or now_s < self._told_s + _WAITING_S:
            return
        self._told_s = now_s
        others = f"{self._num_tasks} other connections are served first"
        for connection, hello, _ in self._queue:
            if now_s > connection.since_s + self._queue_s:
                self._refuse(connection, f"it has waited {self._queue_s:g} s for its {hello.purpose}: {others}")
            else:
                self.send(connection.number, Waiting(others))
        self._queue = deque(each for each in self._queue if each[0].number in self._connections and not each[0].is_closing)

    def _refuse(self, connection: _Connection, reason: str, may_retry: bool = False, tries_again: bool = False) -> None:
        """Send the reason, and close the connection afterwards. An admitted connection is closed without one."""
        if not connection.is_admitted:
            self.send(connection.number, Refused(reason, may_retry, tries_again))
        connection.is_closing, connection.is_waiting = True, False
        self._handshakes[connection.number] = connection  # it has no longer than a handshake to read that
        if not connection.outbox or connection.is_admitted:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.number in self._connections:
            self._remove(connection)
            if connection.is_admitted:
                self._callbacks.disconnected(connection.number)

    def _remove(self, connection: _Connection) -> None:
        self._connections.pop(connection.number, None)
        self._handshakes.pop(connection.number, None)
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
        except NOT_NOW:
            pass
        except OSError:
            # Not now: the sender must not get a call of `disconnected` before it returns.
            self.call_soon(lambda: self._drop(connection))
            connection.is_closing = True
            return
        if connection.is_closing and not connection.outbox:
            self._drop(connection)
            return
        if bool(connection.outbox) != connection.is_blocked:
            connection.is_blocked = not connection.is_blocked
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_blocked else 0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(connection.stream, wanted, self._selector.get_key(connection.stream).data)

    def _wake(self, events: int) -> None:
        self._is_woken = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 1 << 12)

    def _drop_late_handshakes(self) -> None:
        late_s = time.monotonic() - _HANDSHAKE_S
        for connection in [each for each in self._handshakes.values() if each.since_s < late_s]:
            self._remove(connection)

    def _drain(self, timeout_s: float = 2.0) -> None:
        end_s = time.monotonic() + timeout_s
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.stream.settimeout(max(0.01, end_s - time.monotonic()))
                for part in connection.outbox:
                    connection.stream.sendall(part)
                connection.stream.shutdown(socket.SHUT_WR)

    def _wait_for_disconnects(self, timeout_s: float = 0.5) -> None:
        """Wait until members have closed their ends: one that sends into a closed connection may lose its last messages."""
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as open_streams:
            for connection in [each for each in self._connections.values() if each.is_admitted]:
                open_streams.register(connection.stream, selectors.EVENT_READ, connection.stream)
            while open_streams.get_map() and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in open_streams.select(left_s):
                    try:
                        is_open = bool(key.data.recv(1 << 18))
                    except OSError:
                        is_open = False
                    if not is_open:
                        open_streams.unregister(key.fileobj)


def _run_task(connection: _Connection, task: ConnectionTask, ended: Callable[[], None]) -> None:
    try:
        with connection.stream as stream, contextlib.suppress(OSError):
            for part in connection.outbox:
                stream.sendall(part)
            assert connection.seal is not None
            task(Session(stream, connection.reader, connection.seal))
    finally:
        ended()
