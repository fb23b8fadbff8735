"""The local launcher: it runs a job with a coordinator and every worker of its plan as processes on this machine.

A fork server that has torch loaded already starts a dozen of them in seconds. Workers that died or rejoin are started again, as
is a coordinator that was killed. No process outlives the launcher.
"""

import errno
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import nn

from recycle.control.net.handshake import Endpoint
from recycle.control.net.listener import listen
from recycle.control.net.wire import new_name, new_token
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, Stopped, UserError, WorkerFailed
from recycle.core.events.failure_script import Injection
from recycle.core.events.record import Event, OpsRan, Recovered, Stepped
from recycle.host.by_value import HAS_CLOUDPICKLE, ByValue, without_script
from recycle.host.process_lifetime import interrupts_held
from recycle.host.scratch import scratch
from recycle.host.stop_signals import stop_signals
from recycle.runtime.checkpoint.resume import how_to_resume
from recycle.runtime.coordinator.config import (
    CoordinatorConfig,
    EventsRecorded,
    FirstEpochFormed,
    JobDone,
    JobFailed,
    Notice,
    ReplaceWorker,
    WaitingForWorkers,
    WorkerLost,
)
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.coordinator.process import run_coordinator_process
from recycle.runtime.execute.spans import now_us
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import coordinator_config, worker_spec
from recycle.runtime.launch.forkserver import fork_context
from recycle.runtime.launch.live_injections import LiveInjections
from recycle.runtime.launch.restart_policy import RestartPolicy
from recycle.runtime.launch.start_process import start_process
from recycle.runtime.movable_layers import movable_layer_specs
from recycle.runtime.options import FailureOptions
from recycle.runtime.worker.worker import CANNOT_LOAD, REFUSED, run_worker_process
from recycle.runtime.worker.worker_spec import MakeModel, MakeStage, pickled

_MOST_COORDINATORS = 100
# A worker that was started while the job runs has joined after so long, if it ever does.
_JOIN_US = 60_000_000
# Without a free descriptor, a worker is started when there is one.
_NEXT_TRY_US = 1_000_000
# The exit code that multiprocessing gives a process whose fork server has ended.
_UNKNOWN = 255
Watch = Callable[[Event], None]


def _pickle_stages(stages: Sequence[nn.Module], folder: Path) -> MakeStage:
    """Write the stages to files of this machine, so that a worker loads only its own stage."""
    for number, module in enumerate(stages):
        _write(folder / f"stage-{number}.pickle", pickled(module))
    return partial(_unpickled_stage, folder)


def _unpickled_stage(folder: Path, number: int) -> nn.Module:
    module = pickle.loads((folder / f"stage-{number}.pickle").read_bytes())
    assert isinstance(module, nn.Module)
    return module


def _pickle_model(job: Job, folder: Path) -> MakeModel:
    """Write all stages to one file, which a worker loads when layers move."""
    _write(path := folder / "model.pickle", pickled(list(job.stages)))
    return partial(_unpickled_model, path)


def _unpickled_model(path: Path) -> Sequence[nn.Module]:
    model = pickle.loads(path.read_bytes())
    assert isinstance(model, list)
    return model


def _write(path: Path, body: bytes) -> None:
    try:
        path.write_bytes(body)
    except OSError as problem:
        raise FileProblem(f"cannot write {path}: {problem.strerror or problem}; make room, or set TMPDIR") from None


