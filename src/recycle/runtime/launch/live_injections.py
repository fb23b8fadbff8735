"""`LiveInjections`: failures that a user asks for while a run goes on, carried out on the worker processes of this machine."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.live_injection import HANG, KILL, RESUME, SLOW, START, LiveInjection

# A slow worker is stopped for half of each of these times: shorter than any lease, longer than a tick of the scheduler.
_TURN_S = 0.02
_MOST_BYTES = 4096
# A worker that was started has loaded after so long, if it ever does; until then no other is started for its place.
_LOADING_S = 15.0


class LiveInjections:
    """Answers requests that come over a pipe, one at a time. Processes whose name is in `held` are not started again."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.pipe: Connection[Any, Any] | None = pipe
        self.held: set[str] = set()
        self._slowed: dict[int, threading.Event] = {}
        self._started_s: dict[Worker, float] = {}

    def handle(self, workers: Sequence[BaseProcess], start: Callable[[Worker], None]) -> None:
        """Carry out the request that has come, on one of the processes `workers` or by `start`, and answer it."""
        assert self.pipe is not None
        try:
            request = self.pipe.recv_bytes(_MOST_BYTES)
        except (EOFError, OSError):  # whoever asks is gone: the run goes on without
            self.close()
            return
        try:
            answer = {"done": self._carry_out(LiveInjection.loads(request), workers, start)}
        except UserError as problem:
            answer = {"problem": str(problem)}
        with suppress(OSError):
            self.pipe.send_bytes(json.dumps(answer).encode())

    def close(self) -> None:
        """Answer no more, and let slow workers run at full speed."""
        for stop in self._slowed.values():
            stop.set()
        if self.pipe is not None:
            self.pipe.close()
        self.pipe = None

    def _carry_out(self, asked: LiveInjection, workers: Sequence[BaseProcess], start: Callable[[Worker], None]) -> str:
        if asked.action == START:
            return self._start(asked.worker, start)
        process = next((each for each in workers if each.pid == asked.pid and each.exitcode is None), None)
        if process is None or process.pid is None:
            raise UserError(f"{asked.worker} has no process that runs on this machine")
        match asked.action:
            case action if action == KILL:
                self.held.add(process.name)
                process.kill()
                return f"{asked.worker} (pid {process.pid}) was killed"
            case action if action == HANG:
                self.held.add(process.name)
                os.kill(process.pid, signal.SIGSTOP)
                return f"{asked.worker} (pid {process.pid}) hangs"
            case action if action == SLOW:
                return self._slow(asked.worker, process)
        assert asked.action == RESUME
        if (stop := self._slowed.pop(process.pid, None)) is not None:
            stop.set()
        os.kill(process.pid, signal.SIGCONT)
        return f"{asked.worker} (pid {process.pid}) goes on at full speed"

    def _start(self, place: Worker, start: Callable[[Worker], None]) -> str:
        now_s = time.monotonic()
        if now_s - self._started_s.get(place, -_LOADING_S) < _LOADING_S:
            raise UserError(f"a process for {place} is loading already")
        self._started_s[place] = now_s
        self.held.discard(str(place))
        start(place)
        return f"a new process for {place} was started"

    def _slow(self, place: Worker, process: BaseProcess) -> str:
        assert process.pid is not None
        if process.pid in self._slowed:
            raise UserError(f"{place} is slow already")
        self._slowed[process.pid] = stop = threading.Event()
        threading.Thread(target=_stop_and_go, args=(process, stop), daemon=True).start()
        return f"{place} (pid {process.pid}) runs at about half its speed"


def _stop_and_go(process: BaseProcess, stop: threading.Event) -> None:
    """Let a process run for half of the time, until `stop` is set or the process ends."""
    try:
        while process.pid is not None and process.exitcode is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(_TURN_S / 2)
            os.kill(process.pid, signal.SIGCONT)
            if stop.wait(_TURN_S / 2):
                return
    except (OSError, ValueError):  # it has ended, and was closed
        return
