"""A worker process: it joins a job, plays its row in one epoch after the other, and tells what it did.

Its control thread hears the coordinator whatever the main thread does, and cuts the links when an epoch is over; the main thread
then says where it stands, and waits for the next epoch.
"""

import os
import pickle
import resource
import shutil
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    JobEnded,
    PauseAtBoundary,
    RenewLease,
    StartEpoch,
    StopEpoch,
    StoreEntry,
    Welcome,
)
from recycle.control.net.client import Client
from recycle.control.net.handshake import Endpoint, JoinRefused
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import CHECKPOINT, Injection
from recycle.core.plans.plan import Plan
from recycle.host.process_lifetime import end_with_parent
from recycle.runtime.checkpoint import StageWriter, fetch_stage, load_stage
from recycle.runtime.checkpoint.files import read_checkpoint, step_folder
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.weight_digest import digest
from recycle.runtime.coordinator.ledger.worker_reports import (
    IterationApplied,
    StepUndone,
    WorkerCrashed,
    WorkerFinished,
    WorkerReport,
    report_to_json,
)
from recycle.runtime.execute.executor import Span, now_us
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.transport import state_transfer as transfer
from recycle.runtime.transport.gloo import GlooTransport, GroupView, TransportBroken
from recycle.runtime.transport.rendezvous import Rendezvous, made_in_time
from recycle.runtime.transport.select import make_transport
from recycle.runtime.worker.epoch_setup import make_stage_state, make_trainer, worker_program
from recycle.runtime.worker.fault_injection import FaultInjector
from recycle.runtime.worker.worker_spec import WorkerSpec

_JOIN_S = 60.0
_LAST_WORDS_S = 5.0
MakeKit = Callable[[Mapping[str, Any]], WorkerSpec]
"""From what the coordinator says of the job to what a worker needs for it."""