def launch(
    job: Job,
    watch: Watch = lambda event: None,
    saves_if_stopped: bool = False,
    injections: "Connection[Any, Any] | None" = None,
) -> Trained:
    """Run a job on this machine with a process for every live worker of its plan; `watch` gets every event of the record.

    With `saves_if_stopped`, a first SIGINT or SIGTERM lets the job write a checkpoint, and raises Stopped when that is done.
    `injections` is a pipe over which failures on purpose are asked for.
    """
    _refuse_torchrun()
    begin_us = now_us()
    with scratch() as folder, listen("127.0.0.1", job.options.port) as listener:
        deaths, spec = folder / "deaths", folder / "worker_spec.pickle"
        layer_specs = movable_layer_specs(job)
        make_stage, make_model = _pickle_stages(job.held_stages, folder), _pickle_model(job, folder) if layer_specs else None
        made = worker_spec(job, make_stage, deaths=deaths, make_model=make_model, layer_specs=layer_specs)
        _write(spec, pickled(made))
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], new_token(), new_name())
        config = coordinator_config(job, endpoint, begin_us, folder, deaths, moves_layers=bool(layer_specs))
        context = fork_context(_model_modules(job))
        asked = LiveInjections(injections) if injections is not None else None
        launcher = _Launcher(context, spec, endpoint, config, listener, job.options.failures, watch, asked)
        with stop_signals(launcher.ask_to_stop) if saves_if_stopped else nullcontext():
            return launcher.run()


def _refuse_torchrun() -> None:
    """Raise in a process that torchrun has started beside others: each of them would train the whole job."""
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and num_processes != "1":
        raise UserError(
            f"torchrun has started {num_processes} processes, and each would train the whole job: start one with python, and it "
            "starts the workers; on several machines, use recycle coordinator and recycle agent"
        )


def _model_modules(job: Job) -> list[str]:
    """The Python modules that define the model: the fork server loads them once, instead of every worker."""
    names = {type(part).__module__ for stage in job.stages for part in stage.modules()}
    return sorted(names - {"__main__"})


