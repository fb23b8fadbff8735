"""CoordinatorHarness: a coordinator without sockets and processes, with recorded effects and members that a test controls."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from recycle.control.decide.coordinator import Coordinator
from recycle.control.decide.journal import Journal, JournalEntry
from recycle.control.decide.members import Member, Recovery, Reporters
from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    Leaving,
    ProgressReport,
    Ready,
    RenewLease,
)
from recycle.control.decide.new_epoch import NewEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import LeadershipLost, UserError
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.packed_plan import unpack_plan
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment, num_live_at, places_for
from recycle.core.plans.row_programs import row_programs
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from tests.plans import plan_from_orders

SHAPE = Shape(2, 2, 2)
LEASE_S = 2.0
W0_0, W0_1, W1_0, W1_1 = map(Worker.parse, ("W0_0", "W0_1", "W1_0", "W1_1"))


@cache
def plan_for(cluster: Cluster) -> Plan:
    """A plan in which the first live peer runs the ops of the dead workers: all forwards, then all backwards."""
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
    """The answer of a source: the plan's dead are `planned`, else the dead workers, unless a stage has no live worker."""
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
            donor = max(live, key=lambda stage: len(live[stage]))
            planned = planned - {Worker(0, empty)} | {live[donor][-1]}
    cluster = Cluster(shape, planned)
    return PlanAssignment(plan_for(cluster), places_for(cluster, failed), "made by hand")


def evened(shape: Shape, failed: frozenset[Worker]) -> frozenset[Worker]:
    """As many dead, but spread over the stages, the first workers of each: so that more workers move than need to."""
    stages = [index % shape.num_stages for index in range(len(failed))]
    return frozenset(Worker(stages[:index].count(stage), stage) for index, stage in enumerate(stages))


class MemoryJournal:
    """A journal that is lost with its process. Every coordinator has a view of its own, and leads in a higher term."""

    def __init__(self, before: "MemoryJournal | None" = None) -> None:
        self._entries: list[JournalEntry] = before._entries if before is not None else []
        self._last_term: list[int] = before._last_term if before is not None else [-1]
        self._last_term[0] += 1
        self.term, self.lease_s = self._last_term[0], 0.0

    def append(self, entry: JournalEntry) -> None:
        if self.term != self._last_term[0]:
            raise LeadershipLost("another coordinator leads")
        self._entries.append(entry)

    def last(self) -> JournalEntry | None:
        return self._entries[-1] if self._entries else None


class RecordingEffects:
    """Effects that are only recorded."""

    def __init__(self) -> None:
        self.at_us = 1_000_000
        self.log: list[tuple[Any, ...]] = []
        self.sent: defaultdict[int, list[ControlMessage]] = defaultdict(list)
        self.plan_requests: list[frozenset[Worker]] = []
        self.waits: list[str] = []
        self.recoveries: list[Recovery] = []
        self.num_steps_saved = self.num_searches = 0
        self.died_us = 0
        self.origin = 1
        self.is_prepared = True
        self.running: set[int] = set()

    def now_us(self) -> int:
        return self.at_us

    def is_ready(self) -> bool:
        return self.is_prepared

    def send(self, connection: int, message: ControlMessage) -> None:
        self.sent[connection].append(message)

    def send_all(self, connections: Iterable[int], message: ControlMessage) -> None:
        for connection in connections:
            self.send(connection, message)

    def disconnect(self, connection: int, reason: str = "") -> None:
        self.log.append(("disconnect", connection))

    def is_process_running(self, member: Member) -> bool:
        return member.pid in self.running

    def fence(self, member: Member) -> None:
        self.log.append(("fence", member.host, member.pid))

    def request_plan(self, failed: frozenset[Worker]) -> None:
        self.log.append(("request plan",))
        self.plan_requests.append(failed)

    def expect_request(self, failed: frozenset[Worker]) -> None:
        self.expected = failed

    def find_checkpoint(self) -> None:
        self.num_searches += 1

    def no_checkpoint(self, begins_again: bool) -> None:
        self.log.append(("no checkpoint", begins_again))

    def member_left(self, member: Member, reason: str) -> int:
        self.log.append(("left", str(member.place), reason))
        return self.died_us

    def member_suspected(self, member: Member, reason: str) -> None:
        self.log.append(("suspected", str(member.place), reason))

    def member_joining(self, member: Member, place: Worker) -> None:
        self.log.append(("joining", str(place)))

    def planning_failed(self, reason: str) -> None:
        self.log.append(("planning failed", reason))

    def stalled(self, stalled_s: float) -> None:
        self.log.append(("stalled", round(stalled_s, 1)))

    def cannot_save(self) -> None:
        self.log.append(("cannot save",))

    def waiting(self, reason: str) -> None:
        self.waits.append(reason)

    def epoch_started(self, assignment: PlanAssignment, start: NewEpoch) -> Reporters:
        self.log.append(("epoch started", start.epoch))
        self.start = start
        self.origin = start.origin
        return {}

    def recovery_finished(self, recovery: Recovery) -> None:
        self.recoveries.append(replace(recovery, left=list(recovery.left), joined=list(recovery.joined)))

    def logged(self, name: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] == name]


