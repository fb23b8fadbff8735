"""A worker process: it joins a job, plays its row in one epoch after the other, and reports to the coordinator.

Its control thread reacts to the coordinator whatever the main thread does, and aborts the transport when an epoch is over; the
main thread then reports its progress, and waits for the next epoch.
"""

import gc
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recycle.control.decide.messages import FINISH, SET_UP, EpochBegun, EpochStopped, JobEnded, StartEpoch, StopEpoch, Welcome
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.core.cluster import Cluster, Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import CHECKPOINT, Injection
from recycle.core.plans.row_programs import RowProgram
from recycle.host.process_lifetime import end_with_parent
from recycle.host.process_title import set_title
from recycle.host.stop_signals import stop_signals
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.state_digests import stage_digest
from recycle.runtime.data.read_ahead import LoaderDied
from recycle.runtime.execute.spans import now_us
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.transport.gpu.nccl import prepare_process
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.rendezvous import Rendezvous, meet
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.worker.control_thread import ControlThread
from recycle.runtime.worker.device import may_use_nccl, select_device, warm_up
from recycle.runtime.worker.epoch_setup import connect, make_trainer, partners_of, worker_program
from recycle.runtime.worker.fault_injection import FaultInjector
from recycle.runtime.worker.local_stage import CannotLoad, LocalStage
from recycle.runtime.worker.worker_data import WorkerData
from recycle.runtime.worker.worker_reports import WorkerCrashed, WorkerFinished, WorkerWarned
from recycle.runtime.worker.worker_spec import WorkerSpec

_JOIN_S = 60.0
_LAST_REPORT_S = 5.0
# A worker that was asked to stop, and has had no connection for so long, ends without its coordinator.
_STOP_S = 5.0
# The exit codes of a worker that was refused: another process could join, or nothing helps before the user has changed something.
MAY_RETRY, REFUSED = 75, 78
# That of one that cannot use its device, or could not load its stage.
CANNOT_LOAD = 74
MakeSpec = Callable[[Mapping[str, Any]], WorkerSpec]
"""Makes the worker's spec from the coordinator's description of the job."""


