"""The local launcher: a coordinator and every worker of a plan as processes on this machine.

Processes are forked from a server that has torch loaded already, which starts a dozen of them in seconds. The launcher starts
what has to be started: workers, those that come back, and another coordinator if it was killed. No process is left behind,
however this one ends.
"""

import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch import nn

from recycle.control.decide.membership import DEFAULT_LEASE_S, refuse_lease
from recycle.control.net.handshake import Endpoint
from recycle.control.net.server import listen
from recycle.control.net.wire import new_name, new_token
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, WorkerFailed
from recycle.core.events.failure_script import NOTHING, Injection, Script
from recycle.core.events.record import Event, OpRan, Stepped
from recycle.core.events.trace import Trace
from recycle.core.plans.plan_source import PlanSource
from recycle.host.process_lifetime import interrupts_held
from recycle.host.scratch import scratch
from recycle.runtime.coordinator.config import (
    JOURNAL,
    CoordinatorConfig,
    EventsRecorded,
    FirstEpochFormed,
    JobDone,
    JobFailed,
    Notice,
    WaitingForWorkers,
    WorkerLost,
    coordinator_config,
)
from recycle.runtime.coordinator.ledger.run_folder import RunFolderOptions
from recycle.runtime.coordinator.ledger.run_ledger import Trained
from recycle.runtime.coordinator.service import run_coordinator_process
from recycle.runtime.execute.executor import now_us
from recycle.runtime.job import Job
from recycle.runtime.launch.forkserver import fork_context
from recycle.runtime.worker.worker import run_worker_process
from recycle.runtime.worker.worker_spec import pickled, worker_spec

_MOST_COORDINATORS = 100
Watch = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class PickledStages:
    """The stages of a job in files of this machine, so that a worker loads the one it needs and no other."""

    folder: Path

    @staticmethod
    def keep(stages: Sequence[nn.Module], folder: Path) -> "PickledStages":
        for number, module in enumerate(stages):
            _write(folder / f"stage-{number}.pickle", pickled(module))
        return PickledStages(folder)

    def make(self, number: int) -> nn.Module:
        module = pickle.loads((self.folder / f"stage-{number}.pickle").read_bytes())
        assert isinstance(module, nn.Module)
        return module


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as problem:
        raise FileProblem(f"cannot write {path}: {problem.strerror or problem}; make room, or set TMPDIR") from None


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """What is to go wrong while a job runs: a script by steps, or a trace by the clock; and who makes plans for it."""

    source: PlanSource | None = None
    script: Script = NOTHING
    trace: Trace | None = None
    lease_s: float = DEFAULT_LEASE_S

    def __post_init__(self) -> None:
        refuse_lease(self.lease_s)


_NO_FAILURES = FailureOptions()


def launch(
    job: Job, watch: Watch, plot: RunFolderOptions | None = None, failures: FailureOptions = _NO_FAILURES, port: int = 0
) -> Trained:
    """Train with a process for every live worker of the job's plan, and return what came of it; `watch` gets all events."""
    begin_us = now_us()
    with scratch() as folder, listen("127.0.0.1", port) as listener:
        deaths = folder / "deaths"
        saving = plot.saving if plot is not None else None
        kit = worker_spec(job, PickledStages.keep(job.stages, folder), job.parcels(), saving, deaths)
        door = Endpoint("127.0.0.1", listener.getsockname()[1], new_token(), new_name())
        brief = coordinator_config(
            job,
            door,
            failures.source,
            failures.lease_s,
            plot,
            begin_us=begin_us,
            journal=(plot.folder if plot is not None else folder) / JOURNAL,
            deaths=deaths,
            injections=failures.script.for_coordinator(),
        )
        seats = sorted(brief.initial.places)
        path = folder / "kit.pickle"
        _write(path, pickled(kit))
        return _Launcher(fork_context(_homes(job)), path, door, brief, listener, failures, watch).run(seats)


def _homes(job: Job) -> list[str]:
    """The modules that define what is trained: loaded once by the server, instead of by every worker."""
    parts = {type(part).__module__ for stage in job.stages for part in stage.modules()}
    return sorted(parts - {"__main__"})


