"""A coordinator without a socket or a process: a desk that writes down what it is asked for, and members that a test moves."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from recycle.control.decide.coordinator import Coordinator, CoordinatorPhase
from recycle.control.decide.journal import Journal, MemoryJournal
from recycle.control.decide.members import Member, Recovery
from recycle.control.decide.messages import ControlMessage, EpochBegun, EpochStopped, ProgressReport, RenewLease, StartEpoch
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment, num_live_at, places_for
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from tests.plans import plan_from_orders

SHAPE = Shape(2, 2, 2)
LEASE_S = 2.0
W0_0, W0_1, W1_0, W1_1 = map(Worker.parse, ("W0_0", "W0_1", "W1_0", "W1_1"))


def dead(*names: str) -> frozenset[Worker]:
    return frozenset(map(Worker.parse, names))


@cache
def plan_for(cluster: Cluster) -> Plan:
    """A plan in which the first live peer does what the dead would do: all forwards, then all backwards."""
    shape = cluster.shape
    orders: dict[Worker, list[Op]] = {worker: [] for worker in cluster.live_workers()}
    for kind in (Kind.F, Kind.B):
        for home in range(shape.num_pipelines):
            for stage in range(shape.num_stages):
                live = cluster.live_pipelines(stage)
                worker = Worker(home if home in live else live[0], stage)
                orders[worker] += [Op(stage, kind, MicroBatch(home, index)) for index in range(shape.num_microbatches)]
    return plan_from_orders(Problem(cluster, Profile.uniform(shape.num_stages, 1, 1, 1)), orders)


def answer_for(shape: Shape, failed: frozenset[Worker], planned: frozenset[Worker] | None = None) -> PlanAssignment | str:
    """What a source says: the dead stay where they are, unless told otherwise or a stage has nobody left."""
    try:
        num_live = num_live_at(shape, failed)
    except UserError as problem:
        return str(problem)
    if planned is None:
        planned = failed
        for empty in [stage for stage, num in enumerate(num_live) if num == 0]:
            live = {
                stage: [w for w in shape.workers() if w.stage == stage and w not in planned] for stage in range(shape.num_stages)
            }
            giver = max(live, key=lambda stage: len(live[stage]))
            planned = planned - {Worker(0, empty)} | {live[giver][-1]}
    cluster = Cluster(shape, planned)
    return PlanAssignment(plan_for(cluster), places_for(cluster, failed), "made by hand")


def evened(shape: Shape, failed: frozenset[Worker]) -> frozenset[Worker]:
    """As many dead, but spread over the stages, the first workers of each: so that many move, and also who need not."""
    stages = [index % shape.num_stages for index in range(len(failed))]
    return frozenset(Worker(stages[:index].count(stage), stage) for index, stage in enumerate(stages))


class Desk:
    """A world that only writes down what it is asked for."""

    def __init__(self) -> None:
        self.at_us = 1_000_000
        self.log: list[tuple[Any, ...]] = []
        self.sent: defaultdict[int, list[ControlMessage]] = defaultdict(list)
        self.questions: list[frozenset[Worker]] = []
        self.waits: list[str] = []
        self.recoveries: list[Recovery] = []
        self.num_steps_saved = 0
        self.went_us = 0
        self.is_prepared = True

    def now_us(self) -> int:
        return self.at_us

    def is_ready(self) -> bool:
        return self.is_prepared

    def send(self, caller: int, message: ControlMessage) -> None:
        self.sent[caller].append(message)

    def send_all(self, callers: Iterable[int], message: ControlMessage) -> None:
        for caller in callers:
            self.send(caller, message)

    def hang_up(self, caller: int) -> None:
        self.log.append(("hang up", caller))

    def is_running(self, member: Member) -> bool:
        return False

    def fence(self, member: Member) -> None:
        self.log.append(("fence", member.host, member.pid))

    def ask(self, failed: frozenset[Worker]) -> None:
        self.log.append(("ask",))
        self.questions.append(failed)

    def checkpoint(self) -> int:
        return self.num_steps_saved

    def left(self, member: Member, reason: str) -> int:
        self.log.append(("left", str(member.seat), reason))
        return self.went_us

    def suspected(self, member: Member, reason: str) -> None:
        self.log.append(("suspected", str(member.seat), reason))

    def joining(self, member: Member, seat: Worker) -> None:
        self.log.append(("joining", str(seat)))

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def began(self, answer: PlanAssignment, go: StartEpoch, members: Iterable[Member]) -> None:
        self.log.append(("began", go.epoch))

    def recovered(self, recovery: Recovery) -> None:
        self.recoveries.append(replace(recovery, left=list(recovery.left), joined=list(recovery.joined)))

    def said(self, what: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == what]


class Office:
    """A coordinator at its desk, and members that say what a test makes them say."""

    def __init__(self, shape: Shape = SHAPE, initially: frozenset[Worker] = frozenset(), journal: Journal | None = None) -> None:
        self.shape, self.desk, self.journal = shape, Desk(), journal or MemoryJournal()
        cluster = Cluster(shape, initially)
        self.initial = PlanAssignment(plan_for(cluster), places_for(cluster, initially), "the first")
        self.num_callers = 0
        self.hire()

    def hire(self) -> None:
        """Have a coordinator, who knows what the journal says."""
        self.coordinator = Coordinator(self.shape, self.initial, 0, self.desk, self.journal, LEASE_S)

    @property
    def phase(self) -> CoordinatorPhase:
        return self.coordinator.phase

    def at(self, name: str) -> Member:
        return next(member for member in self.coordinator.members.values() if str(member.seat) == name)

    def come(self, wish: str = "") -> Member:
        wanted = Worker.parse(wish) if wish else None
        assert self.coordinator.why_not(wanted) is None
        self.num_callers += 1
        member = self.coordinator.join(self.num_callers, "here", 1000 + self.num_callers, wanted)
        self.coordinator.seat_newcomers()
        return member

    def come_back(self, member: Member, epoch: int | None = None) -> Member | None:
        """What a worker does that finds a new coordinator."""
        self.num_callers += 1
        found = self.coordinator.come_back(member.number, self.num_callers, member.host, member.pid)
        if found is not None:
            self.coordinator.welcome_back(found, self.coordinator.epoch if epoch is None else epoch)
        return found

    def form(self) -> "Office":
        for row in sorted(self.initial.places):
            self.come(str(row))
        self.begin()
        return self

    def begin(self) -> None:
        """All who sit begin the epoch."""
        for member in [member for member in self.coordinator.members.values() if member.seat is not None]:
            self.coordinator.hear(member, EpochBegun(self.coordinator.epoch, 20))

    def die(self, name: str) -> Member:
        member = self.at(name)
        member.caller = None
        self.coordinator.lose(member.number, "its connection closed")
        return member

    def stop(self, name: str, standing: ProgressReport | None, epoch: int = 0) -> None:
        self.coordinator.hear(self.at(name), EpochStopped(epoch or self.coordinator.epoch, standing, "it was asked to"))

    def stop_all(self, num_steps: int = 5) -> None:
        for member in list(self.coordinator.members.values()):
            if member.seat is not None and not member.has_stopped:
                self.stop(str(member.seat), ProgressReport(num_steps))

    def answer(self, planned: frozenset[Worker] | None = None) -> None:
        """The source answers what it was asked last."""
        failed = self.desk.questions[-1]
        self.coordinator.answered(failed, answer_for(self.shape, failed, planned))

    def last(self, name: str) -> ControlMessage:
        caller = self.at(name).caller
        assert caller is not None
        return self.desk.sent[caller][-1]

    def go(self) -> StartEpoch:
        """The epoch that all who sit were told of last."""
        told = {repr(self.last(str(m.seat))): self.last(str(m.seat)) for m in self.coordinator.members.values() if m.seat}
        (go,) = told.values()
        assert isinstance(go, StartEpoch)
        assert go.epoch == self.coordinator.epoch
        return go

    def wait(self, seconds: float, *speaking: str) -> None:
        """Time goes by; those who are named say that they live."""
        for _ in range(round(seconds / 0.5)):
            self.desk.at_us += 500_000
            for name in speaking:
                self.coordinator.hear(self.at(name), RenewLease())
            self.coordinator.tick()

    def recover(self, num_steps: int = 5) -> None:
        self.stop_all(num_steps)
        self.answer()
        self.begin()


def with_a_place_free(name: str = "W1_1") -> Office:
    """An office in its second epoch, in which somebody has died."""
    office = Office().form()
    office.die(name)
    office.recover()
    return office
