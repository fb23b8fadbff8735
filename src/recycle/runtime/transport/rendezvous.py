"""Where the workers of an epoch find each other: a store for process groups, over their connections to the coordinator.

What one puts in, the coordinator passes on to all of the epoch, so that nobody has to ask: a worker waits until it is there. So
there is no server beside the coordinator, nobody without the job's token can read or write it, and a wait ends at once when the
epoch does.
"""

import base64
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta

import torch.distributed as dist

from recycle.runtime.transport.gloo import GlooTransport, TransportBroken

_PATIENCE = timedelta(seconds=60)


class Rendezvous(dist.Store):  # type: ignore[misc,name-defined]
    """The store of one epoch. `share` sends a key and its value to all; what they send comes in by `hear`."""

    def __init__(self, share: Callable[[str, str], object]) -> None:
        super().__init__()
        self._share = share
        self._values: dict[str, bytes] = {}
        self._own: set[str] = set()
        self._changed = threading.Condition()
        self._is_over = False
        self._when_over: list[Callable[[], object]] = []
        self._timeout = _PATIENCE

    def hear(self, key: str, value: str) -> None:
        """Take in what somebody has put in."""
        with self._changed:
            self._values[key] = base64.b64decode(value)
            self._changed.notify_all()

    def share_again(self) -> None:
        """Send all that was put in here once more: who was to pass it on may be another one now."""
        with self._changed:
            own = {key: self._values[key] for key in self._own}
        for key, body in own.items():
            self._send(key, body)

    def abort(self) -> None:
        """The epoch is over: nobody waits any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            called, self._when_over = self._when_over, []
        for call in called:
            call()

    def when_over(self, call: Callable[[], object]) -> None:
        """Have something called when the epoch is over, by whoever ends it; now if it is."""
        with self._changed:
            if not self._is_over:
                self._when_over.append(call)
                return
        call()

    # What torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        body = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = body
            self._own.add(key)
            self._changed.notify_all()
        self._send(key, body)

    def _send(self, key: str, body: bytes) -> None:
        self._share(key, base64.b64encode(body).decode())

    def get(self, key: str) -> bytes:
        self.wait([key], self._timeout)
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end_s = time.monotonic() + (timeout or self._timeout).total_seconds()
        with self._changed:
            while not all(key in self._values for key in keys):
                if self._is_over:
                    raise RuntimeError("the epoch is over")
                if not self._changed.wait(end_s - time.monotonic()):
                    missing = [key for key in keys if key not in self._values]
                    raise RuntimeError(f"nobody has put in {missing[0]}")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def timeout(self) -> timedelta:
        return self._timeout


def made_in_time(make: Callable[[], GlooTransport], rendezvous: Rendezvous) -> GlooTransport:
    """What `make` makes, unless the epoch is over before: gloo waits for one who dies while it connects, and we do not."""
    coming: Future[GlooTransport] = Future()
    rendezvous.when_over(coming.cancel)
    threading.Thread(target=_make, args=(make, coming), name="making links", daemon=True).start()
    try:
        return coming.result()
    except CancelledError:
        raise TransportBroken("the epoch was over before it began") from None


def _make(make: Callable[[], GlooTransport], coming: "Future[GlooTransport]") -> None:
    made = None
    try:
        made = make()
        coming.set_result(made)
    except InvalidStateError:  # it is too late
        if made is not None:
            made.abort()
            made.close()
    except Exception as problem:
        with contextlib.suppress(InvalidStateError):
            coming.set_exception(problem)
