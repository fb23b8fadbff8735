"""A worker's end of its connection to the coordinator, in a thread of its own: it renews the lease whatever else the worker does.

If the coordinator goes away, the worker goes on with what it does, and the thread knocks until somebody opens. What was told and
not heard is told again then.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from recycle.control.decide.membership import RENEWALS_PER_LEASE
from recycle.control.decide.messages import Ack, ControlMessage, ProtocolError, RenewLease, Report, Welcome
from recycle.control.net.handshake import Endpoint, JoinRefused, shake_hands
from recycle.control.net.wire import FrameReader, encode_frame

_KNOCK_S = 0.1


class Client:
    """A connection that mends itself. `hear` is called for every message, in the client's thread.

    `refused` is called if the coordinator does not want this worker back; the thread ends with it.
    """

    def __init__(
        self,
        door: Endpoint,
        seat: str,
        hear: Callable[[ControlMessage], None],
        refused: Callable[[str], None],
        pulse: Callable[[], RenewLease] = RenewLease,
    ) -> None:
        self._door, self._seat, self._hear, self._refused, self._pulse = door, seat, hear, refused, pulse
        self.member, self.epoch, self.lease_s = -1, -1, 0.0
        self.own_address = ""
        """By which this machine reaches the coordinator, and others reach it."""
        self._untold: deque[Report] = deque()
        self._number = 0
        self._lock = threading.RLock()
        self._stream: socket.socket | None = None
        self._closed = threading.Event()

    def join(self, patience_s: float) -> Welcome:
        """Knock until somebody opens, then stay connected in a thread. Raises TurnedAway, or OSError if nobody is there."""
        end_s = time.monotonic() + patience_s
        while True:
            try:
                welcome, inbox = self._connect()
                break
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_KNOCK_S)
        threading.Thread(target=self._stay, args=(inbox,), name="control", daemon=True).start()
        return welcome

    def send(self, message: ControlMessage) -> bool:
        """Send now; return whether the connection took it."""
        with self._lock:
            if self._stream is None:
                return False
            try:
                self._stream.sendall(encode_frame(message))
            except OSError:
                return False  # whoever reads finds out, too, but not before it has read what came before the end
            return True

    def tell(self, body: dict[str, Any]) -> None:
        """Have something written into the books, now or when the coordinator is back."""
        with self._lock:
            self._number += 1
            tell = Report(self._number, body)
            self._untold.append(tell)
            self.send(tell)

    def wait_until_heard(self, timeout_s: float) -> bool:
        """Return whether everything that was told has been heard within the time."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with self._lock:
                if not self._untold:
                    return True
            time.sleep(0.005)
        return False

    def close(self) -> None:
        """Hang up for good; the thread ends soon."""
        with self._lock:
            self._closed.set()
            self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
            self._stream.close()
            self._stream = None

    def _connect(self) -> tuple[Welcome, FrameReader]:
        """One try at getting in."""
        entered = shake_hands(self._door, self._seat, self.member, self.epoch)
        stream, welcome = entered.stream, entered.welcome
        stream.settimeout(None)
        with self._lock:
            if self._closed.is_set():
                stream.close()
                raise JoinRefused("this worker has hung up")
            self.member, self.lease_s = welcome.member, welcome.lease_s
            self._stream, self.own_address = stream, stream.getsockname()[0]
            for tell in self._untold:
                self.send(tell)
        self._hear(welcome)
        for message in entered.early:
            self._take(message)
        return welcome, entered.inbox

    def _stay(self, inbox: FrameReader) -> None:
        """Read, renew, and connect again, until closed."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ProtocolError, ValueError):
                self._read(inbox)
            with self._lock:
                self._drop()
            if self._closed.wait(_KNOCK_S):
                return
            try:
                _, inbox = self._connect()
            except OSError:
                continue
            except JoinRefused as problem:
                if not self._closed.is_set():
                    self._refused(str(problem))
                return

    def _read(self, inbox: FrameReader) -> None:
        """Serve the connection until it breaks."""
        pause_s = self.lease_s / RENEWALS_PER_LEASE
        next_s = time.monotonic()
        while not self._closed.is_set():
            stream = self._stream
            if stream is None:
                return
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + pause_s
                self.send(self._pulse())
            if _is_readable(stream, next_s - time.monotonic()):
                some = stream.recv(1 << 18)
                if not some:
                    raise ConnectionError("the coordinator closed the connection")
                for message in inbox.take(some):
                    self._take(message)

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, Ack):
            with self._lock:
                while self._untold and self._untold[0].number <= message.number:
                    self._untold.popleft()
        else:
            self._hear(message)


def _is_readable(stream: socket.socket, patience_s: float) -> bool:
    """Wait until there is something to read, at most so long. Not with `select`, which knows small numbers of files only."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(max(0.0, patience_s) * 1000))
