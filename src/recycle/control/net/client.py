"""The worker's end of the control connection, in a thread of its own: it renews the lease while the worker computes.

If the coordinator goes away, the worker continues, and the thread reconnects until a coordinator answers. Reports without an
acknowledgement are sent again then. A job may have several coordinators, of which one leads: the thread tries their addresses in
turn, obeys none of a lower term than it has seen, and looks for another leader as soon as the present one is silent; other
threads do that, so that heartbeats go on.
No send ever waits for the coordinator: what the connection does not take stays in a queue, which the thread sends on. The
coordinator answers every heartbeat, so that a worker notices one that hangs.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from recycle.control.decide.failure_detection import RENEWALS_PER_LEASE
from recycle.control.decide.messages import Ack, ControlMessage, ProtocolError, Refused, RenewLease, Report, StartEpoch, Welcome
from recycle.control.net.handshake import CoordinatorUnproved, Endpoint, JoinRefused, shake_hands
from recycle.control.net.leader_probe import LeaderProbe
from recycle.control.net.tls import NOT_NOW
from recycle.control.net.wire import Session

_RECONNECT_S = 0.1
# A worker that joins says so once if no coordinator has answered for so long.
_UNANSWERED_S = 5.0
# A coordinator is called silent after so many leases. After `_GIVE_UP_S` its connection counts as broken: longer than any pause
# that a job should survive. A worker that finds no coordinator for `_ORPHAN_S` ends.
_SILENT_LEASES, _GIVE_UP_S, _ORPHAN_S = 3, 120.0, 600.0
# After so many leases of silence, other coordinators are asked whether they lead. One of several has this time to connect.
_LOOK_LEASES, _LOOK_S = 0.75, 1.0


class Client:
    """A control connection that reconnects by itself. `on_message` is called for every message, in the client's thread.

    `on_refused` is called if the coordinator has taken this worker for dead, if it refuses it when it reconnects, or if none is
    found; the thread ends then.
    `heartbeat` makes the message that renews the lease; `on_silent` is called once with the time for which the coordinator has
    been silent, and `on_violation` with a sentence about a connection whose messages were not the coordinator's. `own_address`
    is the address by which other machines reach this one. `greeting` is sent whenever it reconnects, before the reports that are
    sent again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        preferred_place: str,
        on_message: Callable[[ControlMessage], None],
        on_refused: Callable[[JoinRefused], None],
        heartbeat: Callable[[], RenewLease] = RenewLease,
        on_silent: Callable[[float], None] = lambda silent_s: None,
        on_violation: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._on_violation = on_violation
        self._endpoint, self._preferred_place = endpoint, preferred_place
        self._on_message, self._on_refused, self._heartbeat, self._on_silent = on_message, on_refused, heartbeat, on_silent
        self.member, self.epoch, self.lease_s = -1, -1, 0.0
        self.own_address, self.origin = "", 0
        self.term = self._current = 0  # the number of the coordinator that is connected, or tried next
        self.greeting: ControlMessage | None = None
        self._unacknowledged: deque[Report] = deque()
        self._number = 0
        self._lock = threading.Condition()  # notified when reports were acknowledged
        self._session: Session | None = None
        self._outbox: deque[memoryview] = deque()
        self._wake = -1
        self._closed = threading.Event()
        self._probe = LeaderProbe(endpoint, self._wake_up)

    def join(self, timeout_s: float, on_unanswered: Callable[[OSError], None] = lambda problem: None) -> Welcome:
        """Connect, and stay connected in a thread. Raises JoinRefused, or OSError if no coordinator answers in time.

        One that listens but does not answer yet, because it reads the record of a long run, has `_ORPHAN_S`. `on_unanswered` is
        called once if there is no connection after some seconds.
        """
        begin_s, is_said = time.monotonic(), False
        while True:
            try:
                session, welcome = self._connect()
                break
            except (OSError, CoordinatorUnproved) as problem:
                if not self._endpoint.others:
                    _refuse_hopeless(problem, self._endpoint.host)
                if time.monotonic() > begin_s + (_ORPHAN_S if isinstance(problem, TimeoutError) else timeout_s):
                    raise
                if not is_said and isinstance(problem, OSError) and time.monotonic() > begin_s + _UNANSWERED_S:
                    on_unanswered(problem)
                    is_said = True
                time.sleep(_RECONNECT_S)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._run, args=(session,), name="control", daemon=True).start()
        return welcome

    def _run(self, session: Session) -> None:
        try:
            self._stay_connected(session)
        finally:
            with self._lock:
                self._disconnect()
                os.close(self._wake)
                self._wake = -1

    @property
    def is_connected(self) -> bool:
        return self._session is not None

    def send(self, message: ControlMessage) -> bool:
        """Send a message, or queue it if the connection takes no more now; return whether there is a connection."""
        with self._lock:
            if self._session is None:
                return False
            self._outbox.append(memoryview(self._session.frame(message)))
            if len(self._outbox) == 1 and not self._send_queued() and self._wake >= 0:
                os.eventfd_write(self._wake, 1)
            return True

    def _send_queued(self) -> bool:
        """Send what is queued as far as the connection takes it; return whether that was all."""
        with self._lock:
            while self._outbox and self._session is not None:
                part = self._outbox[0]
                try:
                    sent = self._session.stream.send(part)
                except OSError:  # full; or broken, which the thread notices, but not before it has read the last messages
                    return False
                self._outbox.popleft()
                if sent < len(part):
                    self._outbox.appendleft(part[sent:])
            return True

    def report(self, body: dict[str, Any]) -> None:
        """Send a report for the ledger, now or when the coordinator is back."""
        with self._lock:
            self._number += 1
            report = Report(self._number, body, self.origin)
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
        if self._session is not None:
            with contextlib.suppress(OSError):
                self._session.stream.shutdown(socket.SHUT_RDWR)
            self._session.stream.close()
            self._session = None
            self._outbox.clear()

    def _connect(self) -> tuple[Session, Welcome]:
        """Connect to the coordinator that is tried next; if that fails, the one after it is next."""
        try:  # with others to try, not for long: a machine that is gone does not even refuse
            return self._connect_to(self._current, self.term, _LOOK_S if self._endpoint.others else None)
        except (OSError, CoordinatorUnproved):
            self._current += 1
            raise

    def _connect_to(self, number: int, least_term: int, timeout_s: float | None = None) -> tuple[Session, Welcome]:
        """Connect to a coordinator. Raises ConnectionError if its term is lower than `least_term`: it does not lead any more."""
        endpoint = self._endpoint.at(number)
        session, welcome = shake_hands(endpoint, self._preferred_place, self.member, self.epoch, timeout_s=timeout_s)
        stream = session.stream
        if welcome.term < least_term:
            stream.close()
            raise ConnectionError(f"the coordinator at {endpoint.host} has term {welcome.term}, and term {self.term} has begun")
        self._current = number
        stream.setblocking(False)
        with self._lock:
            if self._closed.is_set():
                stream.close()
                raise JoinRefused("this worker has disconnected")
            self._disconnect()  # from a coordinator that is silent
            self.member, self.lease_s, self.term = welcome.member, welcome.lease_s, welcome.term
            self._session, self.own_address = session, stream.getsockname()[0]
            for message in [self.greeting, *self._unacknowledged]:
                if message is not None:
                    self.send(message)
        self._on_message(welcome)
        return session, welcome

    def _go_to_other_leader(self) -> Session | None:
        """Connect to a coordinator of a higher term, if one was found, and leave the silent one; it may only stand still."""
        if (number := self._probe.take(self.term)) is not None:
            with contextlib.suppress(OSError, CoordinatorUnproved):
                return self._connect_to(number, self.term + 1, _LOOK_S)[0]
        return None

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _stay_connected(self, session: Session) -> None:
        try:
            while not self._closed.is_set():
                try:
                    while (other := self._serve(session)) is not None:
                        session = other
                except ProtocolError as problem:
                    self._on_violation(f"{problem}; the connection is closed")
                except (OSError, ValueError):
                    pass
                with self._lock:
                    self._disconnect()
                session = self._reconnect()
        except JoinRefused as problem:
            if not self._closed.is_set():
                self._on_refused(problem)

    def _reconnect(self) -> Session:
        end_s = time.monotonic() + _ORPHAN_S
        while not self._closed.wait(_RECONNECT_S):
            try:
                return self._connect()[0]
            except (OSError, CoordinatorUnproved) as problem:
                if time.monotonic() > end_s:
                    cause = (problem.strerror if isinstance(problem, OSError) else "") or problem
                    raise JoinRefused(f"no coordinator has answered for {_ORPHAN_S:.0f} s ({cause})", may_retry=True) from None
        raise JoinRefused("this worker has disconnected")

    def _serve(self, session: Session) -> Session | None:
        """Read messages and renew the lease until the connection breaks. If another leads, return the session with it."""
        pause_s = self.lease_s / RENEWALS_PER_LEASE
        next_s = heard_s = time.monotonic()
        silent_s = _SILENT_LEASES * self.lease_s
        for message in session.reader.take(b""):  # those that came with the welcome
            self._take(message)
        while not self._closed.is_set():
            if self._session is None:
                return None
            if (other := self._go_to_other_leader()) is not None:
                return other
            now_s = time.monotonic()
            if now_s >= next_s:
                if now_s > next_s + pause_s:  # this process stood still itself: an answer may wait to be read
                    heard_s += now_s - next_s
                if now_s > heard_s + silent_s:
                    self._on_silent(now_s - heard_s)
                    silent_s = _GIVE_UP_S  # say it once
                if now_s > heard_s + _GIVE_UP_S:
                    raise ConnectionError("the coordinator is silent")
                if now_s > heard_s + _LOOK_LEASES * self.lease_s:
                    self._probe.begin(self._current, self.term)
                next_s = time.monotonic() + pause_s
                self.send(self._heartbeat())
            if self._wait(session.stream, next_s - time.monotonic()):
                try:
                    with self._lock:  # TLS does not read and write at once
                        some = session.stream.recv(1 << 18)
                except NOT_NOW:
                    continue
                if not some:
                    raise ConnectionError("the coordinator closed the connection")
                heard_s, silent_s = time.monotonic(), _SILENT_LEASES * self.lease_s
                for message in session.reader.take(some):
                    self._take(message)
        return None

    def _wait(self, stream: socket.socket, timeout_s: float) -> bool:
        """Send on what is queued, and return whether there are bytes to read.

        Not with `select.select`, which refuses file descriptors above 1023.
        """
        poll = select.poll()
        poll.register(stream, select.POLLIN if self._send_queued() else select.POLLIN | select.POLLOUT)
        poll.register(self._wake, select.POLLIN)
        ready = dict(poll.poll(max(0.0, timeout_s) * 1000))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        return bool(ready.get(stream.fileno(), 0) & ~select.POLLOUT)

    def _take(self, message: ControlMessage) -> None:
        if isinstance(message, Ack):
            with self._lock:
                while self._unacknowledged and self._unacknowledged[0].number <= message.number:
                    self._unacknowledged.popleft()
                self._lock.notify_all()
        elif isinstance(message, Refused):
            raise JoinRefused(message.reason, message.may_retry)
        elif isinstance(message, StartEpoch) and message.term < self.term:
            raise ConnectionError(f"the coordinator starts an epoch in term {message.term}, and term {self.term} has begun")
        else:
            self._on_message(message)


def _refuse_hopeless(problem: Exception, host: str) -> None:
    """Raise JoinRefused if another try would end like this one."""
    if isinstance(problem, CoordinatorUnproved):
        raise problem
    if isinstance(problem, socket.gaierror) and problem.errno != socket.EAI_AGAIN:  # it will not get a meaning
        raise JoinRefused(f"there is no machine {host} ({problem.strerror})") from None