def run_worker_process(packed: Path, door: Endpoint, seat: str, injections: Sequence[Injection] = ()) -> None:
    """Take part in a job to its end, as a process of a launcher. It ends with its parent whatever happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells everybody; the launcher ends its workers
    end_with_parent()
    kit: WorkerSpec = pickle.loads(packed.read_bytes())
    join_job(door, seat, lambda about: kit, injections)


def join_job(door: Endpoint, seat: str, make_kit: MakeKit, injections: Sequence[Injection] = ()) -> None:
    """Take part in a job to its end."""
    torch.set_num_threads(1)
    _Session(door, seat, make_kit, injections).run()


class _Session:
    """One process's part in a job."""

    def __init__(self, door: Endpoint, seat: str, make_kit: MakeKit, injections: Sequence[Injection]) -> None:
        self._make_kit = make_kit
        self._kit: WorkerSpec
        self._inbox: SimpleQueue[ControlMessage | JoinRefused] = SimpleQueue()
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._links: GlooTransport | None = None
        self._trainer: Trainer | None = None
        self._epoch = self._over = self._paused = self._answered = -1
        self._stopped: EpochStopped | None = None
        self._finished: WorkerFinished | None = None
        self._footing: StageState | None = None
        self._has_state = False
        self._seat = Worker.parse(seat) if seat else None
        self._saves = False
        self._writer: StageWriter | None = None
        self._injections = injections
        self._injector: FaultInjector
        self._client = Client(door, seat, self._hear, lambda reason: self._inbox.put(JoinRefused(reason)), self._pulse)

    def run(self) -> None:
        try:
            welcome = self._join()
            self._kit = self._kit_for(welcome)
            self._injector = FaultInjector(self._injections, self._kit.deaths)
            self._follow()
        except JoinRefused as problem:
            raise SystemExit(f"this worker was turned away: {problem}") from None
        except UserError as problem:
            self._say(str(problem), problem)
        except Exception:
            self._say(traceback.format_exc(), None)
        finally:
            self._client.close()

    def _join(self) -> Welcome:
        try:
            return self._client.join(_JOIN_S)
        except OSError as problem:
            raise JoinRefused(f"nobody answers there ({problem.strerror or problem}): start the coordinator first") from None

    def _kit_for(self, welcome: Welcome) -> WorkerSpec:
        try:
            return self._make_kit(welcome.about)
        except UserError as problem:  # of this machine, not of the job: others go on without it
            raise JoinRefused(str(problem)) from None

    def _say(self, text: str, problem: UserError | None) -> None:
        """Last words."""
        self._tell(WorkerCrashed(self._seat or Worker(0, 0), now_us(), text, problem))
        self._client.wait_until_acknowledged(_LAST_WORDS_S)
        raise SystemExit(1)

    def _follow(self) -> None:
        """Do what the coordinator says, until it says that there is nothing more to do."""
        while True:
            match message := self._inbox.get():
                case StartEpoch():
                    self._play(message)
                case StopEpoch(epoch=epoch) if epoch > self._answered:
                    self._answer(epoch, "it was asked to")
                case JobEnded():
                    self._client.wait_until_acknowledged(_LAST_WORDS_S)
                    return
                case JoinRefused():
                    raise message

    # The control thread.

    def _hear(self, message: ControlMessage) -> None:
        """Take in what the coordinator says."""
        match message:
            case StartEpoch(epoch=epoch):
                with self._lock:
                    self._epoch = self._client.epoch = epoch
                    self._stopped = self._finished = None
                    self._rendezvous = Rendezvous(lambda key, value: self._client.send(StoreEntry(epoch, key, value)))
                self._inbox.put(message)
            case StoreEntry(epoch=epoch) if epoch == self._epoch:
                assert self._rendezvous is not None
                self._rendezvous.hear(message.key, message.value)
            case PauseAtBoundary(epoch=epoch):
                with self._lock:
                    self._paused = max(self._paused, epoch)
                    if self._trainer is not None:
                        self._trainer.wants_pause = True
            case Welcome():  # maybe of another coordinator, which does not know
                if self._rendezvous is not None:
                    self._rendezvous.share_again()
                if self._stopped is not None:
                    self._client.send(self._stopped)
                elif self._finished is not None:
                    self._client.report(report_to_json(self._finished))
            case StopEpoch(epoch=epoch):
                with self._lock:
                    self._over = max(self._over, epoch)
                    rendezvous, links = self._rendezvous, self._links
                if rendezvous is not None:
                    rendezvous.abort()
                if links is not None:
                    links.abort()
                self._inbox.put(message)
            case JobEnded():
                self._inbox.put(message)
            case _:
                pass

    def _pulse(self) -> RenewLease:
        trainer, footing = self._trainer, self._footing
        since_us = trainer.executor.busy_since_us if trainer is not None else 0
        return RenewLease(footing.num_steps if footing is not None else 0, now_us() - since_us if since_us else 0)

    # The main thread.

    def _tell(self, told: WorkerReport) -> None:
        self._client.report(report_to_json(told))

    def _play(self, go: StartEpoch) -> None:
        """One epoch, from settling what was before it to its end."""
        reason = "all paused"
        try:
            if go.epoch > 1:
                self._injector.recovering(go.iteration)
            address, plan = self._take_seat(go)
            trainer = self._gather(go, address, plan)
            regrouped_us = now_us()
            self._copy_state(go)
            trainer.executor.stage.meter = ActivationMeter(trainer.executor.stage.module)
            self._client.send(EpochBegun(go.epoch, now_us() - regrouped_us))
            with self._lock:
                self._trainer = trainer
                trainer.wants_pause = self._paused >= go.epoch
            if trainer.train(self._kit.settings.num_steps, self._applied):
                self._finish(go, trainer)
                return
        except TransportBroken as problem:
            reason = str(problem)
        self._answer(go.epoch, reason)

    def _answer(self, epoch: int, reason: str) -> None:
        """Leave an epoch, and say where this worker stands."""
        self._answered = epoch
        spans: Sequence[Span] = ()
        with self._lock:
            links, trainer = self._links, self._trainer
            self._links = self._trainer = None
        if trainer is not None:
            spans = trainer.spans
            trainer.executor.begin_again()
        standing = self._footing.standing() if self._footing is not None and self._has_state else None
        if spans and standing is not None and self._seat is not None:
            self._tell(StepUndone(self._seat, standing.num_steps, spans))
        stage = self._footing.stage.number if self._footing is not None else -1
        self._stopped = EpochStopped(epoch, standing, reason, stage)
        self._client.send(self._stopped)
        if links is not None:
            links.abort()  # so that nobody waits for this one
            links.close()

    def _take_seat(self, go: StartEpoch) -> tuple[GroupView, Plan]:
        """Stand where all go on, at the seat that the epoch has for this worker."""
        seats = {number: Worker.parse(seat) for seat, number in go.places.items()}
        seat = seats[self._client.member]
        is_new = self._footing is None or self._footing.stage.number != seat.stage
        is_fresh = go.checkpoint >= 0 or (go.epoch == 1 and is_new)
        if is_fresh or is_new or str(seat) in go.sources:
            self._has_state = False
            self._footing = self._begin_at(seat.stage, go.iteration)
        assert self._footing is not None
        if is_fresh:
            self._load(go, seat.stage)
            self._has_state = True
        elif str(seat) not in go.sources:
            spans = self._footing.go_to(go.iteration, go.ballot, self._applied)
            if spans and self._seat is not None:
                self._tell(StepUndone(self._seat, go.iteration, spans))
        self._seat = seat
        workers = sorted(seats.values())
        savers = [other for other in workers if other.stage == seat.stage and str(other) not in go.sources]
        self._saves = self._kit.saving is not None and seat == savers[0]
        return GroupView(seat, workers, go.epoch), Plan.parse(go.plan)

    def _begin_at(self, stage: int, num_steps: int) -> StageState:
        """A stage as it is before the first step."""
        if self._kit.saving is not None:
            courier = self._kit.courier
            deliver = courier.upload if courier is not None else None
            self._writer = StageWriter(self._kit.saving.folder, stage, self._tell, deliver)
        return make_stage_state(self._kit, stage, num_steps, self._device())

    def _load(self, go: StartEpoch, stage: int) -> None:
        """Load what a checkpoint has of the stage, if the epoch begins with one."""
        if go.checkpoint > 0:
            assert self._kit.saving is not None
            assert self._footing is not None
            folder = self._kit.saving.folder / step_folder(go.checkpoint)
            if self._kit.courier is not None:
                fetch_stage(self._kit.courier.download, folder, stage)
            checkpoint = read_checkpoint(folder, stage)
            load_stage(checkpoint, stage, self._footing.stage.module, self._footing.stepper.optimizer)
            if self._kit.courier is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _gather(self, go: StartEpoch, address: GroupView, plan: Plan) -> Trainer:
        """Find the others, and be ready to play with them."""
        assert self._footing is not None
        part = worker_program(plan, address.worker)
        with self._lock:
            self._refuse_over(go)
            rendezvous = self._rendezvous
        assert rendezvous is not None
        links = made_in_time(lambda: self._make_links(rendezvous, address, part.turns), rendezvous)
        with self._lock:
            self._links = links
            self._refuse_over(go)
        self._injector.play(part.turns)
        return make_trainer(self._kit, part, address, self._footing, links, self._injector.reached)

    def _refuse_over(self, go: StartEpoch) -> None:
        if self._over >= go.epoch:
            raise TransportBroken("the epoch was over before it began")

    def _make_links(self, store: Rendezvous, address: GroupView, turns: Sequence[Instruction]) -> GlooTransport:
        return make_transport(self._kit, store, address, turns, self._device(), self._client.own_address)

    def _copy_state(self, go: StartEpoch) -> None:
        """Give the state of the stage to whoever is to get it from here, or get it."""
        links, footing = self._links, self._footing
        assert links is not None
        assert footing is not None
        for taker, giver in sorted(go.sources.items()):
            if giver == str(self._seat):
                transfer.send_state(links, Worker.parse(taker), footing.stage.module, footing.stepper.optimizer)
            elif taker == str(self._seat):
                transfer.receive_state(links, Worker.parse(giver), footing.stage.module, footing.stepper.optimizer)
                self._has_state = True

    def _applied(self, iteration: int, losses: Mapping[int, float], spans: Sequence[Span], verdict: StepVerdict) -> None:
        """An iteration is applied for good."""
        assert self._seat is not None
        self._tell(IterationApplied(self._seat, iteration, losses, spans, verdict))
        saving, num_steps = self._kit.saving, self._kit.settings.num_steps
        if self._saves and saving is not None and saving.is_due(iteration + 1, num_steps):
            self._save(iteration + 1)
            self._injector.reached(iteration, CHECKPOINT)

    def _save(self, num_steps: int) -> None:
        assert self._writer is not None
        assert self._footing is not None
        footing, is_last = self._footing, num_steps == self._kit.settings.num_steps
        self._writer.save(num_steps, footing.stage.module, footing.stepper.optimizer, is_last=is_last)

    def _finish(self, go: StartEpoch, trainer: Trainer) -> None:
        """All steps are done: say so, and stay, since somebody may still be lost."""
        assert self._seat is not None
        num_steps = self._kit.settings.num_steps
        if self._saves and go.iteration == num_steps and go.epoch > 1:
            self._save(num_steps)  # who was to save it may be the one that is gone
        if self._writer is not None:
            self._writer.wait()
        module = trainer.executor.stage.module
        peak_bytes = _peak_bytes(self._kit.settings.device)
        self._finished = WorkerFinished(self._seat, digest(module), peak_bytes, trainer.activation_bytes)
        self._tell(self._finished)

    def _device(self) -> torch.device:
        """Where the worker computes. Workers share the GPUs there are; a sum is exact only if every kernel is repeatable."""
        settings = self._kit.settings
        if settings.device != "cuda":
            return torch.device(settings.device)
        if settings.is_exact:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        # autograd's own thread has no context at first, makes one, and says so.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        device = torch.device("cuda", self._client.member % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device


def _peak_bytes(device: str) -> int:
    """What the process held at most: of the GPU's memory, or of the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * 1024
