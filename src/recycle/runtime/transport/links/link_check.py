"""LinkCheck: which other workers of an epoch this one cannot reach.

A backend that cannot make a process group does not say which link is cut. So every worker listens at a port for nothing else,
which the others know from the rendezvous; a worker whose groups are not made in time tries to connect to those of the others.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from recycle.core.cluster import Worker
from recycle.runtime.transport.rendezvous import Rendezvous, ready_key

# Long enough for a second attempt of TCP, if the first packet was lost.
_CONNECT_S = 2.5
# Until the coordinator has said where the others listen.
_ANSWER_S = 1.0
_NEXT_TRY_S = 0.1
_MAX_AT_ONCE = 32


class LinkCheck:
    """The port of this worker at the address `host`, for as long as its process lives."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        threading.Thread(target=self._accept, name="link check", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(_NEXT_TRY_S)  # the other end has given up, or this process has no descriptor left
                continue
            connection.close()

    @property
    def address(self) -> str:
        return f"{self.host}:{self._server.getsockname()[1]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # this ends the wait in `accept`, which close alone does not
        self._server.close()


def unreachable(rendezvous: Rendezvous, needed: Collection[Worker], others: Collection[Worker]) -> tuple[str, ...]:
    """Return the other workers that are ready to connect, and cannot be reached; none if those to which this one connects can.

    The coordinator judges by their number which end of a link is cut off. So all others are tried, if a needed one is missed.
    """
    return _out_of_reach(rendezvous, needed) and _out_of_reach(rendezvous, others)


def _out_of_reach(rendezvous: Rendezvous, others: Collection[Worker]) -> tuple[str, ...]:
    keys = [ready_key(other) for other in others]
    missing = rendezvous.fetch(keys, _ANSWER_S if rendezvous.ask_for(keys) else 0.0)
    listening = [other for other in others if ready_key(other) not in missing]
    if not listening:
        return ()
    with ThreadPoolExecutor(min(len(listening), _MAX_AT_ONCE)) as pool:
        reached = pool.map(lambda other: _is_reached(rendezvous.get(ready_key(other)).decode()), listening)
        return tuple(str(other) for other, is_reached in zip(listening, reached, strict=True) if not is_reached)


def _is_reached(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True
