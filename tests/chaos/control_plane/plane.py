"""ControlPlane: a coordinator with all its parts, workers, and the connections between them, under a virtual clock."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from recycle.control.decide.members import Member, Reporters
from recycle.control.decide.messages import Leaving, RenewLease
from recycle.control.decide.new_epoch import NewEpoch
from recycle.control.store.file_store import FileStore
from recycle.control.store.protocol import Store
from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import LeadershipLost, PeersDiffer
from recycle.core.events.record import Stepped
from recycle.core.events.record_file import RECORD, read_record
from recycle.core.plans.plan_source import PlanAssignment, places_for
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from recycle.runtime.coordinator.config import CoordinatorConfig, JobDone, JobFailed, WaitingForWorkers
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.service import CoordinatorService
from recycle.runtime.options import CheckpointOptions, RunFolderOptions
from tests.chaos.control_plane.simulated_store import SimulatedEtcd, SimulatedStore
from tests.chaos.control_plane.virtual import CLOCK, VirtualPlans, VirtualServer
from tests.chaos.control_plane.workers import EVERY, NUM_STEPS, SimulatedWorker, Workers
from tests.control.decide.coordinator_harness import LEASE_S, plan_for

SHAPES = (Shape(2, 2, 2), Shape(3, 2, 2), Shape(2, 3, 2), Shape(1, 2, 2))
NUM_ACTIONS = (0, 1, 3, 8, 20, 60)
_TICK_US = 250_000  # rarer than a real server's, and often enough for every deadline


class CoordinatorProcess:
    """A coordinator process with its connections: the listener of its server, its launcher, and its source of plans."""

    server: VirtualServer
    plans: VirtualPlans

    def __init__(self, plane: "ControlPlane", folder: Path, is_takeover: bool, store: Store) -> None:
        self.plane, self.folder, self.store = plane, folder, store
        self.connected: dict[int, SimulatedWorker] = {}
        self.closing: deque[int] = deque()  # connections of which the server has yet to read the end
        self.is_frozen, self.end = False, None
        cluster = Cluster(plane.shape, frozenset())
        initial = PlanAssignment(plan_for(cluster), places_for(cluster, frozenset()), "the first")
        options = RunFolderOptions("run"), CheckpointOptions(EVERY, keep=2)
        config = CoordinatorConfig(
            job="job",
            token="token",
            lease_s=LEASE_S,
            initial=initial,
            source=self,  # type: ignore[arg-type]
            num_steps=NUM_STEPS,
            num_samples=4,
            memory_profile=initial.plan.problem.profile,
            fingerprint={},
            begin_us=1_000_000,
            journal=folder / "journal.jsonl",
            folder=folder,
            run_folder=options[0],
            checkpoint=options[1],
        )
        has_record = is_takeover and (folder / RECORD).exists()
        self.run_folder = RunFolder(folder, *options, initial.plan, {}, NUM_STEPS, has_record)
        before = self.run_folder.before if has_record or not is_takeover else ()
        self.service = CoordinatorService(config, self, self, self.run_folder, before, None, store)  # type: ignore[arg-type]
        self.service.epoch_started = partial(self._note_places, self.service.epoch_started)  # type: ignore[method-assign]

    def _note_places(
        self, started: Callable[[PlanAssignment, NewEpoch], Reporters], assignment: PlanAssignment, start: NewEpoch
    ) -> Reporters:
        """Note who is where in an epoch: a worker hears only of its own place."""
        self.plane.places[start.epoch, start.term] = start.places
        return started(assignment, start)

    @property
    def answers(self) -> bool:
        return not self.is_frozen and not self.server.is_stopped

    def send(self, notice: Any) -> None:
        """The launcher's end of the pipe."""
        self.plane.notices.append(notice)
        if isinstance(notice, JobDone) or (isinstance(notice, JobFailed) and notice.is_over):
            self.plane.is_over, self.plane.folder = True, self.folder

    def close(self, number: int) -> None:
        """The server closes a connection; a worker that lives has read all that was sent before."""
        if (worker := self.connected.pop(number, None)) is not None:
            worker.connection = worker.process = None
            worker.outbox.clear()

    def read(self, number: int, worker: SimulatedWorker) -> None:
        self.service.receive(number, worker.outbox.popleft())

    def read_end(self) -> None:
        number = self.closing[0]
        worker = self.connected.get(number)
        if worker is not None and worker.connection == number and worker.outbox and worker not in self.plane.workers:
            self.read(number, worker)
            return
        self.closing.popleft()
        self.connected.pop(number, None)
        self.service.disconnected(number)

    def tick(self) -> None:
        for number, worker in list(self.connected.items()):
            if not worker.is_hung and worker in self.plane.workers and worker.connection == number:
                self.service.receive(number, RenewLease())
        self.server.leadership.renew()
        self.service.tick()

    def actions(self) -> Iterator[Callable[[], None]]:
        for background in self.server.backgrounds:
            if background.jobs:
                yield background.run_next
        if self.server.calls:
            yield lambda: self.server.calls.popleft()()
        if self.plans.requests:
            yield self.plans.make_next
        if self.closing:
            yield self.read_end
        for number, worker in self.connected.items():
            if worker.outbox and worker.connection == number:  # also of a process that is gone: its last bytes are on their way
                yield partial(self.read, number, worker)


