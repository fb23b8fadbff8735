"""Rendezvous: the store by which the workers of an epoch make their process groups, over the connections to the coordinator.

The coordinator keeps every entry that a worker sets, and sends it to the workers that ask for it, when it is there: a worker asks
once, and waits. So there is no server beside the coordinator, nobody without the job's token can read or write the store, and a
wait ends at once when the epoch does.
"""

import base64
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recycle.control.decide.epoch_store import OF_ALL
from recycle.core.cluster import Worker
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView, TransportBroken

_READY = "ready"
_DEFAULT_TIMEOUT, _UNTIL_OVER = timedelta(seconds=60), timedelta(days=1000)


class Rendezvous(dist.Store):  # type: ignore[misc,name-defined]
    """The store of one epoch. `publish` sends an entry to the coordinator, and `ask` asks for entries of other workers.

    The coordinator's answers arrive by `add_entry`.
    """

    def __init__(self, publish: Callable[[str, str], object], ask: Callable[[tuple[str, ...]], object]) -> None:
        super().__init__()
        self._publish, self._ask = publish, ask
        self._asked: set[str] = set()
        self._values: dict[str, bytes] = {}
        self._own: set[str] = set()
        self._changed = threading.Condition()
        self._is_over = False
        self._on_abort: list[Callable[[], object]] = []

    def add_entry(self, key: str, value: str) -> None:
        """Store an entry that another worker has published."""
        with self._changed:
            self._values[key] = base64.b64decode(value)
            self._changed.notify_all()

    def publish_again(self) -> None:
        """Publish all own entries once more, and ask for what has not come: a new coordinator knows nothing of both."""
        with self._changed:
            own = {key: self._values[key] for key in self._own}
            missing = tuple(key for key in sorted(self._asked) if key not in self._values)
        for key, body in own.items():
            self._send(key, body)
        if missing:
            self._ask(missing)

    def abort(self) -> None:
        """End every wait, because the epoch is over."""
        with self._changed:
            self._is_over = True
            callbacks, self._on_abort = self._on_abort, []
        for call in callbacks:  # before anybody wakes up: who fails now does so because the epoch is over
            call()
        with self._changed:
            self._changed.notify_all()

    def on_abort(self, call: Callable[[], object]) -> None:
        """Call a function when the store is aborted, in the thread that aborts it; now if it was aborted before."""
        with self._changed:
            if not self._is_over:
                self._on_abort.append(call)
                return
        call()

    # The methods that torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        body = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = body
            self._own.add(key)
            self._changed.notify_all()
        self._send(key, body)

    def _send(self, key: str, body: bytes) -> None:
        self._publish(key, base64.b64encode(body).decode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = self.fetch(keys, (timeout or _DEFAULT_TIMEOUT).total_seconds())
        if missing:
            raise RuntimeError("the epoch is over" if self._is_over else f"no worker has set {missing[0]}")

    def ask_for(self, keys: list[str]) -> bool:
        """Ask for the entries that are not here; return whether one of them was not asked for before."""
        with self._changed:
            unasked = tuple(key for key in keys if key not in self._values and key not in self._asked)
            self._asked.update(unasked)
        if unasked:
            self._ask(unasked)
        return bool(unasked)

    def fetch(self, keys: list[str], timeout_s: float) -> list[str]:
        """Ask for entries, and wait until all are there, or the epoch or the time is over; return the keys that are missing."""
        self.ask_for(keys)
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._values.keys() >= set(keys), timeout_s)
            return [key for key in keys if key not in self._values]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return self._values.keys() >= set(keys)


def meet(store: Any, view: GroupView, address: str) -> None:
    """Wait until all workers of the epoch are here, or the epoch is over; tell them the address of this one's link check.

    One may load its stage for minutes, and gloo waits for seconds only. The coordinator judges how long that may take.
    """
    store.set(ready_key(view.worker), address)
    store.wait([f"{_READY}/{OF_ALL}"], _UNTIL_OVER)


def ready_key(worker: Worker) -> str:
    """The key under which a worker that is ready to connect says where its link check listens."""
    return f"{_READY}/{worker}"


def make_unless_over(
    make: Callable[[], Transport],
    rendezvous: Rendezvous,
    find_unreachable: Callable[[], tuple[str, ...]],
    check_every_s: float = 3.0,
) -> Transport:
    """Return what `make` makes, unless the epoch ends before, or other workers cannot be reached.

    gloo waits for a worker that dies while it connects, and does not say which one it cannot reach.
    """
    coming: Future[Transport] = Future()
    has_ended = threading.Event()
    coming.add_done_callback(lambda future: has_ended.set())
    rendezvous.on_abort(coming.cancel)
    threading.Thread(target=_make, args=(make, coming), name="making transport", daemon=True).start()
    while not has_ended.wait(check_every_s):
        if names := find_unreachable():
            coming.cancel()
            raise _cut(names)
    try:
        return coming.result()
    except CancelledError:
        raise TransportBroken("the epoch was over before it began") from None
    except TransportBroken:
        if names := find_unreachable():
            raise _cut(names) from None
        raise


def _cut(names: tuple[str, ...]) -> TransportBroken:
    return TransportBroken(f"it cannot reach {', '.join(names)}", names)


def _make(make: Callable[[], Transport], coming: "Future[Transport]") -> None:
    made = None
    try:
        made = make()
        coming.set_result(made)
    except InvalidStateError:  # the epoch is over
        if made is not None:
            made.abort()
            made.close()
    except Exception as problem:
        with contextlib.suppress(InvalidStateError):
            coming.set_exception(problem)