class _Launcher:
    """All processes of a job on this machine."""

    def __init__(
        self,
        context: ForkServerContext,
        kit: Path,
        door: Endpoint,
        brief: CoordinatorConfig,
        listener: socket.socket,
        failures: FailureOptions,
        watch: Watch,
    ) -> None:
        self._context, self._kit, self._door, self._brief, self._listener = context, kit, door, brief, listener
        self._failures, self._watch = failures, watch
        self._workers: list[BaseProcess] = []
        self._coordinator: BaseProcess | None = None
        self._num_coordinators = 0
        self._events: list[Event] = []
        self._has_formed = False
        self._rejoins = list(failures.script.rejoins())
        self._changes = list(failures.trace.later) if failures.trace is not None else []
        self._formed_us = 0

    def run(self, seats: Sequence[Worker]) -> Trained:
        try:
            ear = self._start_coordinator()
            for seat in seats:
                self._start(seat, since=0)
            while True:
                said, ear = self._next(ear)
                match said:
                    case EventsRecorded(events):
                        for event in events:
                            self._happened(event)
                    case FirstEpochFormed():
                        self._has_formed, self._formed_us = True, now_us()
                    case WaitingForWorkers() if self._rejoins:
                        self._rejoin(self._rejoins[0])  # its step will not come before it
                    case JobDone(trained):
                        return trained
                    case JobFailed(problem):
                        raise problem
                    case WorkerLost(pid, text):
                        raise WorkerFailed(self._epitaph(pid) or text)
        finally:
            self._end()

    def _start_coordinator(self) -> Connection:
        ear, mouth = self._context.Pipe(duplex=False)
        before = None
        if self._num_coordinators:  # the first of the script has come to pass
            before = self._events
            self._brief = replace(self._brief, injections=self._brief.injections[1:])
        self._num_coordinators += 1
        process = self._context.Process(
            target=run_coordinator_process, args=(self._brief, self._listener, mouth, before), daemon=False, name="coordinator"
        )
        with interrupts_held():
            process.start()
            self._coordinator = process
        mouth.close()
        return ear

    def _start(self, seat: Worker, since: int) -> None:
        """Start a worker that would like this seat; the script for it from iteration `since` on is its own."""
        injections = self._failures.script.for_worker(seat, since)
        process = self._context.Process(
            target=run_worker_process, args=(self._kit, self._door, str(seat), injections), daemon=True, name=str(seat)
        )
        self._drop_dead()
        try:
            with interrupts_held():
                process.start()
                self._workers.append(process)
        except OSError:  # it was killed while it loaded, which is one more death, and no reason to end the others
            if not self._has_formed:
                raise

    def _drop_dead(self) -> None:
        """Let go of processes that are gone, once the job runs without them: each holds on to two files."""
        if self._has_formed and self._failures.source is not None:
            for process in [each for each in self._workers if each.exitcode is not None]:
                self._workers.remove(process)
                process.close()

    def _next(self, ear: Connection) -> tuple[Notice | None, Connection]:
        """Wait for what the coordinator says next; start another if it is gone."""
        timeout_s = self._until_change_s()
        watched = [] if self._has_formed else [worker.sentinel for worker in self._workers]
        ready = wait([ear, *watched], timeout_s)
        self._play_trace()
        if ear in ready:
            try:
                return ear.recv(), ear
            except (EOFError, OSError):
                ear.close()
                return None, self._replace_coordinator()
        if ready and not self._has_formed:
            self._refuse_early_end()
        return None, ear

    def _replace_coordinator(self) -> Connection:
        assert self._coordinator is not None
        self._coordinator.join()
        if not self._has_formed or self._num_coordinators >= _MOST_COORDINATORS:
            raise WorkerFailed(f"the coordinator ended with exit code {self._coordinator.exitcode}")
        return self._start_coordinator()

    def _refuse_early_end(self) -> None:
        """Who ends before all are there will not come."""
        time.sleep(0.2)  # its last words are on their way, and say more
        for worker in self._workers:
            if worker.exitcode is not None:
                raise WorkerFailed(self._epitaph(worker.pid or 0) or f"{worker.name} ended")

    def _happened(self, event: Event) -> None:
        if not isinstance(event, OpRan):  # those are many, and nobody needs them again
            self._events.append(event)
        if isinstance(event, Stepped):
            for rejoin in [each for each in self._rejoins if event.iteration + 1 >= each.iteration]:
                self._rejoin(rejoin)
        self._watch(event)

    def _rejoin(self, rejoin: Injection) -> None:
        self._rejoins.remove(rejoin)
        assert rejoin.target is not None
        self._start(rejoin.target, since=rejoin.iteration)

    def _until_change_s(self) -> float | None:
        if not self._changes or not self._has_formed:
            return None
        return max(0.0, (self._formed_us + self._changes[0].at_us - now_us()) / 1e6)

    def _play_trace(self) -> None:
        """Kill and start who leaves and joins by now."""
        while self._has_formed and self._changes and self._formed_us + self._changes[0].at_us <= now_us():
            change = self._changes.pop(0)
            if change.joins:
                self._start(Worker.parse(change.node), since=0)
            else:
                for worker in self._workers:
                    if worker.name == change.node and worker.exitcode is None:
                        worker.kill()

    def _epitaph(self, pid: int) -> str:
        """What can be said of a worker that ended without a word."""
        for worker in self._workers:
            if worker.pid != pid:
                continue
            worker.join(5)
            if worker.exitcode == 1:
                return (
                    f"{worker.name} could not start: a worker imports the script that started the run, which must be a file that "
                    'keeps its work under if __name__ == "__main__":'
                )
            return f"{worker.name} ended with exit code {worker.exitcode} and without a word: look at the machine's memory"
        return ""

    def _end(self) -> None:
        """End every process: who is stopped does not hear anything but this."""
        started = [process for process in (*self._workers, self._coordinator) if process is not None]
        deadline_s = time.monotonic() + 2.0
        for process in started:  # who has been told to end does so by itself
            process.join(max(0.0, deadline_s - time.monotonic()) if self._has_formed else 0.0)
        for process in started:
            if process.exitcode is None:
                process.kill()
        for process in started:
            process.join()
