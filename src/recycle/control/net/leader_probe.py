"""`LeaderProbe`: asks the other coordinators of a job in which term they lead, each in a thread of its own, and joins none.

A worker that joined to find that out would leave the coordinator that it has, if that is reachable under two addresses. And the
thread that sends heartbeats must not wait for machines that are gone.
"""

import contextlib
import threading
from collections.abc import Callable

from recycle.control.decide.messages import ProtocolError, Welcome
from recycle.control.net.handshake import Endpoint, JoinRefused, shake_hands
from recycle.control.net.wire import Session

PROBE_PURPOSE = "leader_probe"
# How long a coordinator has to answer.
_ANSWER_S = 1.0


def answer_probe(session: Session, term: int) -> None:
    """Tell a worker the term in which this coordinator leads. A worker that has gone is not waited for."""
    with session.stream, contextlib.suppress(OSError):
        session.stream.settimeout(_ANSWER_S)
        session.stream.sendall(session.frame(Welcome(-1, 0.0, "", term=term)))


def ask_term(endpoint: Endpoint) -> int:
    """The term in which the coordinator at an address leads. Raises OSError if none leads there, JoinRefused, ProtocolError."""
    session, _ = shake_hands(endpoint, purpose=PROBE_PURPOSE, timeout_s=_ANSWER_S)
    with session.stream:
        answer = session.reader.receive(session.stream.recv, "the coordinator did not say in which term it leads")
    if not isinstance(answer, Welcome):
        raise ProtocolError("the answer to a probe is no term")
    return answer.term


class LeaderProbe:
    """Finds a coordinator of a higher term. `on_found` is called in a thread of the probe when there is one to `take`."""

    def __init__(self, endpoint: Endpoint, on_found: Callable[[], None]) -> None:
        self._endpoint, self._on_found = endpoint, on_found
        self._lock, self._num_asked = threading.Lock(), 0
        self._best: tuple[int, int] | None = None  # the term of a coordinator, and its number

    def begin(self, present: int, term: int) -> None:
        """Ask all coordinators but the present one, unless they are being asked already; those of a higher term count."""
        num = len(self._endpoint.others)
        with self._lock:
            if self._num_asked:
                return
            self._num_asked = num
        for number in range(present + 1, present + 1 + num):
            threading.Thread(target=self._ask, args=(number, term), name="leader_probe", daemon=True).start()

    def take(self, term: int) -> int | None:
        """The number of a coordinator that leads in a higher term; it is returned once."""
        with self._lock:
            best, self._best = self._best, None
        return best[1] if best is not None and best[0] > term else None

    def _ask(self, number: int, term: int) -> None:
        found = -1
        try:
            with contextlib.suppress(OSError, JoinRefused, ProtocolError):
                found = ask_term(self._endpoint.at(number))
        finally:
            with self._lock:
                self._num_asked -= 1
                if found > term:
                    self._best = max(self._best or (found, number), (found, number))
        if found > term:
            self._on_found()