def run_worker_process(spec_path: Path, endpoint: Endpoint, place: str, injections: Sequence[Injection] = ()) -> None:
    """Take part in a job to its end, as a process of a launcher. The process ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the launcher ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
    end_with_parent()
    spec: WorkerSpec = pickle.loads(spec_path.read_bytes())
    shares_gpus = spec.options.device == "cuda" and torch.cuda.device_count() < spec.shape.num_workers
    join_job(endpoint, place, lambda about: spec, injections, shares_gpus=shares_gpus)


def join_job(
    endpoint: Endpoint,
    place: str,
    make_spec: MakeSpec,
    injections: Sequence[Injection] = (),
    say: Callable[[str], None] = lambda sentence: None,
    interface: str = "",
    shares_gpus: bool = False,
) -> None:
    """Take part in a job to its end. `place` is the preferred place in the plan, or empty.

    `say` gets a sentence for each place that this worker takes, and for what it waits for. Tensors go by the network `interface`,
    or by the one by which the coordinator is reached. `shares_gpus` if other workers of the job are known to use this one's GPU.
    """
    torch.set_num_threads(1)
    worker = _WorkerProcess(endpoint, place, make_spec, injections, say, interface, shares_gpus)
    with stop_signals(worker.ask_to_stop):
        worker.run()


class _WorkerProcess:
    """The main thread of a worker."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: str,
        make_spec: MakeSpec,
        injections: Sequence[Injection],
        say: Callable[[str], None],
        interface: str = "",
        shares_gpus: bool = False,
    ) -> None:
        self._preferred_place = Worker.parse(place) if place else None
        self._make_spec, self._injections, self._say, self._job = make_spec, injections, say, ""
        self._endpoint, self._interface, self._shares_gpus = endpoint, interface, shares_gpus
        self._spec: WorkerSpec
        self._injector: FaultInjector
        self._stage: LocalStage | None = None
        self._data: WorkerData | None = None
        self._last_left_epoch = -1
        self._control = ControlThread(endpoint, place, self._num_steps, say, interface)

    def _num_steps(self) -> int:
        return self._stage.num_steps if self._stage is not None else 0

    def run(self) -> None:
        try:
            welcome = self._join()
            self._job = welcome.job
            set_title(f"recycle worker of {self._job}")
            self._say(f"joined job {self._job}, and loads it")
            self._spec = self._spec_for(welcome)
            if self._spec.options.device == "cpu" and torch.cuda.device_count():
                self._say("it computes on the CPU, although it has a GPU: the job's device is cpu; --device cuda changes it")
            if may_use_nccl(self._spec.options, self._shares_gpus):
                prepare_process(self._interface)
            warm_up(self._spec.options, self._device_number())
            self._injector = FaultInjector(self._injections, self._spec.deaths)
            on_saved = partial(self._injector.on_progress, label=CHECKPOINT)
            self._data = WorkerData(self._spec, self._control, self._set_device)
            self._stage = LocalStage(self._spec, self._preferred_place, self._control, on_saved)
            gc.freeze()  # a full collection that looks at modules and stages would stop all that wait for this worker
            self._control.report_ready()
            self._say("ready, and waits for its place")
            self._follow(self._stage)
        except JoinRefused as problem:
            if not self._control.is_leaving:  # else others have its work already
                print(f"this worker was turned away: {problem}", file=sys.stderr, flush=True)
                raise SystemExit(MAY_RETRY if problem.may_retry else REFUSED) from None
        except CannotLoad as problem:  # others go on without it
            self._control.client.wait_until_acknowledged(_LAST_REPORT_S)
            print(f"this worker ends: {problem}", file=sys.stderr, flush=True)
            raise SystemExit(CANNOT_LOAD) from None
        except UserError as problem:
            self._report_crash(str(problem), problem)
        except Exception:
            self._report_crash(traceback.format_exc(), None)
        finally:
            if self._data is not None:
                self._data.end()
        # Not after an error: the coordinator kills who closes its connection, and the exit code would be lost.
        self._control.client.close()

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Leave the job at the next iteration boundary, so that nothing is redone; the coordinator says when."""
        self._say(f"{number.name}: it leaves at the next iteration boundary; a second signal ends it at once")
        # In a thread: the main thread, which handles the signal, may be in the middle of a send.
        threading.Thread(target=self._leave, args=(number,), name="leave", daemon=True).start()

    def _leave(self, number: signal.Signals) -> None:
        """Ask to leave; end this process if it has no coordinator that could answer."""
        self._control.leave()
        alone_since_s = time.monotonic()
        while time.monotonic() < alone_since_s + _STOP_S:
            time.sleep(0.1)
            if self._control.client.is_connected:
                alone_since_s = time.monotonic()
        os._exit(128 + number)

    def _join(self) -> Welcome:
        try:
            return self._control.client.join(_JOIN_S, self._say_unanswered)
        except OSError as problem:
            if not self._control.is_leaving:
                what_to_do = "start the coordinator, or correct the address"
                print(f"this worker ends: {self._describe_silence(problem)}: {what_to_do}", file=sys.stderr, flush=True)
            raise SystemExit(MAY_RETRY) from None

    def _say_unanswered(self, problem: OSError) -> None:
        self._say(f"{self._describe_silence(problem)}; this worker asks for {_JOIN_S:g} s")

    def _describe_silence(self, problem: OSError) -> str:
        return f"no coordinator answers at {self._endpoint} ({problem.strerror or problem})"

    def _spec_for(self, welcome: Welcome) -> WorkerSpec:
        try:
            return self._make_spec(welcome.about)
        except UserError as problem:  # of this machine, not of the job: others go on without it
            raise JoinRefused(str(problem)) from None

    def _report_crash(self, text: str, problem: UserError | None) -> None:
        place = self._stage.place if self._stage is not None else self._preferred_place
        self._control.report(WorkerCrashed(place or Worker(0, 0), now_us(), text, problem))
        self._control.client.wait_until_acknowledged(_LAST_REPORT_S)
        raise SystemExit(1)

    def _set_device(self) -> torch.device:
        """Select this worker's device in the calling thread, and return it."""
        return select_device(self._spec.options, self._device_number())

    def _device_number(self) -> int:
        place = self._preferred_place  # a worker that takes a dead one's place takes its GPU
        return place.pipeline * self._spec.shape.num_stages + place.stage if place else self._control.client.member

    def _follow(self, stage: LocalStage) -> None:
        """Start and leave epochs as the coordinator says, until the job has ended."""
        while True:
            match message := self._control.inbox.get():
                case StartEpoch():
                    self._run_epoch(message, stage)
                case StopEpoch(epoch=epoch) if epoch > self._last_left_epoch:
                    self._leave_epoch(epoch, stage, "it was asked to")
                case JobEnded():
                    self._control.client.wait_until_acknowledged(_LAST_REPORT_S)
                    if message.is_left_out:  # whoever started it must not start it again
                        raise JoinRefused(message.reason)
                    return
                case JoinRefused():
                    raise message

    def _run_epoch(self, start: StartEpoch, stage: LocalStage) -> None:
        """Train in one epoch until the last step, or until the epoch is over for this worker."""
        reason, unreachable = "all paused", tuple[str, ...]()
        self._control.activity.begin(SET_UP)
        try:
            if start.epoch > 1:
                self._injector.on_recovery(start.iteration)
            trainer = self._set_up(start, stage)
            self._control.start(start.epoch, trainer)
            if self._train(start, stage, trainer):
                self._finish(start, stage, trainer)
                return
        except TransportBroken as problem:
            reason, unreachable = str(problem), problem.unreachable
        except LoaderDied as problem:  # a fault of this machine: others can read the same data
            self._control.report(WorkerWarned(Worker.parse(start.place), f"{start.place} ends: {problem}"))
            raise CannotLoad(str(problem)) from None
        self._leave_epoch(start.epoch, stage, reason, unreachable)

    def _set_up(self, start: StartEpoch, stage: LocalStage) -> Trainer:
        """Take this worker's place in the epoch, connect to the other workers, and copy the stage's state where it is needed."""
        live = Cluster(self._spec.shape, frozenset(map(Worker.parse, start.dead))).live_workers()
        place, program = Worker.parse(start.place), worker_program(RowProgram.parse(start.program), self._spec.shape)
        view = GroupView(place, sorted(live), start.epoch, partners_of(place, program, start.sources, start.transfers))
        set_title(f"recycle worker {view.worker} of {self._job}")
        self._say(f"{view.worker} in epoch {start.epoch}, of {len(view.workers)} workers, from step {start.iteration + 1} on")
        stage.move_to(view, start, self._set_device())

        data = self._data
        assert data is not None
        reads = place, program.instructions, start.iteration if not start.only_saves else self._spec.num_steps
        if not data.reads_streams:  # samples are made while workers connect
            data.begin(*reads)

        def make_transport(store: Rendezvous) -> Transport:
            meet(store, view, self._control.link_address())
            data.exchange_positions(store, view)
            self._injector.find_link_ends(store, view.worker, self._preferred_place)
            device, address = self._set_device(), self._control.own_address
            watched = self._control.activity, stage.timer, self._injector.delay_s_to
            transport, choice = connect(stage.spec, program, view, store, device, address, *watched)
            if choice.warning and view.worker == view.workers[0]:
                self._control.report(WorkerWarned(view.worker, choice.warning))
            return transport

        transport = self._control.connect(view, stage.spec.ties, make_transport)
        stage.set_program(program.instructions)
        self._injector.instructions, self._injector.parameters = program.instructions, list(stage.state.stage.parameters())
        activity, on_progress = self._control.activity, self._injector.on_progress
        samples = data.reader() if not data.reads_streams else data.begin(*reads)
        told = on_progress, activity, self._injector.speed_in
        trainer = make_trainer(stage.spec, program, view, stage.state, transport, *told, samples)
        regrouped_us = now_us()
        if start.transfers or str(view.worker) in {*start.sources, *start.sources.values()}:
            self._injector.on_transfer(start.iteration)
        if start.transfers_layers:
            stage.transfer_layers(transport.host, start.transfers)
        else:
            stage.transfer(transport.host, start.sources)
        trainer.executor.stage.meter = ActivationMeter(trainer.executor.stage.module)
        self._control.report_begun(EpochBegun(start.epoch, now_us() - regrouped_us))
        return trainer

    def _train(self, start: StartEpoch, stage: LocalStage, trainer: Trainer) -> bool:
        """Train to the last step, with an evaluation where one is due; return False if all paused before."""
        if start.only_saves:
            return trainer.train(start.iteration, stage.on_applied)
        last, evaluation = self._spec.num_steps, self._spec.options.evaluation
        stops = [number for number in range(start.iteration, last) if evaluation.is_due(number, last)]
        for stop in [*stops, last]:
            if not trainer.train(stop, stage.on_applied, pauses_at_end=stop < last):
                return False
            if evaluation.is_due(stop, last):
                stage.evaluate(stop, trainer)
        return True

    def _leave_epoch(self, epoch: int, stage: LocalStage, reason: str, unreachable: tuple[str, ...] = ()) -> None:
        """Leave an epoch, and report the progress of this worker."""
        self._last_left_epoch = epoch
        self._control.activity.end()
        assert self._data is not None
        self._data.end()
        transport, trainer = self._control.leave_epoch()
        if trainer is not None:
            trainer.executor.reset()
        progress = stage.progress()
        if trainer is not None and progress is not None:
            trainer.executor.clock.collect()
            stage.report_undone(progress.num_steps, trainer.spans)
        held = stage.held_layers
        self._control.report_stopped(EpochStopped(epoch, progress, reason, stage.number, stage.origin, unreachable, held))
        if transport is not None:
            transport.abort()  # so that no other worker waits for this one
            transport.close()

    def _finish(self, start: StartEpoch, stage: LocalStage, trainer: Trainer) -> None:
        """Report that all steps are done, and stay, since another worker may still be lost."""
        assert stage.place is not None
        assert self._data is not None
        self._control.activity.begin(FINISH)
        self._data.end()
        stage.finish_checkpoints(start)
        sha256, peak_bytes = (
            stage_digest(trainer.executor.stage.module, self._spec.layers is not None),
            _peak_bytes(self._spec.options.device),
        )
        self._control.activity.end()
        waits = self._data.waited_us, self._data.trained_us
        sizes = peak_bytes, trainer.activation_bytes, start.epoch, trainer.state.held_bytes, *waits
        self._control.report_finished(WorkerFinished(stage.place, sha256, *sizes))


def _peak_bytes(device: str) -> int:
    """The peak memory of the process: of the GPU's, or of the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
