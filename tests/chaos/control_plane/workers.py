"""Workers of a simulated job: processes that train by a model of their stage's state, and report as real ones do."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from recycle.control.decide.messages import (
    Ack,
    ControlMessage,
    EpochBegun,
    EpochStopped,
    Hello,
    JobEnded,
    Leaving,
    PauseAtBoundary,
    Ready,
    Refused,
    Report,
    StartEpoch,
    StopEpoch,
)
from recycle.core.cluster import Shape, Worker
from recycle.runtime.checkpoint.files import PARTIAL, stage_file, step_folder
from recycle.runtime.checkpoint.writer import StageSaved
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import IterationApplied, StepUndone, WorkerFinished, WorkerReport, report_to_json
from tests.chaos.control_plane.virtual import CLOCK
from tests.control.decide.test_agreement import EpochModel, StateModel

if TYPE_CHECKING:
    from tests.chaos.control_plane.plane import CoordinatorProcess

NUM_STEPS, EVERY = 9, 3
_LAST_REPORT_US = 5_000_000  # a worker that leaves waits so long for its reports to be acknowledged


@dataclass(eq=False)
class SimulatedWorker:
    """A worker process: its connection, what it holds of its stage, and the reports that are not acknowledged."""

    pid: int
    preferred: Worker | None
    member: int = -1
    connection: int | None = None
    process: "CoordinatorProcess | None" = None  # the coordinator that it is connected to
    folder: Path | None = None
    term: int = 0
    inbox: deque[ControlMessage] = field(default_factory=deque)
    outbox: deque[ControlMessage] = field(default_factory=deque)
    unacknowledged: deque[Report] = field(default_factory=deque)
    num_reports: int = 0
    epoch: int = -1
    answered: int = -1
    start: StartEpoch | None = None
    place: Worker | None = None
    state: StateModel | None = None
    origin: int = 1
    num_reported: int = 0
    begun: EpochBegun | None = None
    stopped: EpochStopped | None = None
    finished: WorkerFinished | None = None
    wants_pause: bool = False
    must_stop: bool = False
    is_hung: bool = False
    is_corrupt: bool = False
    speed: float = 1.0
    is_writer: bool = False
    is_ready: bool = False
    is_leaving: bool = False
    leaves_at_us: int | None = None
    saved_last_in: int = -1
    saves: deque[tuple[int, int]] = field(default_factory=deque)

    def send(self, message: ControlMessage) -> None:
        if self.connection is not None:
            self.outbox.append(message)

    def report(self, report: WorkerReport) -> None:
        self.num_reports += 1
        message = Report(self.num_reports, report_to_json(report), self.origin)
        self.unacknowledged.append(message)
        self.send(message)

    @property
    def trains(self) -> bool:
        return self.start is not None and self.begun is not None and self.begun.epoch == self.start.epoch


class Workers:
    """The worker processes of a job, and what each of them may do next. A subclass has the coordinators that they connect to."""

    processes: "list[CoordinatorProcess]"

    def __init__(self, shape: Shape, folder: Path, random: Random) -> None:
        self.shape, self.folder, self.random = shape, folder, random
        self.is_staggered = random.random() < 0.5
        self.workers: list[SimulatedWorker] = []
        self.places: dict[tuple[int, int], Mapping[str, int]] = {}  # the member at each place, by epoch and term
        self.members: dict[int, SimulatedWorker] = {}  # those that live, by their member numbers
        self.num_connections = self.num_files = 0
        self.epochs: dict[int, StartEpoch] = {}

    def places_in(self, start: StartEpoch) -> Mapping[str, int]:
        """The member at each place of a worker's epoch."""
        return self.places[start.epoch, start.term]

    def _actions_of(self, worker: SimulatedWorker) -> Iterator[Callable[[], None]]:
        if worker.inbox:
            yield partial(self._take, worker)
        elif worker.connection is None or (worker.process is not None and worker.process.is_frozen):
            for process in self.processes:
                if process is not worker.process and process.answers:
                    yield partial(self._connect, worker, process)
        if worker.leaves_at_us is not None:
            if not worker.unacknowledged or CLOCK.now_us > worker.leaves_at_us:
                yield partial(self._end, worker)
            return
        if worker.member >= 0 and not worker.is_ready:
            yield partial(self._get_ready, worker)
        if worker.saves and worker.process is not None and not worker.process.is_frozen:  # else it waits for a leader
            yield partial(self._save, worker)
        if worker.start is None:
            return
        start, members = worker.start, self._members_of(worker)
        if worker.must_stop or members is None or any(member.answered >= start.epoch for member in members):
            yield partial(self._answer, worker, worker.epoch)
        elif any(member.start is None or member.start.epoch != start.epoch for member in members):
            pass  # they wait for each other
        elif not worker.trains:
            yield partial(self._begin, worker)
        elif not any(member.must_stop or not member.trains for member in members):
            model = EpochModel([member.state for member in members if member.state is not None], self.is_staggered)
            if worker.wants_pause:
                yield partial(self._pause, members, model)
            assert worker.state is not None
            if worker.state.num_settled < NUM_STEPS and not worker.start.only_saves:
                for action in model.actions_of(worker.state):
                    yield partial(self._train, worker, action)
            elif not worker.saves and worker.finished is None:
                yield partial(self._finish, worker)

    # A worker's connection.

    def _connect(self, worker: SimulatedWorker, process: "CoordinatorProcess") -> None:
        """Connect to a coordinator; one that is silent is left only for one of a higher term."""
        self.num_connections += 1
        number, place = self.num_connections, str(worker.preferred or "")
        hello = Hello("", "", "here", worker.pid, "", CLOCK.now_us, place, worker.member, worker.epoch)
        answer = process.service.admit(number, hello)
        if isinstance(answer, Refused):
            if not answer.tries_again:
                self._remove(worker)
                self._close_end(worker)
            return
        if answer.term < worker.term + (worker.connection is not None):
            process.service.admitted(number)
            process.closing.append(number)
            return
        self._close_end(worker)
        self._forget_number(worker)
        worker.connection, worker.member, worker.process, worker.term = number, answer.member, process, answer.term
        worker.folder = process.folder
        self.members[worker.member] = worker
        process.connected[number] = worker
        for message in (worker.begun, *worker.unacknowledged, worker.stopped):
            if message is not None:
                worker.send(message)
        if worker.is_ready:
            worker.send(Ready())
        if worker.is_leaving:
            worker.send(Leaving())
        if worker.stopped is None and worker.finished is not None:
            worker.report(worker.finished)
        process.service.admitted(number)

    def _close_end(self, worker: SimulatedWorker) -> None:
        """A worker closes its connection, if it has one; what is on its way from the coordinator is lost."""
        if worker.connection is not None and worker.process is not None:
            worker.process.closing.append(worker.connection)
            worker.connection = worker.process = None
            worker.outbox.clear()
            worker.inbox.clear()

    def _get_ready(self, worker: SimulatedWorker) -> None:
        worker.is_ready = True
        worker.send(Ready())

    def _take(self, worker: SimulatedWorker) -> None:
        match message := worker.inbox.popleft():
            case StartEpoch() if message.term < worker.term:
                self._close_end(worker)
            case StartEpoch():
                self._take_place(worker, message)
            case StopEpoch(epoch=epoch) if epoch > worker.answered:
                self._answer(worker, epoch)
            case PauseAtBoundary(epoch=epoch) if worker.start is not None and worker.start.epoch == epoch:
                worker.wants_pause = True
            case Ack(number=number):
                while worker.unacknowledged and worker.unacknowledged[0].number <= number:
                    worker.unacknowledged.popleft()
            case JobEnded() if worker.is_leaving:
                worker.leaves_at_us, worker.start = CLOCK.now_us + _LAST_REPORT_US, None
            case JobEnded() | Refused():
                self._remove(worker)

    def _end(self, worker: SimulatedWorker) -> None:
        """A worker's process ends by itself, and closes its connection."""
        raise NotImplementedError

    def _remove(self, worker: SimulatedWorker) -> None:
        self.workers.remove(worker)
        self._forget_number(worker)

    def _forget_number(self, worker: SimulatedWorker) -> None:
        if self.members.get(worker.member) is worker:  # a later coordinator may have given another one the same
            del self.members[worker.member]

    # A worker's epoch.

    def _take_place(self, worker: SimulatedWorker, start: StartEpoch) -> None:
        assert self.places_in(start)[start.place] == worker.member
        of_all = replace(start, place="", program="", sources={})
        assert self.epochs.setdefault(start.epoch, of_all) == of_all, "two epochs have one number"
        place, is_copied = Worker.parse(start.place), start.place in start.sources
        worker.epoch, worker.start = start.epoch, start
        worker.begun = worker.stopped = worker.finished = None
        worker.wants_pause = worker.must_stop = False
        is_new = worker.state is None or worker.state.stage != place.stage
        if start.checkpoint >= 0 or (start.epoch == 1 and is_new):
            assert worker.folder is not None
            self._check_checkpoint(worker.folder, start.checkpoint, place.stage)
            worker.state = StateModel(place.stage, self.shape.num_stages, num_steps=start.iteration)
            worker.num_reported, worker.is_corrupt = start.iteration, False
        elif is_copied:
            worker.state = None
        else:
            assert worker.state is not None, "it has no state, and gets none"
            assert worker.state.stage == place.stage
            worker.state.go_to(start.iteration, start.ballot)
            self._report_settled(worker)
        worker.place, worker.origin = place, start.origin
        live = [Worker.parse(each) for each in self.places_in(start)]
        peers = sorted(each for each in live if each.stage == place.stage and str(each) not in start.sources)
        worker.is_writer = place == peers[0]

    def _check_checkpoint(self, folder: Path, num_steps: int, stage: int) -> None:
        if num_steps > 0:
            path = folder / "checkpoints" / step_folder(num_steps) / stage_file(stage)
            assert path.read_bytes() == _content(stage, num_steps), f"{path} has something else"

    def _members_of(self, worker: SimulatedWorker) -> list[SimulatedWorker] | None:
        """The members of a worker's epoch, if all of them live."""
        assert worker.start is not None
        try:
            return [self.members[number] for number in self.places_in(worker.start).values()]
        except KeyError:
            return None

    def _begin(self, worker: SimulatedWorker) -> None:
        assert worker.start is not None
        assert worker.place is not None
        if worker.state is None:
            sender = worker.start.sources[str(worker.place)]
            source = self.members[self.places_in(worker.start)[sender]]
            assert source.state is not None
            assert (source.state.stage, source.state.num_steps) == (worker.place.stage, worker.start.iteration)
            worker.state = StateModel(worker.place.stage, self.shape.num_stages, num_steps=worker.start.iteration)
            worker.num_reported, worker.is_corrupt = worker.start.iteration, source.is_corrupt
        worker.begun = EpochBegun(worker.epoch, 20)
        worker.send(worker.begun)

    def _train(self, worker: SimulatedWorker, action: Callable[[], None]) -> None:
        assert worker.start is not None
        assert worker.epoch == max(each.epoch for each in self.workers if each.trains), "two epochs are live"
        action()
        self._report_settled(worker)

    def _report_settled(self, worker: SimulatedWorker) -> None:
        """Report every iteration that is applied for good, at the place where it was run, and save what is due."""
        state, place = worker.state, worker.place
        assert state is not None
        assert place is not None
        for iteration in range(worker.num_reported, state.num_settled):
            is_due = (iteration + 1) % EVERY == 0 or iteration + 1 == NUM_STEPS
            checksum = "" if not is_due else f"wrong {worker.pid}" if worker.is_corrupt else "right"
            losses = {place.pipeline: float(iteration)} if place.stage == self.shape.num_stages - 1 else {}
            ran = columns_of([Span("0F0@0", CLOCK.now_us - 2000, CLOCK.now_us - 1000)])
            pace = {"F": (2, round(1000 / worker.speed))}
            worker.report(IterationApplied(place, iteration, losses, ran, StepVerdict(1.0, 1.0), checksum, pace))
            if is_due and worker.is_writer:
                worker.saves.append((iteration + 1, worker.epoch))
        worker.num_reported = state.num_settled

    def _save(self, worker: SimulatedWorker) -> None:
        num_steps, epoch = worker.saves.popleft()
        assert worker.state is not None
        name, content = self._write_file(worker, num_steps)
        digest = hashlib.sha256(content).hexdigest()
        worker.report(StageSaved(num_steps, worker.state.stage, name, len(content), digest, epoch))

    def _write_file(self, worker: SimulatedWorker, num_steps: int, is_half: bool = False) -> tuple[str, bytes]:
        assert worker.place is not None
        self.num_files += 1
        assert worker.folder is not None
        folder = worker.folder / "checkpoints" / f"{step_folder(num_steps)}{PARTIAL}"
        folder.mkdir(parents=True, exist_ok=True)
        stage = worker.state.stage if worker.state is not None else worker.place.stage
        name, content = f"stage-{stage}.{self.num_files:08x}.safetensors", _content(stage, num_steps)
        (folder / name).write_bytes(content[: len(content) // 2] if is_half else content)
        return name, content

    def _finish(self, worker: SimulatedWorker) -> None:
        assert worker.start is not None
        assert worker.place is not None
        is_last = worker.start.iteration == NUM_STEPS and worker.start.epoch > 1  # its writer may have died
        if (is_last or worker.start.only_saves) and worker.is_writer and worker.saved_last_in != worker.epoch:
            worker.saved_last_in = worker.epoch
            worker.saves.append((worker.start.iteration, worker.epoch))
            return
        worker.finished = WorkerFinished(worker.place, f"{worker.place.stage}", 1, 1, worker.epoch)
        worker.report(worker.finished)

    def _pause(self, members: Sequence[SimulatedWorker], model: EpochModel) -> None:
        """All reach the same boundary between two iterations, and stop there one by one."""
        end = min(NUM_STEPS, max(state.num_reduced for state in model.states))
        while behind := [state for state in model.states if state.num_settled < end]:
            next(actions for state in behind if (actions := model.actions_of(state)))[-1]()
        for member in members:
            member.must_stop = True
            self._report_settled(member)

    def _answer(self, worker: SimulatedWorker, epoch: int) -> None:
        worker.answered, worker.start = epoch, None
        state = worker.state
        progress = state.progress() if state is not None else None
        if state is not None and state.own is not None and worker.place is not None:
            worker.report(
                StepUndone(worker.place, state.num_settled, columns_of([Span("0F0@0", CLOCK.now_us - 900, CLOCK.now_us - 100)]))
            )
        stage = state.stage if state is not None else -1
        worker.stopped = EpochStopped(epoch, progress, "", stage, worker.origin)
        worker.send(worker.stopped)


def _content(stage: int, num_steps: int) -> bytes:
    return f"stage {stage} after {num_steps} steps\n".encode()
