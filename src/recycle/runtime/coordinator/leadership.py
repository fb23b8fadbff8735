"""`Leadership` of a coordinator, and `DecisionGate`: what a coordinator may do only as the leader, or only after the journal."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from recycle.control.decide.messages import ALIVE, Ack, ControlMessage
from recycle.control.net.server import Server
from recycle.control.net.wire import EncodedMessage, encode
from recycle.control.store.protocol import Store, StoreAway
from recycle.core.errors import FileProblem, LeadershipLost
from recycle.runtime.coordinator.background import BackgroundJournal

_RENEWALS_PER_LEASE = 4


class Leadership:
    """Renews the leadership of a coordinator in a thread of its own.

    Leadership `is_certain` as long as the store's lease cannot have expired. When it is not, because the store is away or this
    process stood still, another coordinator may lead: then nobody is given up, and no process is killed.
    The serving thread calls `away` with a reason when it becomes uncertain, `back` when it is certain again, `lost` when another
    coordinator leads. It may be uncertain for so short a time, between two renewals, that `away` is not called: who waits for
    `back` all the same says so by `expect_back`.
    """

    def __init__(
        self,
        store: Store,
        call_soon: Callable[[Callable[[], None]], None],
        away: Callable[[str], None],
        back: Callable[[], None],
        lost: Callable[[LeadershipLost], None],
    ) -> None:
        self._store, self._call_soon, self._away, self._back, self._lost = store, call_soon, away, back, lost
        self._closing = threading.Event()
        self._certain_until_s, self._is_told, self._is_awaited = 0.0, False, False
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True) if store.lease_s else None
        if self._thread is not None:
            self._thread.start()

    @property
    def is_certain(self) -> bool:
        return self._thread is None or _boot_time_s() < self._certain_until_s

    def expect_back(self) -> None:
        """Have `back` called after the next renewal that succeeds."""
        self._is_awaited = True

    def _run(self) -> None:
        pause_s, problem = 0.0, ""
        while not self._closing.wait(pause_s):
            pause_s, began_s = self._store.lease_s / _RENEWALS_PER_LEASE, _boot_time_s()
            try:
                self._store.renew()
            except StoreAway as away:
                problem = str(away)
            except (LeadershipLost, FileProblem) as lost:
                self._call_soon(partial(self._lost, LeadershipLost(str(lost))))
                return
            else:
                self._certain_until_s = began_s + self._store.lease_s
                if self._is_told or self._is_awaited:
                    self._is_told = self._is_awaited = False  # before the call: who awaits it from now on is called again
                    self._call_soon(self._back)
            if not self.is_certain and not self._is_told:
                self._is_told = True
                self._call_soon(partial(self._away, problem))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()


def _boot_time_s() -> float:
    """A clock that also goes on while the machine is suspended, as the lease does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class DecisionGate:
    """Holds back what must wait for the store: messages that rest on the journal, and giving members up.

    While it is not certain that this coordinator leads, another one may: then no member is given up, and no process is killed.
    `warn` gets a sentence for everything that waits. `step_down` is called once, if another coordinator leads.
    """

    def __init__(
        self, store: Store, server: Server, warn: Callable[[str], None], step_down: Callable[[LeadershipLost], None]
    ) -> None:
        self._server, self._warn, self._step_down = server, warn, step_down
        self._held: list[tuple[int, EncodedMessage]] = []
        self._deferred: list[tuple[Callable[[], None], str]] = []
        self._is_over = self._was_away = self._is_away_told = False
        call_soon = server.call_soon
        self.journal = BackgroundJournal(store, call_soon, self._journaled, self._late, self._lost)
        self._leadership = Leadership(store, call_soon, self._away, self._back, self._lost)

    @property
    def is_certain(self) -> bool:
        """Whether this coordinator leads for certain."""
        return self._leadership.is_certain

    def send_all(self, connections: Iterable[int], message: ControlMessage) -> None:
        """Send a message, as soon as all that it may rest on is in the journal. An answer to a heartbeat rests on nothing."""
        if message is ALIVE and not self.is_certain:  # workers that hear nothing look for a coordinator that leads for certain
            return
        encoded = encode(message)
        if self.journal.num_pending and not isinstance(message, Ack):
            self._held += [(connection, encoded) for connection in connections]
            return
        for connection in connections:
            self._server.send_encoded(connection, encoded)

    def when_certain(self, act: Callable[[], None], what: str) -> None:
        """Act now, or when it is certain again that this coordinator leads; `what` has happened, for the warning."""
        if self.is_certain:
            act()
            return
        if not self._deferred:
            self._warn(f"{what}, but it is not certain that this coordinator leads: the job waits for the store")
        self._deferred.append((act, what))
        self._leadership.expect_back()

    def has_waited(self) -> bool:
        """Whether this coordinator has waited for the store since the last call: it stood still for that reason, and said so."""
        was_away, self._was_away = self._was_away, False
        return was_away

    def close(self) -> None:
        self._leadership.close()
        self.journal.close()

    def _journaled(self, problem: str | None) -> None:
        if problem is not None:
            self._warn(f"{problem}; training goes on, but another coordinator could not replace this one")
        if not self.journal.num_pending:
            held, self._held = self._held, []
            for connection, encoded in held:
                self._server.send_encoded(connection, encoded)

    def _late(self, problem: str) -> None:
        self._warn(f"the next epoch waits for the store, which does not answer: {problem}")

    def _away(self, problem: str) -> None:
        self._was_away = self._is_away_told = True
        cause = f"the store does not answer: {problem}" if problem else "this coordinator stood still for longer than its lease"
        self._warn(f"{cause}; training goes on, but the job waits for the store if a worker fails")

    def _back(self) -> None:
        if self._is_away_told:
            self._is_away_told = False
            self._warn("the store answers again")
        deferred, self._deferred = self._deferred, []
        for act, what in deferred:
            self.when_certain(act, what)  # it may have become uncertain again before this call

    def _lost(self, problem: LeadershipLost) -> None:
        if not self._is_over:
            self._is_over = True
            self._step_down(problem)
