"""Failures on purpose, asked for on the page: what is asked is checked here, and carried out by the launcher of the run."""

import json
import threading
from multiprocessing.connection import Connection
from typing import Any, Protocol

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.live_injection import LiveInjection

_ANSWER_S = 5.0


class Injector(Protocol):
    """Carries out failures on purpose."""

    def inject(self, injection: LiveInjection) -> str:
        """Return a sentence about what was done; raises UserError if it cannot be done."""


class PipeInjector:
    """An injector that asks the launcher over a pipe; one question at a time."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def inject(self, injection: LiveInjection) -> str:
        with self._lock:
            try:
                self._pipe.send_bytes(injection.dumps())
                if not self._pipe.poll(_ANSWER_S):
                    raise UserError("the run does not answer: it may be over")
                answer = json.loads(self._pipe.recv_bytes(65536))
            except (OSError, EOFError, ValueError):
                raise UserError("the run is over: nothing can be done to its workers") from None
        if not isinstance(answer, dict) or "done" not in answer:
            raise UserError(str(answer.get("problem", "the run refused")) if isinstance(answer, dict) else "the run refused")
        return str(answer["done"])


def read_request(body: bytes) -> LiveInjection:
    """Read what a page asks for: an action and a worker; raises UserError if it is anything else."""
    try:
        data = json.loads(body)
        action, worker = data["action"], data["worker"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError("this asks for no injection: it has no action and worker") from None
    if not isinstance(worker, str):
        raise UserError("this asks for no injection: its worker is no text")
    return LiveInjection.of(action, Worker.parse(worker[:40]))
