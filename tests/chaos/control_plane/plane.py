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
from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import PeersDiffer
from recycle.core.events.record import Stepped
from recycle.core.events.record_file import RECORD, read_record
from recycle.core.plans.plan_source import PlanAssignment, places_for
from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint
from recycle.runtime.coordinator.config import CoordinatorConfig, JobDone, JobFailed, WaitingForWorkers
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.service import CoordinatorService
from recycle.runtime.options import CheckpointOptions, RunFolderOptions
from tests.chaos.control_plane.virtual import CLOCK, VirtualPlans
from tests.chaos.control_plane.workers import EVERY, NUM_STEPS, SimulatedWorker, Workers
from tests.control.decide.coordinator_harness import LEASE_S, plan_for

SHAPES = (Shape(2, 2, 2), Shape(3, 2, 2), Shape(2, 3, 2), Shape(1, 2, 2))
NUM_ACTIONS = (0, 1, 3, 8, 20, 60)
_TICK_US = 250_000  # rarer than a real server's, and often enough for every deadline


class ControlPlane(Workers):
    """A coordinator process, if it lives, the workers, and the connections between them."""

    def __init__(self, random: Random, folder: Path) -> None:
        super().__init__(random.choice(SHAPES), folder, random)
        self.is_moving = random.random() < 0.5
        self.closing: deque[int] = deque()  # connections of which the server has yet to read the end
        self.num_pids = 0
        self.plans: VirtualPlans
        self.service: CoordinatorService | None = None
        self.run_folder: RunFolder | None = None
        self.notices: list[Any] = []
        self.is_over = False
        self.next_tick_us = 0
        CLOCK.now_us = 1_000_000
        self.start_coordinator(is_takeover=False)
        for _ in range(random.choice([self.shape.num_workers - 1, *[self.shape.num_workers] * 4])):
            self.join()

    # Processes.

    def start_coordinator(self, is_takeover: bool) -> None:
        cluster = Cluster(self.shape, frozenset())
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
            profiles=initial.plan.problem.profile.stages,
            fingerprint={},
            begin_us=1_000_000,
            journal=self.folder / "journal.jsonl",
            folder=self.folder,
            run_folder=options[0],
            checkpoint=options[1],
        )
        self.run_folder = RunFolder(self.folder, *options, initial.plan, {}, NUM_STEPS, is_takeover)
        self.service = CoordinatorService(config, self, self, self.run_folder, self.run_folder.before, None)  # type: ignore[arg-type]
        self.service.epoch_started = partial(self._note_places, self.service.epoch_started)  # type: ignore[method-assign]

    def _note_places(
        self, started: Callable[[PlanAssignment, NewEpoch], Reporters], assignment: PlanAssignment, start: NewEpoch
    ) -> Reporters:
        """Note who is where in an epoch: a worker hears only of its own place."""
        self.places[start.epoch] = start.places
        return started(assignment, start)

    def kill_coordinator(self) -> None:
        """Kill it with all that waits in it; of what it has sent, the first messages may still arrive."""
        assert self.run_folder is not None
        self.run_folder.__exit__()
        self.service = self.run_folder = None
        self.closing.clear()
        for worker in list(self.connected.values()):
            while worker.inbox and self.random.random() < 0.5:
                worker.inbox.pop()
            worker.connection = None
            worker.outbox.clear()
        self.connected.clear()

    def send(self, notice: Any) -> None:
        """The launcher's end of the pipe."""
        self.notices.append(notice)
        self.is_over |= isinstance(notice, JobDone | JobFailed)

    def fence(self, member: Member) -> None:
        for worker in [worker for worker in self.workers if worker.pid == member.pid]:
            self.end_process(worker)

    def end_process(self, worker: SimulatedWorker) -> None:
        self._remove(worker)
        if worker.saves and self.random.random() < 0.5:
            self._write_file(worker, worker.saves[0][0], is_half=True)

    def close(self, number: int) -> None:
        """The server closes a connection; a worker that lives has read all that was sent before."""
        if (worker := self.connected.pop(number, None)) is not None:
            worker.connection = None
            worker.outbox.clear()

    # What may happen to them.

    def join(self) -> None:
        self.num_pids += 1
        preferred = self.random.choice([None, *self.shape.workers()]) if self.random.random() < 0.3 else None
        self.workers.append(SimulatedWorker(self.num_pids, preferred))

    def _pick(self, is_wanted: Callable[[SimulatedWorker], bool] = lambda worker: True) -> SimulatedWorker | None:
        found = [worker for worker in self.workers if is_wanted(worker)]
        return self.random.choice(found) if found else None

    def kill(self) -> None:
        if (worker := self._pick()) is not None:
            self.end_process(worker)
            if worker.connection is not None:
                self.closing.append(worker.connection)

    def leave(self) -> None:
        """A worker is asked to stop, and asks to leave."""
        if (worker := self._pick(lambda worker: not worker.is_leaving)) is not None:
            worker.is_leaving = True
            worker.send(Leaving())

    def _end(self, worker: SimulatedWorker) -> None:
        self._remove(worker)
        if worker.connection is not None:
            self.closing.append(worker.connection)

    def hang(self) -> None:
        if (worker := self._pick()) is not None:
            worker.is_hung = True

    def wake(self) -> None:
        if (worker := self._pick(lambda worker: worker.is_hung)) is not None:
            worker.is_hung = False

    def disconnect(self) -> None:
        """A connection breaks, and loses what is on its way."""
        if (worker := self._pick(lambda worker: worker.connection is not None)) is not None:
            assert worker.connection is not None
            self.closing.append(worker.connection)
            worker.connection = None
            worker.outbox.clear()
            worker.inbox.clear()

    def restart(self) -> None:
        if self.service is not None and self.random.random() < 0.5:
            self.kill_coordinator()
            self.act(self.random.choice(NUM_ACTIONS))
        self._start_again()

    def _start_again(self) -> None:
        if self.service is None and not self.is_over:
            self.start_coordinator(is_takeover=True)

    def corrupt(self) -> None:
        if (worker := self._pick(lambda worker: worker.trains)) is not None:
            worker.is_corrupt = True

    def wait(self) -> None:
        for _ in range(self.random.choice([2, 10])):
            self._pass(LEASE_S / 10)
            self.act(self.random.choice(NUM_ACTIONS))

    def stall(self) -> None:
        """The coordinator stands still; nobody may be taken for dead because of that."""
        if self.service is not None:
            CLOCK.now_us += round(1e6 * self.random.choice([0.6, 1.9, 12.0, 130.0]))
            num_members = len(self.service._coordinator.members)
            self._tick()
            assert len(self.service._coordinator.members) == num_members

    # Time and actions.

    def _pass(self, seconds: float) -> None:
        end_us = CLOCK.now_us + round(seconds * 1e6)
        while CLOCK.now_us < end_us:
            CLOCK.now_us = min(end_us, max(CLOCK.now_us, self.next_tick_us))
            self._tick()

    def _tick(self) -> None:
        if CLOCK.now_us >= self.next_tick_us:
            self.next_tick_us = CLOCK.now_us + _TICK_US
            if self.service is not None:
                for number, worker in list(self.connected.items()):
                    if not worker.is_hung and worker in self.workers and worker.connection == number:
                        self.service.receive(number, RenewLease())
                self.service.tick()

    def act(self, num: int) -> None:
        for _ in range(num):
            if self.is_over:
                return
            number = self._below(len(self.workers) + 1)
            worker = self.workers[number - 1] if number else None
            if worker is not None and worker.is_hung:
                continue
            if actions := list(self._actions_of_coordinator() if worker is None else self._actions_of(worker)):
                actions[self._below(len(actions))]()
            CLOCK.now_us += self._below(4000)
            if CLOCK.now_us >= self.next_tick_us:
                self._tick()

    def _below(self, number: int) -> int:
        """A random number below this one, in half of the time that `randrange` takes."""
        num_bits = number.bit_length()
        while (drawn := self.random.getrandbits(num_bits)) >= number:
            pass
        return drawn

    def _actions_of_coordinator(self) -> Iterator[Callable[[], None]]:
        if self.service is not None:
            for background in self.server.backgrounds:
                if background.jobs:
                    yield background.run_next
            if self.server.calls:
                yield lambda: self.server.calls.popleft()()
            if self.plans.requests:
                yield self.plans.make_next
            if self.closing:
                yield self._read_end
            for number, worker in self.connected.items():
                if worker.outbox:  # also of a process that is gone: its last bytes are on their way
                    yield partial(self._read, number, worker)

    def _read(self, number: int, worker: SimulatedWorker) -> None:
        assert self.service is not None
        self.service.receive(number, worker.outbox.popleft())

    def _read_end(self) -> None:
        assert self.service is not None
        number = self.closing[0]
        if (worker := self.connected.get(number)) is not None and worker.outbox and worker not in self.workers:
            self._read(number, worker)
            return
        self.closing.popleft()
        self.connected.pop(number, None)
        self.service.disconnected(number)

    # The end.

    def run_to_the_end(self) -> None:
        """Nothing more fails, and there are enough workers: the job must be done soon, or have failed with a reason."""
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
        (end,) = [notice for notice in self.notices if isinstance(notice, JobDone | JobFailed)]
        if isinstance(end, JobFailed):
            assert isinstance(end.problem, PeersDiffer), end.problem
            return
        expected = [float(iteration) for iteration in range(NUM_STEPS)]
        # A loss is unknown if the whole last stage died before it was recorded.
        assert all(loss == step or math.isnan(loss) for loss, step in zip(end.trained.losses, expected, strict=True))
        steps = list[Stepped]()
        for event in read_record(self.folder / RECORD):
            if isinstance(event, Stepped):
                assert event.iteration <= len(steps), "a step is missing in the record"
                del steps[event.iteration :]
                steps.append(event)
        assert all(step.loss in (None, loss) for step, loss in zip(steps, expected, strict=True))
        assert end.trained.saved_steps == NUM_STEPS
        for num_steps, path in find_checkpoints(self.folder / "checkpoints").items():
            for stage in range(len(read_checkpoint(path).files)):
                self._check_checkpoint(num_steps, stage)
