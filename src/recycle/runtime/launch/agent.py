"""`Agent`: the worker processes of one machine, in a job that a coordinator elsewhere runs.

It keeps a worker in every slot. One that dies is started again after a pause, until it has died too often: then its slot is set
aside. A worker that ends because the job is over, or is refused for good, is not started again. No worker outlives the agent.
"""

import signal
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from recycle.core.errors import FileProblem, WorkerFailed
from recycle.host.stop_signals import stop_signals
from recycle.runtime.launch.process_launcher import ProcessLauncher, Say, TakePart
from recycle.runtime.launch.supervisor import Supervisor, WorkerSlot

# The agent looks at its deadlines at least so often, also while it waits for its workers.
_LOOK_S = 0.5


class Agent:
    """The workers of one machine. `say` gets the agent's own sentences; what workers print goes to the error stream.

    With `logs`, it also goes to a file for each slot in that folder.
    """

    def __init__(
        self,
        context: ForkServerContext,
        slots: Sequence[WorkerSlot],
        take_part: TakePart,
        restarts: int,
        grace_s: float,
        say: Say,
        logs: Path | None = None,
    ) -> None:
        gpus = [slot.gpu for slot in slots]
        shared_gpus = frozenset(gpu for gpu in gpus if gpus.count(gpu) > 1)
        self._processes = ProcessLauncher(context, take_part, shared_gpus, say, logs)
        self._supervisor = Supervisor(self._processes, slots, restarts, say, "it is started again in {} s")
        self._grace_s, self._say, self._logs = grace_s, say, logs
        self._stop_until_s: float | None = None

    def run(self) -> None:
        """Keep the workers running until all have ended for good; raises WorkerFailed if none was there to the end."""
        if self._logs is not None:
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                raise FileProblem(f"cannot write {self._logs}: {problem.strerror or problem}") from None
        try:
            with stop_signals(self.ask_to_stop):
                while not self._supervisor.is_done:
                    self._supervisor.step(_LOOK_S)
                    self._end_late()
        finally:
            self._processes.end()
        if self.is_asked_to_stop:
            return
        if not self._supervisor.is_over:
            raise WorkerFailed("no worker of this machine takes part any more: see above why")
        self._say("the job is over")

    @property
    def is_asked_to_stop(self) -> bool:
        return self._stop_until_s is not None

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have all workers leave the job at the next iteration boundary."""
        self._stop_until_s = time.monotonic() + self._grace_s
        self._supervisor.stop_restarts()
        self._say(
            f"{number.name}: {len(self._supervisor.running)} workers leave after the present step, within {self._grace_s:g} s; "
            "a second signal ends them at once"
        )
        self._processes.ask_to_leave()

    def _end_late(self) -> None:
        """End the workers that have not left within their grace."""
        if self._stop_until_s is not None and time.monotonic() > self._stop_until_s:
            for slot in sorted(self._supervisor.running, key=lambda each: each.number):
                self._say(f"{slot} has not left within {self._grace_s:g} s, and is ended")
            self._processes.kill()
            self._stop_until_s += self._grace_s