class CoordinatorHarness:
    """A coordinator with recorded effects, and members that send what a test wants."""

    def __init__(self, shape: Shape = SHAPE, initially: frozenset[Worker] = frozenset(), journal: Journal | None = None) -> None:
        self.shape, self.effects, self.journal = shape, RecordingEffects(), journal or MemoryJournal()
        cluster = Cluster(shape, initially)
        self.initial = PlanAssignment(plan_for(cluster), places_for(cluster, initially), "the first")
        self.num_connections = 0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start a coordinator, which reads the journal; the one before, if there was one, leads no longer."""
        if isinstance(self.journal, MemoryJournal) and hasattr(self, "coordinator"):
            self.journal = MemoryJournal(self.journal)
        self.coordinator = Coordinator(self.shape, self.initial, 0, self.effects, self.journal, LEASE_S)

    @property
    def phase(self) -> CoordinatorPhase:
        return self.coordinator.phase

    def at(self, name: str) -> Member:
        return next(member for member in self.coordinator.members.values() if str(member.place) == name)

    def join(self, preferred: str = "") -> Member:
        wanted = Worker.parse(preferred) if preferred else None
        assert self.coordinator.refusal(wanted) is None
        self.num_connections += 1
        member = self.coordinator.join(self.num_connections, "here", 1000 + self.num_connections, wanted)
        self.coordinator.receive(member, Ready())
        return member

    def rejoin(self, member: Member, epoch: int | None = None) -> Member | None:
        """Reconnect a member, as a worker does that finds a new coordinator."""
        self.num_connections += 1
        found = self.coordinator.rejoin(member.number, self.num_connections, member.host, member.pid)
        if found is not None:
            self.coordinator.resume_member(found, self.coordinator.epoch if epoch is None else epoch)
        return found

    def form(self) -> "CoordinatorHarness":
        for row in sorted(self.initial.places):
            self.join(str(row))
        self.begin()
        return self

    def begin(self) -> None:
        """All members with a place begin the epoch."""
        for member in [member for member in self.coordinator.members.values() if member.place is not None]:
            self.coordinator.receive(member, EpochBegun(self.coordinator.epoch, 20))

    def die(self, name: str) -> Member:
        member = self.at(name)
        member.connection = None
        self.coordinator.remove(member.number, "its connection closed")
        return member

    def leave(self, name: str) -> Member:
        """The member at a place asks to leave."""
        member = self.at(name)
        self.coordinator.receive(member, Leaving())
        return member

    def finish_all(self) -> None:
        for member in self.coordinator.members.placed:
            self.coordinator.member_finished(member)

    def stop(self, name: str, progress: ProgressReport | None, epoch: int = 0) -> None:
        stopped = EpochStopped(epoch or self.coordinator.epoch, progress, "it was asked to", origin=self.effects.origin)
        self.coordinator.receive(self.at(name), stopped)

    def stop_all(self, num_steps: int = 5) -> None:
        for member in list(self.coordinator.members.values()):
            if member.place is not None and not member.has_stopped:
                self.stop(str(member.place), ProgressReport(num_steps))

    def answer(self, planned: frozenset[Worker] | None = None) -> None:
        """The source answers the last plan request."""
        failed = self.effects.plan_requests[-1]
        self.coordinator.plan_received(failed, answer_for(self.shape, failed, planned))
        if self.effects.num_searches:
            self.effects.num_searches -= 1
            self.coordinator.checkpoint_found(self.effects.num_steps_saved)

    def last(self, name: str) -> ControlMessage:
        connection = self.at(name).connection
        assert connection is not None
        return self.effects.sent[connection][-1]

    def started(self) -> NewEpoch:
        """The epoch that has started: the last message of each member with a place must be its part of it."""
        epoch, places = self.effects.start, {m.place for m in self.coordinator.members.values() if m.place}
        assert epoch.epoch == self.coordinator.epoch
        assert set(epoch.places) == set(map(str, places))
        programs = {place: program.dumps() for place, program in row_programs(unpack_plan(epoch.plan)).items()}
        for place, message in epoch.messages(self.shape, programs):
            assert self.last(str(place)) == message
        return epoch

    def wait(self, seconds: float, *renewing: str) -> None:
        """Let time pass; the members at these places renew their leases."""
        for _ in range(round(seconds / 0.25)):
            self.effects.at_us += 250_000
            for name in renewing:
                self.coordinator.receive(self.at(name), RenewLease())
            self.coordinator.tick()

    def recover(self, num_steps: int = 5) -> None:
        self.stop_all(num_steps)
        self.answer()
        self.begin()


def with_a_place_free(name: str = "W1_1") -> CoordinatorHarness:
    """A harness in its second epoch, after one death."""
    harness = CoordinatorHarness().form()
    harness.die(name)
    harness.recover()
    return harness
