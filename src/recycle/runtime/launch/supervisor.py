"""`Launcher`, the seam between a job and what places its workers, and `Supervisor`, which keeps a worker running on every slot.

An agent runs worker processes of its machine behind this seam, and `recycle ray` runs agents on the machines of a Ray cluster.
Slurm's batch script and Kubernetes start agents by themselves, and start them again: there the seam is the command line.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from recycle.runtime.launch.restart_policy import RestartPolicy

# One that leaves before the job is over was asked to, on its machine; another one takes its place so much later.
_LEFT_S = 10.0
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Where a worker runs: a number, and a GPU by its UUID if the machine that starts it has any."""

    number: int
    gpu: str = ""

    def __str__(self) -> str:
        return f"worker {self.number} on {self.gpu}" if self.gpu else f"worker {self.number}"


class EndKind(Enum):
    """What an end means: the job is over, or the worker left, was refused for good, failed, or was lost with its machine."""

    OVER = auto()
    LEFT = auto()
    REFUSED = auto()
    FAILED = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of the worker of a slot; `how` goes on from the name of the slot, as "was killed by SIGKILL"."""

    slot: WorkerSlot
    kind: EndKind
    how: str = ""


class Launcher(Protocol):
    """Starts a worker of the job on a slot, watches it, and ends it."""

    def start(self, slot: WorkerSlot) -> None:
        """Start a worker on a slot that has none. Raises OSError if that is not possible now."""

    def wait(self, timeout_s: float) -> Sequence[WorkerEnd]:
        """Wait until something happens to a worker, for `timeout_s` at most; return those that have ended since the last call."""

    def end(self) -> None:
        """End all workers; nothing of them is left afterwards."""


class Supervisor:
    """Keeps a worker running on every slot, until the job is over or it is asked to `stop_restarts`. `say` gets what happens.

    A worker that fails is started again after a pause, at most `restarts` times an hour; then its slot is set aside. One that is
    lost with its machine is started again however often that happens. `again` says when, with a place for the seconds.
    """

    def __init__(
        self, launcher: Launcher, slots: Sequence[WorkerSlot], restarts: int, say: Callable[[str], None], again: str
    ) -> None:
        self._launcher, self._say, self._again = launcher, say, again
        self._failures, self._losses = RestartPolicy[WorkerSlot](restarts), RestartPolicy[WorkerSlot](_UNLIMITED)
        self._waiting = list(slots)
        self._running: set[WorkerSlot] = set()
        self._due_s: dict[WorkerSlot, float] = {}
        self._is_stopped = False
        self.is_over, self.last_failure = False, "no worker has failed"

    @property
    def num_left(self) -> int:
        """How many workers run, or will run."""
        return len(self._running) + len(self._due_s) + len(self._waiting)

    @property
    def running(self) -> frozenset[WorkerSlot]:
        return frozenset(self._running)

    @property
    def is_done(self) -> bool:
        """Whether no worker runs, and none is to be started."""
        return not self._running and (self.is_over or self._is_stopped or not self.num_left)

    def stop_restarts(self) -> None:
        """Start no worker any more; a signal handler may call this."""
        self._is_stopped = True

    def step(self, wait_s: float) -> None:
        """Start the workers whose time has come, wait until something happens, for `wait_s` at most, and act on it."""
        self._start_due()
        if self._is_stopped or self.is_over:  # nothing is started any more
            self._due_s.clear()
        soonest_s = min(self._due_s.values(), default=float("inf")) - time.monotonic()
        for end in self._launcher.wait(max(0.0, min(wait_s, soonest_s))):
            self._running.discard(end.slot)
            self._ended(end)

    def _start_due(self) -> None:
        now_s = time.monotonic()
        due = [*self._waiting, *(slot for slot, due_s in self._due_s.items() if due_s <= now_s)]
        for slot in due:
            if self._is_stopped or self.is_over:
                return
            if slot in self._due_s:
                del self._due_s[slot]
            else:
                self._waiting.remove(slot)
            try:
                self._launcher.start(slot)
                self._running.add(slot)
            except OSError as problem:
                self._ended(WorkerEnd(slot, EndKind.FAILED, f"could not be started ({problem.strerror or problem})"))

    def _ended(self, end: WorkerEnd) -> None:
        """Note that a worker has ended, and decide whether and when it is started again."""
        now_s = time.monotonic()
        if end.kind is EndKind.OVER:
            self.is_over = True
        elif end.kind is EndKind.REFUSED:
            self._say(f"{end.slot} was refused, and is not started again")
        elif self._is_stopped:
            return
        elif end.kind is EndKind.LEFT:
            self._due_s[end.slot] = now_s + _LEFT_S
        else:
            policy = self._losses if end.kind is EndKind.LOST else self._failures
            pause_s = policy.pause_s(end.slot, now_s)
            if pause_s is None:
                self.last_failure = f"{end.slot} {end.how}"
                self._say(f"{end.slot} {end.how}, too often within an hour: it is set aside, and the job goes on without it")
            else:
                self._say(f"{end.slot} {end.how}; {self._again.format(f'{pause_s:g}')}")
                self._due_s[end.slot] = now_s + pause_s
