"""`LiveInjection`: a failure that a user asks for while a run goes on, as the page sends it to the launcher of the run."""

import json
from dataclasses import dataclass
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError

KILL, HANG, SLOW, RESUME, START = "kill", "hang", "slow", "resume", "start"
LIVE_ACTIONS = (KILL, HANG, SLOW, RESUME, START)
_FORMAT, _VERSION = "recycle-injection", 1


@dataclass(frozen=True, slots=True)
class LiveInjection:
    """An action on the worker at a place: SIGKILL, SIGSTOP, half its speed, go on at full speed, or a new process for the place.

    `pid` is the process that has the place by the record; 0 if it is not known.
    """

    action: str
    worker: Worker
    pid: int = 0

    @staticmethod
    def of(action: Any, worker: Worker, pid: int = 0) -> "LiveInjection":
        if action not in LIVE_ACTIONS:
            raise UserError(f"{str(action)[:40]!r} is no action: it is one of {', '.join(LIVE_ACTIONS)}")
        return LiveInjection(action, worker, pid)

    def dumps(self) -> bytes:
        facts = {"format": _FORMAT, "version": _VERSION, "action": self.action, "worker": str(self.worker), "pid": self.pid}
        return json.dumps(facts).encode()

    @staticmethod
    def loads(data: bytes) -> "LiveInjection":
        """Read what `dumps` wrote; raises UserError for anything else."""
        try:
            facts = json.loads(data)
            if facts["format"] != _FORMAT or facts["version"] != _VERSION or type(facts["pid"]) is not int:
                raise UserError("this is no injection of this release")
            return LiveInjection.of(facts["action"], Worker.parse(str(facts["worker"])), facts["pid"])
        except (ValueError, KeyError, TypeError) as problem:
            if isinstance(problem, UserError):
                raise
            raise UserError("this is no injection") from None
