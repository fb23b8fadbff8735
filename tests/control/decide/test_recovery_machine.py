"""The coordinator when anything happens, in any order: whatever its members do, it decides what it should, and never sticks."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from recycle.control.decide.coordinator import Coordinator, CoordinatorPhase
from recycle.control.decide.members import Member
from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    PauseAtBoundary,
    RenewLease,
    StartEpoch,
    StopEpoch,
)
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan_source import PlanAssignment
from tests.control.decide.coordinator_harness import Office, answer_for, evened
from tests.control.decide.test_agreement import Crew, Walker

pytestmark = pytest.mark.timeout(60)


@dataclass
class Puppet:
    """A worker process as far as others see it: it obeys when its turn comes, and says where it stands when it stops.

    `walker` is its state, None while it has not got that of its stage; `go` is the epoch that it plays.
    """

    number: int
    caller: int | None
    pid: int
    epoch: int = -1
    answered: int = -1
    walker: Walker | None = None
    go: StartEpoch | None = None
    has_begun: bool = False
    wants_pause: bool = False
    must_stop: bool = False
    is_hung: bool = False
    stopped: EpochStopped | None = None
    inbox: deque[ControlMessage] = field(default_factory=deque)

    @property
    def seat(self) -> Worker:
        assert self.go is not None
        return next(Worker.parse(seat) for seat, number in self.go.seats.items() if number == self.number)

    def take_seat(self, go: StartEpoch, num_stages: int) -> None:
        """What a worker does when an epoch begins; nobody ever plays a stage that it has not the state of."""
        self.epoch, self.go, self.stopped = go.epoch, go, None
        self.has_begun = self.wants_pause = self.must_stop = False
        stage = self.seat.stage
        if go.checkpoint >= 0 or go.epoch == 1:
            self.walker = Walker(stage, num_stages, num_steps=go.iteration)
        elif str(self.seat) in go.sources:
            self.walker = None
        else:
            assert self.walker is not None
            assert self.walker.stage == stage
            self.walker.go_to(go.iteration, go.ballot)


class Theatre(RuleBasedStateMachine):
    """Workers come, die, hang and train, plans take their time, coordinators are killed: in the end training always goes on."""

    shape = Shape(3, 2, 3)
    seeds = st.integers(0, 2**32)

    @initialize(is_staggered=st.booleans(), is_moving=st.booleans(), num_first=st.sampled_from([0, 5, 6, 6, 6]))
    def begin(self, is_staggered: bool, is_moving: bool, num_first: int) -> None:
        self.office, self.puppets, self.is_staggered = Office(self.shape), {}, is_staggered
        self.has_restarted, self.num_pids, self.is_moving = False, 0, is_moving
        desk = self.office.desk
        desk.send = self._deliver  # type: ignore[method-assign]
        desk.began = self._hold_epoch  # type: ignore[method-assign]
        for _ in range(num_first):
            self.join(None, 0)

    puppets: dict[int, Puppet]

    @property
    def coordinator(self) -> Coordinator:
        return self.office.coordinator

    # What may happen, each after everybody has done something, one after the other in any order.

    def _act(self, seed: int) -> None:
        dice = Random(seed)
        for _ in range(seed % 120):
            if acts := self._acts():
                dice.choice(acts)()

    @rule(wish=st.none() | st.sampled_from(list(shape.workers())), seed=seeds)
    def join(self, wish: Worker | None, seed: int) -> None:
        self._act(seed)
        if self.coordinator.why_not(wish) is None:
            self.office.num_callers += 1
            self.num_pids += 1
            member = self.coordinator.join(self.office.num_callers, "here", self.num_pids, wish)
            self.puppets[member.number] = Puppet(member.number, member.caller, self.num_pids)
            self.coordinator.seat_newcomers()

    @rule(pick=st.integers(0, 99), seed=seeds)
    def kill(self, pick: int, seed: int) -> None:
        self._act(seed)
        if not self.puppets:
            return
        puppet = self._pick(pick)
        del self.puppets[puppet.number]
        if puppet.caller is not None:  # else the coordinator has to find out
            self.coordinator.members[puppet.number].caller = None
            self.coordinator.lose(puppet.number, "its connection closed")

    @rule(pick=st.integers(0, 99), seed=seeds)
    def hang(self, pick: int, seed: int) -> None:
        self._act(seed)
        if self.puppets:
            self._pick(pick).is_hung = True

    @rule(seconds=st.sampled_from([0.5, 1.0]), seed=seeds)
    def wait(self, seconds: float, seed: int) -> None:
        self._act(seed)
        self.office.desk.at_us += round(seconds * 1e6)
        for puppet in self.puppets.values():
            if puppet.caller is not None and not puppet.is_hung:
                self.coordinator.hear(self.coordinator.members[puppet.number], RenewLease())
        before = len(self.office.desk.said("fence"))
        self.coordinator.tick()
        fenced = {pid for _, _, pid in self.office.desk.said("fence")[before:]}
        for puppet in [puppet for puppet in self.puppets.values() if puppet.pid in fenced]:
            del self.puppets[puppet.number]

    @rule(was_sent=st.booleans(), seed=seeds)
    @precondition(lambda self: self.coordinator.epoch > 0)
    def restart(self, was_sent: bool, seed: int) -> None:
        """The coordinator is killed, maybe with what it said last, and another one reads its journal; nobody plans."""
        self._act(seed)
        self.has_restarted = True
        self.office.hire()
        self.office.desk.questions.clear()
        for puppet in self.puppets.values():
            puppet.caller = None
            if not was_sent:
                puppet.inbox.clear()

    @rule()
    def settle(self) -> None:
        """Nothing more goes wrong, and everybody does what is asked: then training goes on with all who are left."""
        for _ in range(60):
            for _ in range(300):
                if not (acts := self._acts(is_training=False)):
                    break
                acts[0]()
            self.wait(0.5, 0)
        # Who hung before it had a seat is unknown to a new coordinator, and refused if it wakes up.
        self.puppets = {
            number: puppet for number, puppet in self.puppets.items() if not (puppet.is_hung and puppet.caller is None)
        }
        assert set(self.puppets) == set(self.coordinator.members)
        if self.coordinator.epoch == 0:
            assert self.office.phase is CoordinatorPhase.FORMING
            assert len(self.puppets) < self.shape.num_workers
        elif len(self.puppets) < self.shape.num_stages:
            assert self.office.phase is CoordinatorPhase.WAITING
        else:
            assert self.office.phase is CoordinatorPhase.RUNNING
            assert all(puppet.has_begun and puppet.epoch == self.coordinator.epoch for puppet in self.puppets.values())

    def teardown(self) -> None:
        if hasattr(self, "office"):
            self.settle()

    # What a worker can do next.

    def _pick(self, pick: int) -> Puppet:
        return list(self.puppets.values())[pick % len(self.puppets)]

    def _acts(self, is_training: bool = True) -> list[Callable[[], None]]:
        acts: list[Callable[[], None]] = []
        for puppet in self.puppets.values():
            if not puppet.is_hung:
                acts += [partial(act, puppet) for act in self._acts_of(puppet)]
                if is_training and puppet.walker is not None and (crew := self._crew(puppet)) is not None:
                    acts += crew.moves_of(puppet.walker)
        if self.office.desk.questions:
            acts.append(self._plan)
        return acts

    def _acts_of(self, puppet: Puppet) -> Iterator[Callable[[Puppet], None]]:
        if puppet.caller is None:
            yield self._come_back
        if puppet.inbox:
            yield self._take
        if puppet.go is None:
            return
        fellows = [self.puppets.get(number) for number in puppet.go.seats.values()]
        is_broken = any(fellow is None or fellow.answered >= puppet.go.epoch for fellow in fellows)
        if puppet.must_stop or is_broken:
            yield self._stop
        elif not puppet.has_begun and all(fellow is not None and fellow.go == puppet.go for fellow in fellows):
            yield self._begin
        elif puppet.wants_pause and self._crew(puppet) is not None:
            yield self._pause

    def _fellows(self, puppet: Puppet) -> list[Puppet] | None:
        """All who play the epoch of this one, if all of them do."""
        if puppet.go is None:
            return None
        fellows = [self.puppets.get(number) for number in puppet.go.seats.values()]
        playing = [fellow for fellow in fellows if fellow is not None and fellow.go == puppet.go and fellow.has_begun]
        return playing if len(playing) == len(fellows) else None

    def _crew(self, puppet: Puppet) -> Crew | None:
        fellows = self._fellows(puppet)
        if fellows is None or any(fellow.must_stop for fellow in fellows):
            return None
        walkers = [fellow.walker for fellow in fellows if fellow.walker is not None]
        crew = Crew(walkers, self.is_staggered)
        self.office.desk.num_steps_saved = max(
            self.office.desk.num_steps_saved, min(walker.num_heard for walker in walkers) // 3 * 3
        )
        return crew

    def _come_back(self, puppet: Puppet) -> None:
        self.office.num_callers += 1
        member = self.coordinator.come_back(puppet.number, self.office.num_callers, "here", puppet.pid)
        if member is None:
            del self.puppets[puppet.number]
            return
        puppet.caller = member.caller
        self.coordinator.welcome_back(member, puppet.epoch)
        if puppet.stopped is not None:
            self.coordinator.hear(member, puppet.stopped)

    def _take(self, puppet: Puppet) -> None:
        match message := puppet.inbox.popleft():
            case StartEpoch():
                puppet.take_seat(message, self.shape.num_stages)
            case StopEpoch(epoch=epoch) if epoch > puppet.answered:
                self._answer(puppet, epoch)
            case PauseAtBoundary(epoch=epoch) if puppet.go is not None and puppet.go.epoch == epoch:
                puppet.wants_pause = True

    def _begin(self, puppet: Puppet) -> None:
        assert puppet.go is not None
        if puppet.walker is None:
            giver = self.puppets[puppet.go.seats[puppet.go.sources[str(puppet.seat)]]].walker
            assert giver is not None
            assert (giver.stage, giver.num_steps) == (puppet.seat.stage, puppet.go.iteration)
            puppet.walker = Walker(giver.stage, giver.num_stages, num_steps=giver.num_steps)
        puppet.has_begun = True
        self._say(puppet, EpochBegun(puppet.epoch, 20))

    def _pause(self, puppet: Puppet) -> None:
        """All come to the same boundary between two iterations, and stop there one by one."""
        crew, fellows = self._crew(puppet), self._fellows(puppet)
        assert crew is not None
        assert fellows is not None
        end = max(walker.num_reduced for walker in crew.walkers)
        while behind := [walker for walker in crew.walkers if walker.num_heard < end]:
            next(moves for walker in behind if (moves := crew.moves_of(walker)))[-1]()
        for fellow in fellows:
            fellow.must_stop = True

    def _stop(self, puppet: Puppet) -> None:
        self._answer(puppet, puppet.epoch)

    def _answer(self, puppet: Puppet, epoch: int) -> None:
        puppet.answered, puppet.go = epoch, None
        walker = puppet.walker
        puppet.stopped = (
            EpochStopped(epoch, walker.standing(), stage=walker.stage) if walker is not None else EpochStopped(epoch, None)
        )
        self._say(puppet, puppet.stopped)

    def _say(self, puppet: Puppet, message: ControlMessage) -> None:
        if puppet.caller is not None:
            self.coordinator.hear(self.coordinator.members[puppet.number], message)

    def _plan(self) -> None:
        failed = self.office.desk.questions.pop(0)
        self.coordinator.answered(failed, answer_for(self.shape, failed, evened(self.shape, failed) if self.is_moving else None))

    # What the coordinator brings about.

    def _deliver(self, caller: int, message: ControlMessage) -> None:
        for puppet in self.puppets.values():
            if puppet.caller == caller:
                puppet.inbox.append(message)

    def _hold_epoch(self, answer: PlanAssignment, go: StartEpoch, members: Iterable[Member]) -> None:
        """Whoever is in an epoch is a member, every stage has somebody, and no more is done again than has to be."""
        assert set(go.seats.values()) <= set(self.coordinator.members)
        assert {Worker.parse(seat).stage for seat in go.seats} == set(range(self.shape.num_stages))
        assert len(set(go.seats.values())) == len(go.seats)
        walkers = [puppet.walker for puppet in self.puppets.values() if puppet.walker is not None]
        if go.epoch > 1 and not self.has_restarted:
            is_lost = len({walker.stage for walker in walkers}) < self.shape.num_stages
            assert (go.checkpoint >= 0) == is_lost
            if not is_lost:
                assert go.iteration >= max(walker.num_heard for walker in walkers)
        self.has_restarted = False


TestTheatre = Theatre.TestCase
TestTheatre.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
