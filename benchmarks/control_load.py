"""A coordinator under load: its own process with all its parts, and fake workers that speak the real protocol over loopback.

A fake worker joins, takes its place, meets the others, reports iterations with as many ops as its row has, renews its lease, and
stops and begins as it is told; it computes nothing. All of them live in one process with one event loop, and leave the other core
to the coordinator.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import recycle
from recycle.control.decide.failure_detection import RENEWALS_PER_LEASE
from recycle.control.decide.messages import (
    Ack,
    Challenge,
    ControlMessage,
    EpochBegun,
    EpochStopped,
    Hello,
    ProgressReport,
    Ready,
    Refused,
    RenewLease,
    Report,
    StartEpoch,
    StopEpoch,
    StoreEntry,
    StoreRequest,
    Welcome,
)
from recycle.control.net.listener import listen
from recycle.control.net.wire import (
    COORDINATOR,
    MOST_BYTES,
    MOST_BYTES_UNPROVED,
    WORKER,
    EncodedMessage,
    FrameReader,
    Seal,
    encode,
    make_frame,
    new_nonce,
)
from recycle.core.cluster import Shape, Worker
from recycle.core.events.op_columns import OPTIMIZER, REDUCE, OpColumns
from recycle.core.events.record import Event
from recycle.core.plans.plan_source import PlanAssignment
from recycle.core.plans.row_programs import RowProgram
from recycle.core.release import RELEASE
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.config import CoordinatorConfig, JobFailed, Notice
from recycle.runtime.coordinator.process import run_coordinator_process
from recycle.runtime.execute.spans import now_us
from recycle.runtime.worker.worker_reports import IterationApplied, StepUndone, WorkerReport, report_to_json

TOKEN, HOST = "the token of a benchmark", "127.0.0.1"
NUM_MICROBATCHES = 128
_NUM_STEPS = 1_000_000
_RECONNECT_S = 0.1


class _Sink:
    """A launcher that looks at nothing."""

    def send(self, notice: Notice) -> None:
        if isinstance(notice, JobFailed):
            print(f"the job failed: {notice.problem}", flush=True)


def _run(config: CoordinatorConfig, listener: socket.socket, before: list[Event] | None) -> None:
    run_coordinator_process(config, listener, _Sink(), before)


@dataclass
class Coordinator:
    """The coordinator of a job of a shape, in a process of its own. It can be killed and replaced, as a launcher does."""

    shape: Shape
    lease_s: float
    folder: Path
    listener: socket.socket = field(default_factory=lambda: listen(HOST, 0))
    process: BaseProcess | None = None
    config: CoordinatorConfig | None = None

    def prepare(self) -> None:
        """Plan for the job without failures."""
        problem = recycle.problem(self.shape.num_pipelines, self.shape.num_stages, self.shape.num_microbatches, costs="10,13,9")
        source = recycle.Planner(problem, may_move=False)
        initial: PlanAssignment = source.answer(frozenset()).with_texts()
        self.config = CoordinatorConfig(
            job="load",
            token=TOKEN,
            lease_s=self.lease_s,
            initial=initial,
            source=source,
            num_steps=_NUM_STEPS,
            num_samples=self.shape.num_chains,
            memory_profile=initial.plan.problem.profile,
            fingerprint={},
            begin_us=now_us(),
            journal=self.folder / "journal.jsonl",
            folder=self.folder,
        )

    def start(self, is_takeover: bool = False) -> None:
        assert self.config is not None
        # Forked, as from a launcher's fork server: modules are loaded.
        self.process = get_context("fork").Process(target=_run, args=(self.config, self.listener, [] if is_takeover else None))
        self.process.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.join()

    @property
    def record(self) -> Path:
        return self.folder / "record.jsonl"

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def cpu_s(self) -> float:
        """The processor time of the coordinator's process so far, without that of its planning process."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self) -> int:
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class FakeWorker:
    """One worker's end of the protocol."""

    def __init__(self, load: "Load", place: Worker) -> None:
        self.load, self.preferred, self.place = load, place, place
        self.member, self.epoch, self.answered, self.num_steps = -1, -1, -1, 0
        self.stream: socket.socket | None = None
        self.is_welcome = self.trains = False
        self.started_s = 0.0
        self.columns: OpColumns | None = None
        self.number, self.unacknowledged = 0, list[Report]()
        self.begun: EpochBegun | None = None
        self.stopped: EpochStopped | None = None
        self.prepared: tuple[Report, EpochStopped, tuple[EncodedMessage, ...]] | None = None
        self.outbox = bytearray()

    def connect(self) -> None:
        self.stream = socket.create_connection((HOST, self.load.port), 30)
        self.stream.setblocking(False)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader, self.is_welcome = FrameReader(MOST_BYTES_UNPROVED), False
        self.seal: Seal | None = None
        self.outbox.clear()
        self.load.selector.register(self.stream, selectors.EVENT_READ, self)

    def disconnect(self) -> None:
        if self.stream is not None:
            with contextlib.suppress(KeyError):
                self.load.selector.unregister(self.stream)
            self.stream.close()
        self.stream, self.is_welcome = None, False

    def ready(self, events: int) -> None:
        assert self.stream is not None
        if events & selectors.EVENT_WRITE:
            self._flush()
        try:
            some = self.stream.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            some = b""
        if not some:
            self.disconnect()
            self.load.lost(self)
            return
        for message in self.reader.take(some):
            self._take(message)

    def send(self, *messages: ControlMessage) -> None:
        self._send(*map(encode, messages))

    def _send(self, *messages: EncodedMessage) -> None:
        if self.stream is not None:
            for message in messages:
                self.outbox += b"".join(make_frame(message, self.seal))
            self._flush()

    def _flush(self) -> None:
        assert self.stream is not None
        with contextlib.suppress(BlockingIOError, OSError):
            while self.outbox:
                del self.outbox[: self.stream.send(self.outbox)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox else 0)
        self.load.selector.modify(self.stream, wanted, self)

    def report(self, report: WorkerReport) -> None:
        self.number += 1
        self.unacknowledged.append(message := Report(self.number, report_to_json(report), 1))
        if self.is_welcome:
            self.send(message)

    def _take(self, message: ControlMessage) -> None:
        match message:
            case Challenge():
                nonce = new_nonce()
                self.seal = Seal(TOKEN, WORKER, message.nonce)
                # Of another machine, so that the coordinator has no process to fence.
                self.send(Hello(RELEASE, "load", "another", 1, nonce, now_us(), str(self.preferred), self.member, self.epoch))
                self.seal = Seal(TOKEN, WORKER, message.nonce, nonce)
                self.reader.seal, self.reader.most_bytes = Seal(TOKEN, COORDINATOR, message.nonce, nonce), MOST_BYTES
            case Welcome():
                self.member, self.is_welcome = message.member, True
                for again in (self.begun, *self.unacknowledged, Ready(), self.stopped):
                    if again is not None:
                        self.send(again)
                self.load.welcomed += 1
            case Ack():
                self.unacknowledged = [each for each in self.unacknowledged if each.number > message.number]
            case StartEpoch():
                self._start(message)
            case StoreEntry(key="ready/*"):
                self.begun, self.trains = EpochBegun(self.epoch, 0), True
                self.send(self.begun)
            case StopEpoch(epoch=epoch) if epoch > self.answered:
                self._stop(epoch)
            case Refused():
                raise RuntimeError(f"{self.place} is refused: {message.reason}")

    def _start(self, start: StartEpoch) -> None:
        self.epoch, self.place, self.started_s = start.epoch, Worker.parse(start.place), time.monotonic()
        self.num_steps, self.stopped, self.begun, self.trains = start.iteration, None, None, False
        self.first, self.every = start.iteration, start.ops_every
        self.program = start.program
        self.columns = None
        self.send(StoreEntry(start.epoch, f"ready/{self.place}", ""), StoreRequest(start.epoch, ("ready/*",)))
        self.load.started += 1

    def ran(self) -> OpColumns:
        """What it would have run: the ops of its row, whose durations vary, at this time."""
        if self.columns is None:
            program, stage, random, at_us, ran = RowProgram.parse(self.program), self.place.stage, self.load.random, 0, []
            for kind, chain in zip(program.kinds, program.chains, strict=True):
                at_us += random.randrange(20, 2000)
                end_us = at_us + random.randrange(40_000, 44_000)
                ran.append((f"{stage}{kind}{chain % NUM_MICROBATCHES}@{chain // NUM_MICROBATCHES}", at_us, end_us, False))
                at_us = end_us
            self.columns = OpColumns.of(
                [*ran, (REDUCE, at_us, at_us + 9000, False), (OPTIMIZER, at_us + 9000, at_us + 12_000, False)]
            )
        return self.columns.shifted(now_us() - self.columns.end_us)

    def step(self) -> None:
        """Report an iteration."""
        if self.trains:
            ran = self.ran()
            if self.num_steps % self.every and self.num_steps != self.first:
                ran = ran.without_text()
            is_last = self.place.stage == self.load.shape.num_stages - 1
            losses = dict.fromkeys(range(self.load.shape.num_chains), 2.5) if is_last else {}
            self.report(IterationApplied(self.place, self.num_steps, losses, ran, StepVerdict(1.0, 1.0)))
            self.num_steps += 1
            self.prepare()

    def prepare(self) -> None:
        """Prepare what it says when it is stopped. Real workers do that when it is time, all at once."""
        undone = Report(self.number + 1, report_to_json(StepUndone(self.place, self.num_steps, self.ran())), 1)
        stopped = EpochStopped(self.epoch, ProgressReport(self.num_steps), "it was asked to", self.place.stage)
        self.prepared = undone, stopped, (encode(undone), encode(stopped))

    def _stop(self, epoch: int) -> None:
        self.answered, self.trains = epoch, False
        if self.prepared is None or (self.prepared[0].number, self.prepared[1].epoch) != (self.number + 1, epoch):
            self.prepare()
        assert self.prepared is not None
        undone, self.stopped, encoded = self.prepared
        self.number += 1
        self.unacknowledged.append(undone)
        self._send(*encoded)

    def renew(self) -> None:
        if self.is_welcome:
            self.send(RenewLease(self.num_steps, 1000, "0F0", "", 0))