class ControlPlane(Workers):
    """Coordinator processes, the workers, and the connections between them.

    The journal is in a file, or in a replicated store: then there is always a standby, which takes over when a coordinator is
    killed or frozen, with its folder, or, if `loses_folders`, without it.
    """

    def __init__(self, random: Random, folder: Path) -> None:
        super().__init__(random.choice(SHAPES), folder, random)
        self.is_moving, self.are_unequal = random.random() < 0.5, random.random() < 0.3
        self.etcd = SimulatedEtcd(random, loses=random.choice([0.0, 0.0, 0.2])) if random.random() < 0.5 else None
        self.loses_folders, self.has_lost_record = random.random() < 0.5 and self.etcd is not None, False
        self.num_pids = self.num_folders = 0
        self.processes: list[CoordinatorProcess] = []
        self.notices: list[Any] = []
        self.is_over = False
        self.next_tick_us = 0
        CLOCK.now_us, CLOCK.plane = 1_000_000, self
        self.start_coordinator(is_takeover=False)
        for _ in range(random.choice([self.shape.num_workers - 1, *[self.shape.num_workers] * 4])):
            self.join()

    # Processes.

    @property
    def process(self) -> CoordinatorProcess | None:
        """The coordinator that was started last, if it lives and is not frozen."""
        return self.processes[-1] if self.processes and not self.processes[-1].is_frozen else None

    @property
    def service(self) -> CoordinatorService | None:
        return self.process.service if self.process is not None else None

    def start_coordinator(self, is_takeover: bool) -> None:
        """Start a coordinator if it leads; with a replicated store, it may not lead yet."""
        store: Store = FileStore(self.folder / "journal.jsonl") if self.etcd is None else SimulatedStore(self.etcd)
        if store.campaign() is not None:
            return
        if is_takeover and (self.processes or self.loses_folders):  # a frozen coordinator has its folder still
            self.num_folders += 1
            self.folder, self.has_lost_record = self.folder.parent / f"run{self.num_folders}", True
            self.folder.mkdir()
        self.processes.append(CoordinatorProcess(self, self.folder, is_takeover, store))

    def kill_coordinator(self) -> None:
        """Kill the one that leads, with all that waits in it; of what it has sent, the first messages may still arrive."""
        process = self.processes.pop()
        process.run_folder.__exit__()
        if self.etcd is None:
            process.store.resign()
        for number, worker in list(process.connected.items()):
            if worker.connection == number:
                while worker.inbox and self.random.random() < 0.5:
                    worker.inbox.pop()
                worker.connection = worker.process = None
                worker.outbox.clear()

    def _end_stopped(self) -> None:
        """Coordinators that have stepped down end, and their connections with them."""
        for process in [process for process in self.processes if process.server.is_stopped and not self.is_over]:
            self.processes.remove(process)
            process.run_folder.__exit__()
            for number in list(process.connected):
                process.close(number)

    def fence(self, member: Member) -> None:
        for worker in [worker for worker in self.workers if worker.pid == member.pid]:
            self.end_process(worker)

    def end_process(self, worker: SimulatedWorker) -> None:
        self._remove(worker)
        if worker.saves and worker.folder is not None and self.random.random() < 0.5:
            self._write_file(worker, worker.saves[0][0], is_half=True)

    # What may happen to them.

    def join(self) -> None:
        self.num_pids += 1
        preferred = self.random.choice([None, *self.shape.workers()]) if self.random.random() < 0.3 else None
        speed = self.random.choice([1.0, 1.0, 0.6]) if self.are_unequal else 1.0
        self.workers.append(SimulatedWorker(self.num_pids, preferred, speed=speed))

    def _pick(self, is_wanted: Callable[[SimulatedWorker], bool] = lambda worker: True) -> SimulatedWorker | None:
        found = [worker for worker in self.workers if is_wanted(worker)]
        return self.random.choice(found) if found else None

    def kill(self) -> None:
        if (worker := self._pick()) is not None:
            self.end_process(worker)
            self._close_socket(worker)

    def leave(self) -> None:
        """A worker is asked to stop, and asks to leave."""
        if (worker := self._pick(lambda worker: not worker.is_leaving)) is not None:
            worker.is_leaving = True
            worker.send(Leaving())

    def _end(self, worker: SimulatedWorker) -> None:
        self._remove(worker)
        self._close_socket(worker)

    def _close_socket(self, worker: SimulatedWorker) -> None:
        """The system closes the connection of a process that is gone; what it has sent arrives."""
        if worker.connection is not None and worker.process is not None:
            worker.process.closing.append(worker.connection)

    def hang(self) -> None:
        if (worker := self._pick()) is not None:
            worker.is_hung = True

    def wake(self) -> None:
        if (worker := self._pick(lambda worker: worker.is_hung)) is not None:
            worker.is_hung = False

    def slow(self) -> None:
        """A worker becomes slower or faster: the coordinator may change the plan, or leave the worker out."""
        if (worker := self._pick()) is not None:
            worker.speed = self.random.choice([0.2, 0.6, 1.0])

    def disconnect(self) -> None:
        """A connection breaks, and loses what is on its way."""
        if (worker := self._pick(lambda worker: worker.connection is not None)) is not None:
            self._close_end(worker)

    def restart(self) -> None:
        if self.process is not None and self.random.random() < 0.5:
            self.kill_coordinator()
            self.act(self.random.choice(NUM_ACTIONS))
        self._start_again()

    def _start_again(self) -> None:
        """Start a coordinator if none leads. With a replicated store, the lease of the one before must have expired."""
        if self.process is None and not self.is_over and (self.etcd is None or not self.etcd.is_away):
            self.start_coordinator(is_takeover=True)

    def freeze(self) -> None:
        """The coordinator that leads stands still, with its connections open, until it wakes up; often in an append."""
        if self.etcd is None or self.process is None or len(self.processes) > 2:
            return
        if self.random.random() < 0.5:
            self.kill()
            for _ in range(300):
                if self.process is None or self.process.service._journal.num_pending:
                    break
                self.act(1)
        if self.process is not None:
            self.process.is_frozen = True

    def thaw(self) -> None:
        """All coordinators that were frozen wake up; one that believes to lead acts on what it finds, until it steps down."""
        for process in self.processes:
            process.is_frozen = False

    def lose_store(self) -> None:
        if self.etcd is not None:
            self.etcd.is_away = True

    def restore_store(self) -> None:
        if self.etcd is not None:
            self.etcd.is_away = False

    def corrupt(self) -> None:
        if (worker := self._pick(lambda worker: worker.trains)) is not None:
            worker.is_corrupt = True

    def wait(self) -> None:
        for _ in range(self.random.choice([2, 10])):
            self._pass(LEASE_S / 10)
            self.act(self.random.choice(NUM_ACTIONS))

    def stall(self) -> None:
        """The coordinator stands still; nobody may be taken for dead because of that."""
        if self.process is not None and not self.process.server.is_stopped:
            CLOCK.now_us += round(1e6 * self.random.choice([0.6, 1.9, 12.0, 130.0]))
            coordinator = self.process.service._coordinator
            num_members = len(coordinator.members)
            self._tick()
            assert len(coordinator.members) == num_members

    # Time and actions.

    def _pass(self, seconds: float) -> None:
        end_us = CLOCK.now_us + round(seconds * 1e6)
        while CLOCK.now_us < end_us:
            CLOCK.now_us = min(end_us, max(CLOCK.now_us, self.next_tick_us))
            self._tick()

    def _tick(self) -> None:
        if CLOCK.now_us >= self.next_tick_us:
            self.next_tick_us = CLOCK.now_us + _TICK_US
            for process in [process for process in self.processes if process.answers]:
                process.tick()
            if self.etcd is not None:
                self._start_again()

    def act(self, num: int) -> None:
        for _ in range(num):
            if self.is_over:
                return
            number = self._below(len(self.workers) + 1)
            worker = self.workers[number - 1] if number else None
            if worker is not None and worker.is_hung:
                continue
            if actions := list(self._actions_of_coordinators() if worker is None else self._actions_of(worker)):
                actions[self._below(len(actions))]()
                self._end_stopped()
            CLOCK.now_us += self._below(4000)
            if CLOCK.now_us >= self.next_tick_us:
                self._tick()

    def _below(self, number: int) -> int:
        """A random number below this one, in half of the time that `randrange` takes."""
        num_bits = number.bit_length()
        while (drawn := self.random.getrandbits(num_bits)) >= number:
            pass
        return drawn

    def _actions_of_coordinators(self) -> Iterator[Callable[[], None]]:
        for process in self.processes:
            if not process.is_frozen:
                yield from process.actions()

    # The end.

    def run_to_the_end(self) -> None:
        """Nothing more fails, and there are enough workers: the job must be done soon, or have failed with a reason."""
        self.restore_store()
        self.thaw()
        self._start_again()
        for worker in self.workers:
            worker.is_hung = False
        for _ in range(400):
            if self.is_over:
                break
            self.act(60)
            self._pass(0.3)
            if len(self.workers) < self.shape.num_workers:
                self.join()
        assert self.is_over, self._where()

    def _where(self) -> str:
        if self.service is None:
            return "there is no coordinator"
        coordinator = self.service._coordinator
        members = [(member.number, str(member.place), member.has_stopped) for member in coordinator.members.values()]
        workers = [(each.pid, each.member, str(each.place), each.epoch, each.trains, each.state) for each in self.workers]
        waits = [notice.reason for notice in self.notices if isinstance(notice, WaitingForWorkers)][-1:]
        return f"not over: {coordinator.phase} in epoch {coordinator.epoch}, members {members}, workers {workers}, {waits}"

    def check(self) -> None:
        """The summary and the record have every step once, and the last checkpoint is whole."""
        if self.etcd is not None:  # every epoch is in the journal once, and workers have obeyed the coordinator that wrote it
            for epoch, start in self.epochs.items():
                ((term, entry),) = [each for each in self.etcd.entries if each[1].epoch == epoch]
                assert (term, entry.places, entry.iteration) == (start.term, self.places_in(start), start.iteration)
        ends = [notice for notice in self.notices if isinstance(notice, JobDone | JobFailed)]
        (end,) = [end for end in ends if not (isinstance(end, JobFailed) and isinstance(end.problem, LeadershipLost))]
        if isinstance(end, JobFailed):
            assert isinstance(end.problem, PeersDiffer), end.problem
            return
        expected = [float(iteration) for iteration in range(NUM_STEPS)]
        # A loss is unknown if the whole last stage died before it was recorded.
        assert all(loss == step or math.isnan(loss) for loss, step in zip(end.trained.losses, expected, strict=True))
        steps = list[Stepped]()
        for event in read_record(self.folder / RECORD):
            if isinstance(event, Stepped):
                assert event.iteration <= len(steps) or self.has_lost_record, "a step is missing in the record"
                steps = [step for step in steps if step.iteration < event.iteration]
                steps.append(event)
        assert all(step.loss in (None, expected[step.iteration]) for step in steps)
        assert len(steps) == NUM_STEPS or self.has_lost_record
        assert end.trained.saved_steps == NUM_STEPS or self.has_lost_record  # a stage may have been sent to another coordinator
        for num_steps, path in find_checkpoints(self.folder / "checkpoints").items():
            for stage in range(len(read_checkpoint(path).files)):
                self._check_checkpoint(self.folder, num_steps, stage)
