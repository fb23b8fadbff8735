"""`JsonLines`: the progress of a run as lines of JSON, for those who collect logs of machines."""

import json
import threading
import time
from typing import TextIO

from msgspec.structs import asdict

from recycle.core.events.record import Event, OpRan, OpsRan, name_of


class JsonLines:
    """Prints every event but single ops, as in the record, with the time of day in seconds; sentences are `message` events."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def observe(self, event: Event) -> None:
        if not isinstance(event, OpRan | OpsRan):
            self._print({"event": name_of(event), **asdict(event)})

    def say(self, sentence: str) -> None:
        self._print({"event": "message", "text": sentence})

    def _print(self, facts: dict[str, object]) -> None:
        line = json.dumps({"time": round(time.time(), 6), **facts})
        with self._lock:
            print(line, file=self._stream, flush=True)
