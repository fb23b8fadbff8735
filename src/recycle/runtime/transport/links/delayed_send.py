"""DelayedSend: a message that is handed over to the network later than it was sent, as if its link were slow."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from recycle.runtime.transport.specs import TransportBroken

_LOOK_S = 0.05


class DelayedSend:
    """A send that `begin` begins after a while, in a thread of its own: the sender goes on meanwhile, as on a slow link."""

    def __init__(self, begin: Callable[[], Any], delay_s: float, is_over: Callable[[], bool]) -> None:
        self._begin, self._is_over = begin, is_over
        self._work: Any = None
        self._has_begun = threading.Event()
        timer = threading.Timer(delay_s, self._run)
        timer.daemon = True
        timer.start()

    def _run(self) -> None:
        try:
            self._work = self._begin()
        except TransportBroken:  # the epoch is over, which the waiting thread sees
            return
        self._has_begun.set()

    def wait(self, timeout: timedelta) -> None:
        """Wait until the message was taken; raise `RuntimeError` if the epoch is over before."""
        while not self._has_begun.wait(_LOOK_S):
            if self._is_over():
                raise RuntimeError("the epoch is over")
        self._work.wait(timeout)