class Load:
    """All fake workers of a job, and the one loop in which they live."""

    def __init__(self, shape: Shape, port: int, lease_s: float) -> None:
        self.shape, self.port, self.random = shape, port, Random(1)
        self.selector = selectors.DefaultSelector()
        self.workers = [FakeWorker(self, place) for place in shape.workers()]
        self.welcomed = self.started = 0
        self._away: list[FakeWorker] = []
        self._renewal_s, self._renewed, self._next_connect_s = lease_s / RENEWALS_PER_LEASE, 0, 0.0
        self._began_s = time.monotonic()

    def join(self) -> None:
        self._away = list(self.workers)

    def lost(self, worker: FakeWorker) -> None:
        self._away.append(worker)

    def kill(self, worker: FakeWorker) -> None:
        """Close its connection, as the system does for a process that is killed."""
        worker.disconnect()
        self.workers.remove(worker)

    def run(self, until: Callable[[], bool], limit_s: float, what: str) -> None:
        """Live until something is so."""
        end_s = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > end_s:
                raise TimeoutError(f"{what}: not after {limit_s:g} s")
            self._live_once(0.01)

    def _live_once(self, wait_s: float) -> None:
        self._renew()
        self._reconnect()
        for key, events in self.selector.select(wait_s):
            if key.data.stream is not None:
                key.data.ready(events)

    def rest(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self.run(lambda: time.monotonic() > end_s, seconds + 1, "rest")

    def _renew(self) -> None:
        """Renew the leases of those whose turn it is: all of them, one after the other, in the time between two renewals."""
        due = int((time.monotonic() - self._began_s) / self._renewal_s * len(self.workers))
        for number in range(max(self._renewed, due - len(self.workers)), due):
            self.workers[number % len(self.workers)].renew()
        self._renewed = due

    def _reconnect(self) -> None:
        if not self._away or time.monotonic() < self._next_connect_s:
            return
        away, self._away = self._away, []
        for worker in away:
            try:
                worker.connect()
            except OSError:
                self._away.append(worker)
        self._next_connect_s = time.monotonic() + _RECONNECT_S

    @property
    def all_train(self) -> bool:
        return all(worker.trains for worker in self.workers)

    @property
    def all_acknowledged(self) -> bool:
        return not any(worker.unacknowledged for worker in self.workers)

    def each(self, act: Callable[[FakeWorker], object]) -> None:
        """Have every worker do something, and meanwhile renew the leases of all."""
        for number, worker in enumerate(list(self.workers)):
            act(worker)
            if number % 16 == 15:
                self._live_once(0.0)

    def step(self) -> None:
        """Have every worker report an iteration."""
        self.each(FakeWorker.step)

    def close(self) -> None:
        for worker in self.workers:
            worker.disconnect()
        self.selector.close()


@contextlib.contextmanager
def loaded(shape: Shape, lease_s: float, folder: Path) -> Iterator[tuple[Coordinator, Load]]:
    """A job of a shape whose workers all train."""
    coordinator = Coordinator(shape, lease_s, folder)
    coordinator.prepare()
    coordinator.start()
    load = Load(shape, coordinator.port, lease_s)
    try:
        load.join()
        load.run(lambda: load.all_train, 300, "all workers train")
        load.each(FakeWorker.prepare)
        yield coordinator, load
    finally:
        load.close()
        if coordinator.process is not None and coordinator.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(coordinator.process.pid, signal.SIGKILL)
            coordinator.process.join()
        coordinator.listener.close()
