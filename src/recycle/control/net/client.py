"""The worker's end of the control connection, in a thread of its own: it renews the lease while the worker computes.

If the coordinator goes away, the worker continues, and the thread reconnects until a coordinator answers. Reports without an
acknowledgement are sent again then.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from recycle.control.decide.failure_detection import RENEWALS_PER_LEASE
from recycle.control.decide.messages import Ack, ControlMessage, ProtocolError, RenewLease, Report, Welcome
from recycle.control.net.handshake import Endpoint, JoinRefused, shake_hands
from recycle.control.net.wire import FrameReader, encode_frame

_RECONNECT_S = 0.1


class Client:
    """A control connection that reconnects by itself. `on_message` is called for every message, in the client's thread.

    `on_refused` is called if the coordinator refuses this worker when it reconnects; the thread ends then. `heartbeat` makes the
    message that renews the lease. `own_address` is the address by which other machines reach this one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        preferred_place: str,
        on_message: Callable[[ControlMessage], None],
        on_refused: Callable[[str], None],
        heartbeat: Callable[[], RenewLease] = RenewLease,
    ) -> None:
        self._endpoint, self._preferred_place = endpoint, preferred_place
        self._on_message, self._on_refused, self._heartbeat = on_message, on_refused, heartbeat
        self.member, self.epoch, self.lease_s = -1, -1, 0.0
        self.own_address = ""
        self._unacknowledged: deque[Report] = deque()
        self._number = 0
        self._lock = threading.Condition()  # notified when reports were acknowledged
        self._stream: socket.socket | None = None
        self._closed = threading.Event()

    def join(self, timeout_s: float) -> Welcome:
        """Connect, and stay connected in a thread. Raises JoinRefused, or OSError if no coordinator answers in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                welcome, reader = self._connect()
                break
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_RECONNECT_S)
        threading.Thread(target=self._stay_connected, args=(reader,), name="control", daemon=True).start()
        return welcome

    def send(self, message: ControlMessage) -> bool:
        """Send a message now; return whether the connection took it."""
        with self._lock:
            if self._stream is None:
                return False
            try:
                self._stream.sendall(encode_frame(message))
            except OSError:
                return False  # the reading thread notices, too, but not before it has read the last messages
            return True

    def report(self, body: dict[str, Any]) -> None:
        """Send a report for the ledger, now or when the coordinator is back."""
        with self._lock:
            self._number += 1
            report = Report(self._number, body)
            self._unacknowledged.append(report)
            self.send(report)

    def wait_until_acknowledged(self, timeout_s: float) -> bool:
        """Return whether all reports were acknowledged within the time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._unacknowledged, timeout_s)

    def close(self) -> None:
        """Disconnect for good; the thread ends soon."""
        with self._lock:
            self._closed.set()
            self._disconnect()

    def _disconnect(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
            self._stream.close()
            self._stream = None

    def _connect(self) -> tuple[Welcome, FrameReader]:
        session = shake_hands(self._endpoint, self._preferred_place, self.member, self.epoch)
        stream, welcome = session.stream, session.welcome
        stream.settimeout(None)
        with self._lock:
            if self._closed.is_set():
                stream.close()
                raise JoinRefused("this worker has disconnected")
            self.member, self.lease_s = welcome.member, welcome.lease_s
            self._stream, self.own_address = stream, stream.getsockname()[0]
            for report in self._unacknowledged:
                self.send(report)
        self._on_message(welcome)
        return welcome, session.reader

    def _stay_connected(self, reader: FrameReader) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, ProtocolError, ValueError):
                self._serve(reader)
            with self._lock:
                self._disconnect()
            if self._closed.wait(_RECONNECT_S):
                return
            try:
                _, reader = self._connect()
            except OSError:
                continue
            except JoinRefused as problem:
                if not self._closed.is_set():
                    self._on_refused(str(problem))
                return

    def _serve(self, reader: FrameReader) -> None:
        """Read messages and renew the lease until the connection breaks."""
        pause_s = self.lease_s / RENEWALS_PER_LEASE
        next_s = time.monotonic()
        for message in reader.take(b""):  # those that came with the welcome
            self._take(message)
        while not self._closed.is_set():
            stream = self._stream
            if stream is None:
                return
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + pause_s
                self.send(self._heartbeat())
            if _is_readable(stream, next_s - time.monotonic()):
                some = stream.recv(1 << 18)
                if not some:
                    raise ConnectionError("the coordinator closed the connection")
                for message in reader.take(some):
                    self._take(message)

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, Ack):
            with self._lock:
                while self._unacknowledged and self._unacknowledged[0].number <= message.number:
                    self._unacknowledged.popleft()
                self._lock.notify_all()
        else:
            self._on_message(message)


def _is_readable(stream: socket.socket, timeout_s: float) -> bool:
    """Wait for bytes to read. Not with `select.select`, which refuses file descriptors above 1023."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
