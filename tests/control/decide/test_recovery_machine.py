"""RecoveryMachine: a coordinator and fake workers under any order of joins, deaths, hangs and restarts; it never gets stuck."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from recycle.control.decide.coordinator import Coordinator
from recycle.control.decide.members import Reporters
from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    PauseAtBoundary,
    ProgressReport,
    Ready,
    RenewLease,
    StartEpoch,
    StopEpoch,
)
from recycle.control.decide.new_epoch import NewEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import LeadershipLost
from recycle.core.plans.plan_source import PlanAssignment
from tests.control.decide.coordinator_harness import CoordinatorHarness, RecordingEffects, answer_for, evened
from tests.control.decide.test_agreement import EpochModel, StateModel

pytestmark = pytest.mark.timeout(60)


@dataclass
class FakeWorker:
    """A worker process as the coordinator sees it: it handles its messages, and reports its progress when it stops.

    `state` is None while it has no state of its stage; `start` is the epoch that it takes part in.
    """

    number: int
    connection: int | None
    pid: int
    epoch: int = -1
    answered: int = -1
    state: StateModel | None = None
    start: StartEpoch | None = None
    has_begun: bool = False
    wants_pause: bool = False
    must_stop: bool = False
    is_hung: bool = False
    stopped: EpochStopped | None = None
    origin: int = 1
    inbox: deque[ControlMessage] = field(default_factory=deque)

    @property
    def place(self) -> Worker:
        assert self.start is not None
        return Worker.parse(self.start.place)

    def is_in(self, epoch: int) -> bool:
        return self.start is not None and self.start.epoch == epoch

    def take_place(self, start: StartEpoch, num_stages: int) -> None:
        """Do what a worker does when an epoch starts; no worker ever runs a stage without its state."""
        self.epoch, self.start, self.stopped, self.origin = start.epoch, start, None, start.origin
        self.has_begun = self.wants_pause = self.must_stop = False
        stage = self.place.stage
        if start.checkpoint >= 0 or start.epoch == 1:
            self.state = StateModel(stage, num_stages, num_steps=start.iteration)
        elif str(self.place) in start.sources:
            self.state = None
        else:
            assert self.state is not None
            assert self.state.stage == stage
            self.state.go_to(start.iteration, start.ballot)


class RecoveryMachine(RuleBasedStateMachine):
    """Workers join, die, hang and train, plans take time, coordinators are killed: in the end training always continues."""

    shape = Shape(3, 2, 3)
    seeds = st.integers(0, 2**32)

    @initialize(is_staggered=st.booleans(), is_moving=st.booleans(), num_first=st.sampled_from([0, 5, 6, 6, 6]))
    def begin(self, is_staggered: bool, is_moving: bool, num_first: int) -> None:
        self.harness, self.workers, self.is_staggered = CoordinatorHarness(self.shape), {}, is_staggered
        self.has_restarted, self.num_pids, self.is_moving, self.origin = False, 0, is_moving, 1
        self.places: dict[int, Mapping[str, int]] = {}
        self.frozen, self.num_refused = None, 0
        effects = self.harness.effects
        effects.send = self._deliver  # type: ignore[method-assign]
        effects.epoch_started = self._check_epoch  # type: ignore[method-assign]
        for _ in range(num_first):
            self.join(None, 0)

    workers: dict[int, FakeWorker]
    frozen: Coordinator | None

    @property
    def coordinator(self) -> Coordinator:
        return self.harness.coordinator

    # The rules. Before each, workers action one after the other in a random order.

    def _act(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(seed % 120):
            if actions := self._actions():
                random.choice(actions)()

    @rule(preferred=st.none() | st.sampled_from(list(shape.workers())), seed=seeds)
    def join(self, preferred: Worker | None, seed: int) -> None:
        self._act(seed)
        if self.coordinator.refusal(preferred) is None:
            self.harness.num_connections += 1
            self.num_pids += 1
            member = self.coordinator.join(self.harness.num_connections, "here", self.num_pids, preferred)
            self.workers[member.number] = FakeWorker(member.number, member.connection, self.num_pids)
            self.coordinator.receive(member, Ready())

    @rule(pick=st.integers(0, 99), seed=seeds)
    def kill(self, pick: int, seed: int) -> None:
        self._act(seed)
        if not self.workers:
            return
        worker = self._pick(pick)
        del self.workers[worker.number]
        if worker.connection is not None:  # else the coordinator has to find out
            self.coordinator.members[worker.number].connection = None
            self.coordinator.remove(worker.number, "its connection closed")

    @rule(pick=st.integers(0, 99), seed=seeds)
    def hang(self, pick: int, seed: int) -> None:
        self._act(seed)
        if self.workers:
            self._pick(pick).is_hung = True

    @rule(pick=st.integers(0, 99), seed=seeds)
    def disconnect(self, pick: int, seed: int) -> None:
        """A connection breaks by itself: the member is taken for dead, unless the coordinator stood still before."""
        self._act(seed)
        connected = [worker for worker in self.workers.values() if worker.connection is not None and not worker.is_hung]
        if not connected:
            return
        worker = connected[pick % len(connected)]
        worker.connection = None
        self.coordinator.connection_lost(self.coordinator.members[worker.number])
        if worker.number not in self.coordinator.members:  # fenced
            del self.workers[worker.number]

    @rule(pick=st.integers(0, 99), seed=seeds)
    def corrupt(self, pick: int, seed: int) -> None:
        """The weights of a member are found to be wrong."""
        self._act(seed)
        placed = [member for member in self.coordinator.members.placed if member.number in self.workers]
        if not placed or self.harness.phase is not CoordinatorPhase.RUNNING:
            return
        member = placed[pick % len(placed)]
        assert member.place is not None
        self.coordinator.give_up_corrupt([member.place], "its weights differ")
        del self.workers[member.number]

    @rule(seconds=st.sampled_from([0.5, 1.0]), seed=seeds)
    def wait(self, seconds: float, seed: int) -> None:
        self._act(seed)
        for _ in range(round(seconds / 0.25)):
            self._tick(0.25)

    @rule(seconds=st.sampled_from([0.6, 1.9, 12.0]), seed=seeds)
    def stall(self, seconds: float, seed: int) -> None:
        """The coordinator stands still: nobody may be taken for dead because of that."""
        self._act(seed)
        num_members = len(self.coordinator.members)
        self._tick(seconds)
        assert len(self.coordinator.members) == num_members

    def _tick(self, seconds: float) -> None:
        self.harness.effects.at_us += round(seconds * 1e6)
        for worker in self.workers.values():
            if worker.connection is not None and not worker.is_hung:
                self.coordinator.receive(self.coordinator.members[worker.number], RenewLease())
        before = len(self.harness.effects.logged("fence"))
        self.coordinator.tick()
        fenced = {pid for _, _, pid in self.harness.effects.logged("fence")[before:]}
        for worker in [worker for worker in self.workers.values() if worker.pid in fenced]:
            del self.workers[worker.number]

    @rule(was_sent=st.booleans(), seed=seeds)
    @precondition(lambda self: self.coordinator.epoch > 0)
    def restart(self, was_sent: bool, seed: int) -> None:
        """The coordinator is killed, maybe before its last messages left; another one reads the journal; requests are lost."""
        self._act(seed)
        self.has_restarted, self.frozen = True, self.coordinator
        self.harness.start_coordinator()
        self.harness.effects.plan_requests.clear()
        self.harness.effects.num_searches = 0
        for worker in self.workers.values():
            worker.connection = None
            if not was_sent:
                worker.inbox.clear()

    @rule(pick=st.integers(0, 99), seed=seeds)
    def wake(self, pick: int, seed: int) -> None:
        """The coordinator that was replaced was only frozen, and wakes up: it loses a member, and finds that all others stopped.

        It may go as far as the next epoch, which the journal refuses: no worker hears of it.
        """
        self._act(seed)
        if (frozen := self.frozen) is None or not frozen.members:
            return
        before, self.frozen = self.harness.journal.last(), None
        effects = frozen._effects = RecordingEffects()
        effects.at_us = self.harness.effects.at_us
        members = list(frozen.members.values())
        try:
            frozen.tick()
            frozen.remove(members[pick % len(members)].number, "its connection closed")
            for member in list(frozen.members.placed):
                frozen.receive(member, EpochStopped(frozen.epoch, ProgressReport(5), "", member.place.stage, frozen.origin))  # type: ignore[union-attr]
            for failed in list(effects.plan_requests):
                frozen.plan_received(failed, answer_for(self.shape, failed))
            if effects.num_searches:
                frozen.checkpoint_found(3)
        except LeadershipLost:
            self.num_refused += 1
        assert self.harness.journal.last() == before
        assert not any(isinstance(message, StartEpoch) for sent in effects.sent.values() for message in sent)

    @rule()
    def settle(self) -> None:
        """Nothing more fails, and all workers obey: then training continues with all live workers."""
        num_quiet = 0  # in a row; a silent member is found within four
        for _ in range(60):
            before = self.harness.phase, self.coordinator.epoch, len(self.coordinator.members)
            for _ in range(300):
                if not (actions := self._actions(is_training=False)):
                    break
                actions[0]()
            self.wait(0.5, 0)
            is_quiet = before == (self.harness.phase, self.coordinator.epoch, len(self.coordinator.members))
            num_quiet = num_quiet + 1 if is_quiet else 0
            if num_quiet == 10:
                break
        # A worker that hung before it had a place is unknown to a new coordinator, and refused if it wakes up.
        self.workers = {
            number: worker for number, worker in self.workers.items() if not (worker.is_hung and worker.connection is None)
        }
        assert set(self.workers) == set(self.coordinator.members)
        if self.coordinator.epoch == 0:
            assert self.harness.phase is CoordinatorPhase.FORMING
            assert len(self.workers) < self.shape.num_workers
        elif len(self.workers) < self.shape.num_stages:
            assert self.harness.phase is CoordinatorPhase.WAITING
        else:
            assert self.harness.phase is CoordinatorPhase.RUNNING
            placed = {member.number for member in self.coordinator.members.placed}
            assert len(placed) == min(len(self.workers), self.shape.num_workers)  # nobody is a spare while a place is free
            members = [worker for number, worker in self.workers.items() if number in placed]
            assert all(worker.has_begun and worker.epoch == self.coordinator.epoch for worker in members)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.settle()

    # The actions of workers.

    def _pick(self, pick: int) -> FakeWorker:
        return list(self.workers.values())[pick % len(self.workers)]

    def _actions(self, is_training: bool = True) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        for worker in self.workers.values():
            if not worker.is_hung:
                actions += [partial(action, worker) for action in self._actions_of(worker)]
                if is_training and worker.state is not None and (epoch_model := self._epoch_model(worker)) is not None:
                    actions += epoch_model.actions_of(worker.state)
        if self.harness.effects.plan_requests:
            actions.append(self._plan)
        if self.harness.effects.num_searches:
            actions.append(self._find_checkpoint)
        return actions

    def _find_checkpoint(self) -> None:
        self.harness.effects.num_searches -= 1
        self.coordinator.checkpoint_found(self.harness.effects.num_steps_saved)

    def _actions_of(self, worker: FakeWorker) -> Iterator[Callable[[FakeWorker], None]]:
        if worker.connection is None:
            yield self._reconnect
        if worker.inbox:
            yield self._take
        if worker.start is None:
            return
        members = [self.workers.get(number) for number in self.places[worker.start.epoch].values()]
        is_broken = any(member is None or member.answered >= worker.start.epoch for member in members)
        if worker.must_stop or is_broken:
            yield self._stop
        elif not worker.has_begun and all(member is not None and member.is_in(worker.start.epoch) for member in members):
            yield self._begin
        elif worker.wants_pause and self._epoch_model(worker) is not None:
            yield self._pause

    def _epoch_members(self, worker: FakeWorker) -> list[FakeWorker] | None:
        """All workers of this one's epoch, if all of them have begun it."""
        if worker.start is None:
            return None
        members = [self.workers.get(number) for number in self.places[worker.start.epoch].values()]
        begun = [member for member in members if member is not None and member.is_in(worker.start.epoch) and member.has_begun]
        return begun if len(begun) == len(members) else None

    def _epoch_model(self, worker: FakeWorker) -> EpochModel | None:
        members = self._epoch_members(worker)
        if members is None or any(member.must_stop for member in members):
            return None
        states = [member.state for member in members if member.state is not None]
        epoch_model = EpochModel(states, self.is_staggered)
        self.harness.effects.num_steps_saved = max(
            self.harness.effects.num_steps_saved, min(state.num_settled for state in states) // 3 * 3
        )
        return epoch_model

    def _reconnect(self, worker: FakeWorker) -> None:
        self.harness.num_connections += 1
        member = self.coordinator.rejoin(worker.number, self.harness.num_connections, "here", worker.pid)
        if member is None:
            del self.workers[worker.number]
            if worker.epoch < 0:  # it had no place yet, and is a new worker for a new coordinator
                self.join(None, 0)
            return
        worker.connection = member.connection
        self.coordinator.resume_member(member, worker.epoch)
        if worker.has_begun and worker.start is not None:
            self.coordinator.receive(member, EpochBegun(worker.epoch, 20))
        if worker.stopped is not None:
            self.coordinator.receive(member, worker.stopped)

    def _take(self, worker: FakeWorker) -> None:
        match message := worker.inbox.popleft():
            case StartEpoch():
                worker.take_place(message, self.shape.num_stages)
            case StopEpoch(epoch=epoch) if epoch > worker.answered:
                self._answer(worker, epoch)
            case PauseAtBoundary(epoch=epoch) if worker.start is not None and worker.start.epoch == epoch:
                worker.wants_pause = True

    def _begin(self, worker: FakeWorker) -> None:
        assert worker.start is not None
        if worker.state is None:
            source = self.workers[self.places[worker.start.epoch][worker.start.sources[worker.start.place]]].state
            assert source is not None
            assert (source.stage, source.num_steps) == (worker.place.stage, worker.start.iteration)
            worker.state = StateModel(source.stage, source.num_stages, num_steps=source.num_steps)
        worker.has_begun = True
        self._send(worker, EpochBegun(worker.epoch, 20))

    def _pause(self, worker: FakeWorker) -> None:
        """All reach the same boundary between two iterations, and stop there one by one."""
        epoch_model, members = self._epoch_model(worker), self._epoch_members(worker)
        assert epoch_model is not None
        assert members is not None
        end = max(state.num_reduced for state in epoch_model.states)
        while behind := [state for state in epoch_model.states if state.num_settled < end]:
            next(actions for state in behind if (actions := epoch_model.actions_of(state)))[-1]()
        for member in members:
            member.must_stop = True

    def _stop(self, worker: FakeWorker) -> None:
        self._answer(worker, worker.epoch)

    def _answer(self, worker: FakeWorker, epoch: int) -> None:
        worker.answered, worker.start = epoch, None
        state = worker.state
        worker.stopped = (
            EpochStopped(epoch, state.progress(), "", state.stage, worker.origin)
            if state is not None
            else EpochStopped(epoch, None)
        )
        self._send(worker, worker.stopped)

    def _send(self, worker: FakeWorker, message: ControlMessage) -> None:
        if worker.connection is not None:
            self.coordinator.receive(self.coordinator.members[worker.number], message)

    def _plan(self) -> None:
        failed = self.harness.effects.plan_requests.pop(0)
        self.coordinator.plan_received(
            failed, answer_for(self.shape, failed, evened(self.shape, failed) if self.is_moving else None)
        )

    # The effects of the coordinator.

    def _deliver(self, connection: int, message: ControlMessage) -> None:
        for worker in self.workers.values():
            if worker.connection == connection:
                worker.inbox.append(message)

    def _check_epoch(self, assignment: PlanAssignment, start: NewEpoch) -> Reporters:
        """All workers of an epoch are members, every stage has a worker, and no more is redone than has to be."""
        self.places[start.epoch] = start.places
        assert start.term == self.harness.journal.term
        assert set(start.places.values()) <= set(self.coordinator.members)
        assert {Worker.parse(place).stage for place in start.places} == set(range(self.shape.num_stages))
        assert len(set(start.places.values())) == len(start.places)
        members = [worker for worker in self.workers.values() if worker.number in start.places.values()]
        is_known = len(members) == len(start.places)  # nobody died without the coordinator's knowledge
        origin = start.origin if start.checkpoint < 0 else self.origin
        states = [worker.state for worker in members if worker.state is not None and worker.origin == origin]
        self.origin = start.origin
        if start.epoch > 1 and is_known and not self.has_restarted and not self.coordinator._must_go_back:
            is_lost = len({state.stage for state in states}) < self.shape.num_stages
            assert (start.checkpoint >= 0) == is_lost
            if not is_lost:
                assert start.iteration >= max(state.num_settled for state in states)
        self.has_restarted = False
        return {}


TestRecoveryMachine = RecoveryMachine.TestCase
TestRecoveryMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