class _Launcher:
    """All processes of a job on this machine."""

    def __init__(
        self,
        context: ForkServerContext,
        spec: Path,
        endpoint: Endpoint,
        config: CoordinatorConfig,
        listener: socket.socket,
        failures: FailureOptions,
        watch: Watch,
        injections: LiveInjections | None = None,
    ) -> None:
        self._context, self._spec, self._endpoint, self._config, self._listener = context, spec, endpoint, config, listener
        self._failures, self._watch, self._injections = failures, watch, injections
        self._workers: list[BaseProcess] = []
        self._coordinator: BaseProcess | None = None
        self._notices: Connection
        self._num_coordinators = 0
        self._events: list[Event] = []
        self._has_formed = False
        self._rejoins = list(failures.script.rejoins())
        self._changes = list(failures.trace.later) if failures.trace is not None else []
        self._formed_us = 0
        self._stopped_by: signal.Signals | None = None
        self._restarts = RestartPolicy[Worker](failures.restarts)
        self._due_us: dict[Worker, int] = {}
        self._joining_until_us = 0
        self._waits_because = ""

    def run(self) -> Trained:
        try:
            return self._run()
        finally:
            self._end()

    def _run(self) -> Trained:
        self._start_coordinator()
        for place in sorted(row.worker for row in self._config.initial.plan.rows):
            self._start_worker(place, since=0)
        while True:
            match self._next_notice():
                case EventsRecorded(events):
                    for event in events:
                        self._handle_event(event)
                case FirstEpochFormed():
                    self._has_formed, self._formed_us = True, now_us()
                case ReplaceWorker(place):
                    self._start_worker(place, since=self._config.num_steps)
                case WaitingForWorkers(reason):
                    self._waits_because = reason
                    self._help()
                case JobDone(trained):
                    self._refuse_stopped(trained)
                    return trained
                case JobFailed(problem):
                    raise problem
                case WorkerLost(pid, text):
                    raise WorkerFailed(self._describe_exit(pid) or text)

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the job end with a checkpoint, or raise Stopped if there is nothing to save, or nowhere."""
        if not self._has_formed:
            raise Stopped(f"stopped by {number.name} before the first step", number)
        if self._config.folder is None:
            raise Stopped(
                f"stopped by {number.name}; nothing is saved, because the run has no folder: name one with --out", number
            )
        self._stopped_by = number
        if self._coordinator is not None and self._coordinator.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._coordinator.pid, signal.SIGTERM)

    def _refuse_stopped(self, trained: Trained) -> None:
        """Raise if the run was stopped from outside before its last step; the sentence says how to go on."""
        if trained.num_steps >= self._config.num_steps or trained.stopped_because:
            return
        number = self._stopped_by or signal.SIGTERM  # the coordinator may have got one of its own
        sentence = f"stopped by {number.name} after step {trained.num_steps} of {self._config.num_steps}"
        resume = f"its newest checkpoint is of step {trained.saved_steps}; go on with: {how_to_resume(self._config.folder)}"
        raise Stopped(f"{sentence}; {resume if trained.saved_steps else 'no checkpoint could be written'}", number)

    def _start_coordinator(self) -> None:
        self._notices, sink = self._context.Pipe(duplex=False)
        before = None
        if self._num_coordinators:  # the first injection has killed the previous coordinator
            before = self._events
            self._config = replace(self._config, injections=self._config.injections[1:], stops_early=self._stopped_by is not None)
        self._num_coordinators += 1
        args = ByValue(self._config), self._listener, sink, before
        process = self._context.Process(target=run_coordinator_process, args=args, daemon=False, name="coordinator")
        with interrupts_held(), without_script():
            start_process(process)
            self._coordinator = process
        sink.close()

    def _start_worker(self, place: Worker, since: int) -> None:
        """Start a worker that prefers this place, with the script's injections for the place from iteration `since` on."""
        args = self._spec, self._endpoint, str(place), self._failures.script.for_worker(place, since)
        process = self._context.Process(target=run_worker_process, args=args, daemon=True, name=str(place))
        try:
            with interrupts_held(), without_script():
                start_process(process)
                self._workers.append(process)
                if self._has_formed:
                    self._joining_until_us = now_us() + _JOIN_US
        except OSError as problem:  # it was killed while it loaded: one more death, which the job survives
            if not self._has_formed:
                raise
            if problem.errno in (errno.EMFILE, errno.ENFILE):
                self._due_us[place] = now_us() + _NEXT_TRY_US

    def _restart_dead(self) -> None:
        """Start workers again whose time has come, and note when those that have died are to be started.

        The job runs without the dead: each would hold two file descriptors.
        """
        for process in [each for each in self._workers if each.exitcode is not None]:
            place = Worker.parse(process.name)
            is_injected = self._failures.trace is not None or place in self._failures.script.targets()
            is_injected |= self._injections is not None and process.name in self._injections.held
            if process.exitcode not in (0, REFUSED) and not is_injected and self._stopped_by is None:
                pause_s = self._restarts.pause_s(place, time.monotonic())
                if pause_s is not None:
                    self._due_us[place] = now_us() + round(pause_s * 1e6)
            self._workers.remove(process)
            process.close()
        for place in [place for place, due_us in self._due_us.items() if due_us <= now_us()]:
            del self._due_us[place]
            self._start_worker(place, since=0)

    def _next_notice(self) -> Notice | None:
        """Wait for the coordinator's next notice; start another coordinator if it is dead."""
        survives = self._failures.plan_source is not None
        watched = [worker.sentinel for worker in self._workers] if survives or not self._has_formed else []
        asked = self._injections.pipe if self._injections is not None and self._has_formed else None
        ready = wait([self._notices, *watched, *([asked] if asked is not None else [])], self._until_change_s())
        if self._injections is not None and asked in ready:
            self._injections.handle(self._workers, lambda place: self._start_worker(place, since=self._config.num_steps))
        self._play_trace()
        if self._has_formed and survives:
            self._restart_dead()
        if self._waits_because:
            self._help()
        if self._notices in ready:
            try:
                notice: Notice = self._notices.recv()
                return notice
            except (EOFError, OSError):
                self._notices.close()
                self._replace_coordinator()
        elif ready and not self._has_formed:
            self._refuse_early_exit()
        return None

    def _replace_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.join()
        if not self._has_formed or self._num_coordinators >= _MOST_COORDINATORS:
            raise WorkerFailed(f"the coordinator ended with exit code {self._coordinator.exitcode}")
        self._start_coordinator()

    def _refuse_early_exit(self) -> None:
        """Raise if a worker has ended before the first epoch was formed."""
        time.sleep(0.2)  # a last report may be on its way, and says more
        for worker in self._workers:
            if worker.exitcode is not None:
                raise WorkerFailed(self._describe_exit(worker.pid or 0) or f"{worker.name} ended")

    def _handle_event(self, event: Event) -> None:
        # Another coordinator reads them in the run folder, if there is one; ops are many, and it does not need them.
        if self._config.folder is None and not isinstance(event, OpsRan):
            self._events.append(event)
        if isinstance(event, Recovered):
            self._waits_because = ""
        if isinstance(event, Stepped):
            for rejoin in [each for each in self._rejoins if event.iteration + 1 >= each.iteration]:
                self._rejoin(rejoin)
        for seen in event.each() if isinstance(event, OpsRan) else [event]:
            self._watch(seen)

    def _help(self) -> None:
        """Start a worker that was to rejoin later, since no step is done before; raise if nobody will ever join."""
        self._restart_dead()
        if self._rejoins:
            self._rejoin(self._rejoins[0])
            return
        is_joining = now_us() < self._joining_until_us and any(worker.exitcode is None for worker in self._workers)
        is_asked = self._injections is not None and self._injections.pipe is not None  # a user may start a worker
        if not is_joining and not is_asked and not self._due_us and not any(change.joins for change in self._changes):
            where = f": recycle train --resume {self._config.folder}" if self._config.folder is not None else ""
            cause = self._waits_because.partition(";")[0]
            raise WorkerFailed(f"{cause}, and nobody else can join this run; resume it from its last checkpoint{where}")

    def _rejoin(self, rejoin: Injection) -> None:
        self._rejoins.remove(rejoin)
        assert rejoin.target is not None
        self._start_worker(rejoin.target, since=rejoin.iteration)

    def _until_change_s(self) -> float | None:
        if not self._has_formed:
            return None
        times_us = [*self._due_us.values(), *(self._formed_us + change.at_us for change in self._changes[:1])]
        if self._waits_because:
            times_us.append(max(now_us(), self._joining_until_us))
        return max(0.0, (min(times_us) - now_us()) / 1e6) if times_us else None

    def _play_trace(self) -> None:
        """Kill and start the workers that leave and join by now."""
        while self._has_formed and self._changes and self._formed_us + self._changes[0].at_us <= now_us():
            change = self._changes.pop(0)
            if change.joins:
                self._start_worker(Worker.parse(change.node), since=0)
            else:
                for worker in self._workers:
                    if worker.name == change.node and worker.exitcode is None:
                        worker.kill()

    def _describe_exit(self, pid: int) -> str:
        """A sentence on a worker that ended without a report; empty if there is no such worker."""
        for worker in self._workers:
            if worker.pid != pid:
                continue
            worker.join(5)
            if worker.exitcode == 1:
                why = "it says why above"
                if not HAS_CLOUDPICKLE:
                    why = (
                        "without cloudpickle, a worker imports the script that started the run, which must be a file that keeps "
                        'its work under if __name__ == "__main__":'
                    )
                return f"{worker.name} could not start: {why}"
            if worker.exitcode == CANNOT_LOAD:
                return f"{worker.name} could not load its stage, or use its device: it says why above"
            if worker.exitcode == _UNKNOWN:
                return "the fork server, which starts the workers and knows how they end, has ended: look at the machine's memory"
            return f"{worker.name} ended with exit code {worker.exitcode} without a report: look at the machine's memory"
        return ""

    def _end(self) -> None:
        """End every process, also those that are stopped by a signal."""
        if self._injections is not None:
            self._injections.close()
        started, deadline_s = [each for each in (*self._workers, self._coordinator) if each is not None], time.monotonic() + 2.0
        for process in started:  # a worker that got the end of the job ends by itself
            process.join(max(0.0, deadline_s - time.monotonic()) if self._has_formed else 0.0)
        for process in started:
            if process.exitcode is None:
                process.kill()
        for process in started:
            process.join()
