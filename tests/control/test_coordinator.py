"""The coordinator without a socket or a process: whatever happens to its members, it decides what it should, and never sticks."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from recycle.control.agreement import ABSENT
from recycle.control.coordinator import Coordinator, Phase
from recycle.control.journal import FileJournal, Journal, MemoryJournal
from recycle.control.members import Member, Recovery
from recycle.control.messages import Ballot, Begun, End, Go, Message, Pause, Renew, Share, Standing, Stop, Stopped
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plan import Plan
from recycle.core.plan_source import Answer, num_live_at, seats_for
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from tests.control.test_agreement import Crew, Walker
from tests.plans import plan_from_orders

pytestmark = pytest.mark.timeout(60)
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


def answer_for(shape: Shape, failed: frozenset[Worker], planned: frozenset[Worker] | None = None) -> Answer | str:
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
    return Answer(plan_for(cluster), seats_for(cluster, failed), "made by hand")


def evened(shape: Shape, failed: frozenset[Worker]) -> frozenset[Worker]:
    """As many dead, but spread over the stages, the first workers of each: so that many move, and also who need not."""
    stages = [index % shape.num_stages for index in range(len(failed))]
    return frozenset(Worker(stages[:index].count(stage), stage) for index, stage in enumerate(stages))


class Desk:
    """A world that only writes down what it is asked for."""

    def __init__(self) -> None:
        self.at_us = 1_000_000
        self.log: list[tuple[Any, ...]] = []
        self.sent: defaultdict[int, list[Message]] = defaultdict(list)
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

    def send(self, caller: int, message: Message) -> None:
        self.sent[caller].append(message)

    def send_all(self, callers: Iterable[int], message: Message) -> None:
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

    def began(self, answer: Answer, go: Go, members: Iterable[Member]) -> None:
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
        self.initial = Answer(plan_for(cluster), seats_for(cluster, initially), "the first")
        self.num_callers = 0
        self.hire()

    def hire(self) -> None:
        """Have a coordinator, who knows what the journal says."""
        self.coordinator = Coordinator(self.shape, self.initial, 0, self.desk, self.journal, LEASE_S)

    @property
    def phase(self) -> Phase:
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
        for row in sorted(self.initial.seats):
            self.come(str(row))
        self.begin()
        return self

    def begin(self) -> None:
        """All who sit begin the epoch."""
        for member in [member for member in self.coordinator.members.values() if member.seat is not None]:
            self.coordinator.hear(member, Begun(self.coordinator.epoch, 10, 20))

    def die(self, name: str) -> Member:
        member = self.at(name)
        member.caller = None
        self.coordinator.lose(member.number, "its connection closed")
        return member

    def stop(self, name: str, standing: Standing | None, num_ops: int = 0, epoch: int = 0) -> None:
        self.coordinator.hear(self.at(name), Stopped(epoch or self.coordinator.epoch, standing, num_ops, "it was asked to"))

    def stop_all(self, num_steps: int = 5) -> None:
        for member in list(self.coordinator.members.values()):
            if member.seat is not None and not member.has_stopped:
                self.stop(str(member.seat), Standing(num_steps))

    def answer(self, planned: frozenset[Worker] | None = None) -> None:
        """The source answers what it was asked last."""
        failed = self.desk.questions[-1]
        self.coordinator.answered(failed, answer_for(self.shape, failed, planned))

    def last(self, name: str) -> Message:
        caller = self.at(name).caller
        assert caller is not None
        return self.desk.sent[caller][-1]

    def go(self) -> Go:
        """The epoch that all who sit were told of last."""
        told = {repr(self.last(str(m.seat))): self.last(str(m.seat)) for m in self.coordinator.members.values() if m.seat}
        (go,) = told.values()
        assert isinstance(go, Go)
        assert go.epoch == self.coordinator.epoch
        return go

    def wait(self, seconds: float, *speaking: str) -> None:
        """Time goes by; those who are named say that they live."""
        for _ in range(round(seconds / 0.5)):
            self.desk.at_us += 500_000
            for name in speaking:
                self.coordinator.hear(self.at(name), Renew())
            self.coordinator.tick()

    def recover(self, num_steps: int = 5) -> None:
        self.stop_all(num_steps)
        self.answer()
        self.begin()


# How a job begins.


def test_a_job_begins_when_every_row_of_its_plan_has_a_worker() -> None:
    office = Office()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.come(name)
        assert office.phase is Phase.FORMING
    office.come("W1_1")
    assert office.phase is Phase.RUNNING
    assert office.go() == Go(1, office.initial.plan.dumps(), {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}, 0)


def test_a_job_does_not_begin_before_plans_can_be_made() -> None:
    office = Office()
    office.desk.is_prepared = False
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.phase is Phase.FORMING
    office.desk.is_prepared = True
    office.coordinator.seat_newcomers()
    assert office.phase is Phase.RUNNING


def test_who_wishes_for_nothing_gets_what_is_left_even_if_it_came_first() -> None:
    office = Office()
    anybody = office.come()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.come(name)
    assert office.go().seats == {"W0_0": 2, "W0_1": 3, "W1_0": 4, "W1_1": anybody.number}


def test_a_place_that_is_claimed_or_does_not_exist_is_refused_with_a_reason() -> None:
    office = Office()
    office.come("W0_0")
    assert office.coordinator.why_not(W0_0) == "W0_0 is taken: another worker has come for it"
    assert office.coordinator.why_not(Worker(2, 0)) == "W2_0 is no place in this job of 2 pipelines of 2 stages"
    for name in ("W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.coordinator.why_not(None) == "all 4 places are taken"


def test_who_dies_before_the_job_begins_is_waited_for_again() -> None:
    office = Office()
    office.come("W0_0")
    office.die("W0_0")
    for name in ("W0_1", "W1_0", "W1_1"):
        office.come(name)
    assert office.phase is Phase.FORMING
    office.come("W0_0")
    assert office.go().seats == {"W0_1": 2, "W1_0": 3, "W1_1": 4, "W0_0": 5}


def test_one_more_than_the_first_plan_needs_joins_right_after_the_beginning() -> None:
    office = Office(initially=dead("W1_1"))
    office.come("W1_1")
    for name in ("W0_0", "W0_1"):
        office.come(name)
    assert office.phase is Phase.RUNNING  # whoever wished for a place that the plan leaves empty sits where it is needed
    office.begin()
    office.come()
    assert office.phase is Phase.PAUSING
    office.recover()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0", "W1_1"]


# A death.


def test_after_a_death_all_are_stopped_and_go_on_where_they_agree() -> None:
    office = Office().form()
    office.die("W1_1")
    assert office.phase is Phase.STOPPING
    assert office.desk.said("left") == [("left", "W1_1", "its connection closed")]
    for name in ("W0_0", "W0_1", "W1_0"):
        assert office.last(name) == Stop(1)
    whole = Ballot(4, (1.0, 2.0), (0.5,) * 4)
    office.stop("W0_0", Standing(5, None, whole))
    office.stop("W1_0", Standing(4, Ballot(4, (1.0, ABSENT), (ABSENT,) * 4)))
    assert office.desk.questions == []
    office.stop("W0_1", Standing(5, Ballot(4, (ABSENT, 2.0), (0.5,) * 4)))
    assert office.phase is Phase.PLANNING
    assert office.desk.questions == [dead("W1_1")]
    office.answer()
    go = office.go()
    assert (go.epoch, go.iteration, go.ballot, go.sources, go.checkpoint) == (2, 5, whole, {}, -1)
    assert go.seats == {"W0_0": 1, "W0_1": 2, "W1_0": 3}
    assert go.plan == plan_for(Cluster(SHAPE, dead("W1_1"))).dumps()


def test_every_microsecond_of_a_recovery_is_handed_over_once_all_have_begun() -> None:
    office = Office().form()
    office.desk.at_us, office.desk.went_us = 2_000_000, 1_990_000
    office.die("W1_1")
    office.desk.at_us = 2_001_000
    for name in ("W0_0", "W0_1", "W1_0"):
        office.stop(name, Standing(5), num_ops=7)
    office.desk.at_us = 2_004_000
    office.answer()
    for at_us, name in ((2_009_000, "W0_0"), (2_009_500, "W0_1")):
        office.desk.at_us = at_us
        office.coordinator.hear(office.at(name), Begun(2, 10, 20))
    assert office.desk.recoveries == []
    office.coordinator.hear(office.at("W1_0"), Begun(2, 30, 5))
    (recovery,) = office.desk.recoveries
    assert (recovery.at_us, recovery.noticed_us, recovery.stopped_us) == (1_990_000, 2_000_000, 2_001_000)
    assert (recovery.planned_us, recovery.begun_us) == (2_004_000, 2_009_000)
    assert (recovery.regroup_us, recovery.transfer_us, recovery.redone_ops) == (30, 20, 21)
    assert (recovery.left, recovery.joined, recovery.joins, recovery.cause) == (["W1_1"], [], False, "its connection closed")
    assert (recovery.epoch, recovery.iteration, recovery.num_live) == (2, 5, 3)


def test_what_a_member_says_twice_counts_once() -> None:
    office = Office().form()
    office.die("W1_1")
    for _ in range(2):
        office.stop("W0_0", Standing(5), num_ops=7)
    office.stop("W0_1", Standing(5))
    assert office.phase is Phase.STOPPING
    office.recover()
    assert office.desk.recoveries[0].redone_ops == 7


def test_a_second_death_while_all_stop_makes_one_recovery_of_both() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop("W0_0", Standing(5))
    office.stop("W0_1", Standing(5))
    office.die("W1_0")
    assert office.desk.questions == [dead("W1_0", "W1_1")]
    office.answer()
    office.begin()
    assert office.go().seats == {"W0_0": 1, "W0_1": 2}
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1", "W1_0"]]


def test_two_deaths_at_once_are_one_recovery() -> None:
    office = Office().form()
    office.die("W1_1")
    office.die("W0_0")
    office.recover()
    assert office.go().epoch == 2
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1", "W0_0"]]


def test_a_plan_for_who_was_there_before_a_second_death_is_not_used() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.die("W0_0")
    assert office.desk.questions == [dead("W1_1"), dead("W0_0", "W1_1")]
    office.coordinator.answered(dead("W1_1"), answer_for(SHAPE, dead("W1_1")))
    assert office.phase is Phase.PLANNING
    office.answer()
    assert office.go().seats == {"W0_1": 2, "W1_0": 3}


def test_a_death_between_two_epochs_begins_the_next_and_both_are_one_recovery() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.die("W1_0")
    assert office.last("W0_0") == Stop(2)
    office.recover()
    assert office.go().epoch == 3
    assert [(recovery.epoch, recovery.left) for recovery in office.desk.recoveries] == [(3, ["W1_1", "W1_0"])]


def test_a_death_after_the_first_op_is_a_recovery_of_its_own() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.coordinator.hear(office.at("W0_0"), Begun(2, 10, 20))
    office.die("W1_0")
    office.recover()
    assert [recovery.left for recovery in office.desk.recoveries] == [["W1_1"], ["W1_0"]]


def test_who_loses_its_links_without_a_death_has_all_stopped() -> None:
    office = Office().form()
    office.stop("W0_0", Standing(5))
    assert office.phase is Phase.STOPPING
    assert office.last("W1_1") == Stop(1)
    office.recover()
    assert office.go().seats == {"W0_0": 1, "W0_1": 2, "W1_0": 3, "W1_1": 4}
    assert office.desk.recoveries[0].cause == "W0_0 lost its links: it was asked to"


def test_who_moved_and_was_stopped_before_it_had_its_new_state_is_given_it_again() -> None:
    office = Office().form()
    office.die("W0_1")
    office.stop_all()
    office.answer(planned=dead("W0_0"))  # whoever sits at W0_0 goes to W0_1
    assert office.go().sources == {"W0_1": "W1_1"}
    assert office.go().seats == {"W0_1": 1, "W1_0": 3, "W1_1": 4}
    office.stop("W0_1", None)
    office.recover()
    assert office.go().sources == {"W0_1": "W1_1"}


# Somebody joins.


def with_a_place_free(name: str = "W1_1") -> Office:
    office = Office().form()
    office.die(name)
    office.recover()
    return office


def test_a_newcomer_is_let_in_at_a_boundary_and_copies_from_a_peer() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    assert newcomer.seat is None
    assert office.phase is Phase.PAUSING
    assert office.desk.said("joining") == [("joining", "W1_1")]
    assert office.last("W0_0") == Pause(2)
    office.stop_all(9)
    assert office.desk.questions[-1] == frozenset()
    office.answer()
    go = office.go()
    assert (go.epoch, go.iteration, go.sources, go.seats["W1_1"]) == (3, 9, {"W1_1": "W0_1"}, newcomer.number)
    office.begin()
    recovery = office.desk.recoveries[-1]
    assert (recovery.joins, recovery.joined, recovery.left, recovery.epoch) == (True, ["W1_1"], [], 3)


def test_a_newcomer_without_a_wish_gets_a_place_of_the_stage_with_the_fewest() -> None:
    shape = Shape(3, 2, 3)
    office = Office(shape).form()
    for name in ("W0_0", "W1_1", "W2_1"):
        office.die(name)
    office.recover()
    office.come()
    office.recover()
    assert office.at("W1_1").number == 7


def test_two_newcomers_at_once_are_let_in_together_and_copy_from_different_peers() -> None:
    office = Office(Shape(4, 1, 4)).form()
    office.die("W2_0")
    office.die("W3_0")
    office.recover()
    office.come()
    office.come("W3_0")
    assert office.last("W0_0") == Pause(2)
    office.recover(9)
    assert office.go().epoch == 3
    assert office.go().sources == {"W2_0": "W0_0", "W3_0": "W1_0"}
    assert office.desk.recoveries[-1].joined == ["W2_0", "W3_0"]


def test_a_newcomer_gets_its_wish_in_a_job_that_has_moved_workers() -> None:
    office = Office().form()
    office.die("W0_1")
    office.stop_all()
    office.answer(planned=dead("W0_0"))
    office.begin()
    mover = office.at("W0_1")
    newcomer = office.come("W0_1")  # it was there before, but somebody moved there since
    office.recover(9)
    assert office.at("W0_1") is mover
    assert office.at("W0_0") is newcomer
    assert office.go().sources == {"W0_0": "W1_0"}


def test_the_only_holder_of_a_stage_does_not_move_away_when_a_newcomer_sits_beside_it() -> None:
    office = Office(Shape(2, 2, 2)).form()
    office.die("W0_1")
    office.die("W1_0")
    office.recover()
    office.come("W0_1")  # beside W1_1, the only one of its stage
    office.stop_all(9)
    failed = office.desk.questions[-1]
    holder = office.at("W1_1")
    cluster = Cluster(office.shape, dead("W1_1"))
    moving = Answer(plan_for(cluster), {W0_0: W0_0, W0_1: W0_1, W1_0: W1_1}, "the holder moves to the other stage")
    office.coordinator.answered(failed, moving)
    assert office.go().checkpoint == -1
    assert holder.seat == W0_1
    assert office.go().sources == {"W1_0": "W0_0"}


def test_a_death_while_all_pause_stops_them_and_lets_the_newcomer_in_all_the_same() -> None:
    office = with_a_place_free()
    office.come("W1_1")
    office.stop("W0_0", Standing(9))
    office.die("W1_0")
    assert office.last("W0_1") == Stop(2)
    office.stop("W0_1", Standing(9))
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_1"]
    recovery = office.desk.recoveries[-1]
    assert (recovery.joins, recovery.left, recovery.joined) == (False, ["W1_0"], ["W1_1"])


def test_a_newcomer_that_dies_before_the_boundary_changes_nothing() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    office.coordinator.lose(newcomer.number, "its connection closed")
    office.recover(9)
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]
    assert office.desk.recoveries[-1].joined == []


def test_a_newcomer_that_dies_before_its_epoch_begins_has_not_joined() -> None:
    office = with_a_place_free()
    office.come("W1_1")
    office.stop_all(9)
    office.die("W1_1")
    assert office.desk.questions[-1] == dead("W1_1")
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]
    assert office.desk.recoveries[-1].joined == []


def test_who_comes_while_a_plan_is_made_and_dies_at_once_has_not_left() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    visitor = office.come("W1_1")
    office.coordinator.lose(visitor.number, "its connection closed")
    assert office.desk.said("left") == [("left", "W1_1", "its connection closed")]
    office.answer()
    office.begin()
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0"]


def test_who_comes_while_a_plan_is_made_is_let_in_next_and_the_recovery_is_accounted_for() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.come("W1_1")
    office.answer()
    assert office.phase is Phase.RUNNING
    office.begin()
    assert office.phase is Phase.PAUSING
    office.recover(9)
    assert sorted(office.go().seats) == ["W0_0", "W0_1", "W1_0", "W1_1"]
    assert [(recovery.epoch, recovery.left, recovery.joined) for recovery in office.desk.recoveries] == [
        (2, ["W1_1"], []),
        (3, [], ["W1_1"]),
    ]


def test_who_comes_while_others_regroup_waits_until_they_have_begun() -> None:
    office = Office().form()
    office.die("W1_1")
    office.stop_all()
    office.answer()
    office.come("W1_1")
    assert office.phase is Phase.RUNNING
    office.begin()
    assert office.phase is Phase.PAUSING
    assert [recovery.epoch for recovery in office.desk.recoveries] == [2]


# Nobody is left at a stage.


def test_a_stage_that_nobody_holds_is_loaded_from_a_checkpoint_by_all() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    office.die("W0_1")
    office.die("W1_1")
    office.stop_all(9)
    office.answer()
    go = office.go()
    assert (go.iteration, go.checkpoint, go.sources, go.ballot) == (4, 4, {}, None)
    assert go.seats == {"W0_0": 1, "W0_1": 3}


def test_survivors_too_far_apart_go_back_to_a_checkpoint() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    office.die("W1_1")
    office.stop("W0_0", Standing(9))
    office.stop("W0_1", Standing(7))
    office.stop("W1_0", Standing(9))
    office.answer()
    assert (office.go().iteration, office.go().checkpoint) == (4, 4)


def test_too_few_workers_wait_say_for_what_and_go_on_when_one_comes() -> None:
    office = Office().form()
    office.desk.num_steps_saved = 4
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.answer()
    assert office.phase is Phase.WAITING
    assert office.desk.waits == [
        "no worker is left for stage 1: 1 live worker cannot hold 2 stages; start 1 more, and training goes on"
    ]
    office.come()
    assert office.phase is Phase.PLANNING
    office.answer()
    assert office.go().checkpoint == 4
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]


def test_it_says_anew_what_it_waits_for_when_another_one_dies() -> None:
    office = Office().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.answer()
    office.die("W0_0")
    office.answer()
    assert office.phase is Phase.WAITING
    assert office.desk.waits[-1].startswith(
        "no worker is left for stages 0, 1: 0 live workers cannot hold 2 stages; start 2 more"
    )
    office.come()
    office.answer()
    assert office.phase is Phase.WAITING
    office.come()
    office.answer()
    assert office.phase is Phase.RUNNING


def test_who_comes_while_no_plan_is_found_ends_the_waiting() -> None:
    office = Office().form()
    for name in ("W0_1", "W1_1", "W1_0"):
        office.die(name)
    office.stop_all(9)
    office.come()  # the source is still at it
    office.answer()
    assert office.phase is Phase.PLANNING
    office.answer()
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]


# The coordinator was killed, and another one takes its place.


@pytest.fixture
def restarted(tmp_path: Path) -> tuple[Office, dict[str, Member]]:
    """An office in its second epoch, W1_1 being dead, and a coordinator who knows it from the journal; its former members."""
    office = Office(journal=FileJournal(tmp_path / "journal.jsonl")).form()
    office.die("W1_1")
    office.recover()
    members = {str(member.seat): replace(member) for member in office.coordinator.members.values()}
    office.hire()
    office.desk.sent.clear()
    return office, members


def test_members_that_come_back_with_the_same_epoch_train_on(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    assert (office.phase, office.coordinator.epoch) == (Phase.RUNNING, 2)
    for member in members.values():
        assert office.come_back(member) is not None
    office.wait(5, *members)
    assert office.phase is Phase.RUNNING
    assert not any(office.desk.sent.values())
    assert office.desk.said("suspected") == []


def test_a_member_that_missed_the_beginning_of_an_epoch_has_all_stopped(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    office.come_back(members["W0_0"], epoch=1)
    assert office.phase is Phase.STOPPING
    assert office.last("W0_0") == Stop(2)
    for name in ("W0_1", "W1_0"):
        office.come_back(members[name])
        assert office.last(name) == Stop(2)
    office.recover()
    assert (office.go().epoch, sorted(office.go().seats)) == (3, ["W0_0", "W0_1", "W1_0"])


def test_a_member_that_does_not_come_back_within_its_lease_is_lost(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        office.come_back(member)
    office.wait(LEASE_S, *members)
    assert office.phase is Phase.RUNNING
    office.wait(0.5, *members)
    assert office.phase is Phase.STOPPING
    office.recover()
    assert office.desk.questions == [dead("W1_1"), dead("W1_0", "W1_1")]
    assert sorted(office.go().seats) == ["W0_0", "W0_1"]
    assert office.come_back(gone) is None


def test_a_member_that_never_came_back_is_fenced_where_it_was_last_seen(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    gone = members.pop("W1_0")
    for member in members.values():
        office.come_back(member)
    office.wait(LEASE_S + 0.5, *members)
    assert office.desk.said("fence") == [("fence", gone.host, gone.pid)]


def test_another_process_cannot_come_back_as_a_member(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    assert office.come_back(replace(members["W0_0"], pid=4)) is None
    assert office.come_back(members["W0_0"]) is not None
    assert office.come_back(members["W0_0"]) is None  # it is here already
    assert office.come_back(replace(members["W0_0"], number=77)) is None


def test_a_newcomer_gets_a_number_that_nobody_had(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    for member in members.values():
        office.come_back(member)
    newcomer = office.come("W1_1")
    assert newcomer.number == 5
    office.recover(9)
    assert office.go().seats["W1_1"] == 5


def test_members_that_had_stopped_say_so_again_and_go_on(restarted: tuple[Office, dict[str, Member]]) -> None:
    office, members = restarted
    for name, member in members.items():
        office.come_back(member)
        office.stop(name, Standing(6))
    office.answer()
    assert (office.go().epoch, office.go().iteration) == (3, 6)


# Who is silent, who is late, who is done.


def test_a_suspect_is_fenced_before_anybody_takes_its_work() -> None:
    office = Office().form()
    others = ("W0_0", "W0_1", "W1_0")
    office.wait(LEASE_S + 0.5, *others)
    office.stop_all()
    names = [entry[0] for entry in office.desk.log]
    assert names == ["began", "suspected", "fence", "hang up", "left", "ask"]
    assert office.desk.said("suspected") == [("suspected", "W1_1", "silent for 2.5 s, with a lease of 2 s")]


def test_who_computes_one_op_for_too_long_is_suspected_though_it_speaks() -> None:
    office = Office().form()
    office.coordinator.longest_op_s = 0.3
    for busy_us, phase in ((2_900_000, Phase.RUNNING), (3_100_000, Phase.STOPPING)):
        office.coordinator.hear(office.at("W1_1"), Renew(3, busy_us))
        office.coordinator.tick()
        assert office.phase is phase


def test_words_of_another_epoch_are_not_listened_to() -> None:
    office = Office().form()
    office.die("W1_1")
    office.recover()
    heard = {caller: len(said) for caller, said in office.desk.sent.items()}
    for epoch in (1, 3):
        office.stop("W0_0", Standing(99), epoch=epoch)
        office.coordinator.hear(office.at("W0_0"), Share(epoch, "key", "value"))
        office.coordinator.hear(office.at("W0_0"), Begun(epoch, 1, 1))
    assert office.phase is Phase.RUNNING
    assert {caller: len(said) for caller, said in office.desk.sent.items()} == heard
    office.die("W1_0")
    office.coordinator.hear(office.at("W0_0"), Stopped(1, Standing(99)))
    assert not office.at("W0_0").has_stopped


def test_what_is_shared_goes_to_all_who_sit() -> None:
    office = Office().form()
    office.coordinator.hear(office.at("W0_0"), Share(1, "key", "value"))
    for name in ("W0_0", "W0_1", "W1_0", "W1_1"):
        assert office.last(name) == Share(1, "key", "value")


def test_who_was_away_gets_what_was_shared_meanwhile_and_nothing_of_epochs_that_are_over() -> None:
    office = Office().form()
    office.hire()  # the one before is gone
    members = {name: office.at(name) for name in ("W0_0", "W0_1", "W1_0", "W1_1")}
    early, late = members["W0_0"], members["W1_1"]
    for member in (early, members["W0_1"], members["W1_0"]):
        office.come_back(member)
    office.coordinator.hear(early, Share(1, "key", "value"))
    office.come_back(late)
    assert office.last("W1_1") == Share(1, "key", "value")
    office.die("W1_0")
    office.recover()
    office.at("W0_0").caller = None
    office.come_back(office.at("W0_0"))
    assert office.desk.sent[office.num_callers] == []


def test_a_job_is_done_when_all_have_finished() -> None:
    office = Office().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
        assert office.phase is Phase.RUNNING
    office.coordinator.finished(office.at("W1_1"))
    assert office.phase is Phase.DONE
    assert office.last("W0_0") == End("the job is done")
    assert office.coordinator.why_not(None) == "the job is done"


def test_who_dies_while_others_have_finished_does_not_end_the_job_before_the_rest_have_its_work() -> None:
    office = Office().form()
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
    office.die("W1_1")
    assert office.phase is Phase.STOPPING
    office.recover(9)
    assert office.phase is Phase.RUNNING
    for name in ("W0_0", "W0_1", "W1_0"):
        assert not office.at(name).has_finished
        office.coordinator.finished(office.at(name))
    assert office.phase is Phase.DONE


def test_all_may_finish_while_somebody_waits_to_be_let_in() -> None:
    office = with_a_place_free()
    newcomer = office.come("W1_1")
    for name in ("W0_0", "W0_1", "W1_0"):
        office.coordinator.finished(office.at(name))
    assert office.phase is Phase.DONE
    assert newcomer.caller is not None
    assert office.desk.sent[newcomer.caller][-1] == End("the job is done")


def test_an_epoch_is_in_the_journal_before_anybody_is_told_of_it() -> None:
    office = Office().form()
    told: list[int] = []
    office.desk.send_all = lambda callers, message: told.append(office.journal.last().epoch)  # type: ignore[assignment,union-attr]
    office.die("W1_1")
    told.clear()
    office.stop_all()
    office.answer()
    assert told == [2]


# Anything, in any order.


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
    go: Go | None = None
    has_begun: bool = False
    wants_pause: bool = False
    must_stop: bool = False
    is_hung: bool = False
    stopped: Stopped | None = None
    inbox: deque[Message] = field(default_factory=deque)

    @property
    def seat(self) -> Worker:
        assert self.go is not None
        return next(Worker.parse(seat) for seat, number in self.go.seats.items() if number == self.number)

    def take_seat(self, go: Go, num_stages: int) -> None:
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
                self.coordinator.hear(self.coordinator.members[puppet.number], Renew())
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
            assert self.office.phase is Phase.FORMING
            assert len(self.puppets) < self.shape.num_workers
        elif len(self.puppets) < self.shape.num_stages:
            assert self.office.phase is Phase.WAITING
        else:
            assert self.office.phase is Phase.RUNNING
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
        crew.share_chains(puppet.epoch)
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
            case Go():
                puppet.take_seat(message, self.shape.num_stages)
            case Stop(epoch=epoch) if epoch > puppet.answered:
                self._answer(puppet, epoch)
            case Pause(epoch=epoch) if puppet.go is not None and puppet.go.epoch == epoch:
                puppet.wants_pause = True

    def _begin(self, puppet: Puppet) -> None:
        assert puppet.go is not None
        if puppet.walker is None:
            giver = self.puppets[puppet.go.seats[puppet.go.sources[str(puppet.seat)]]].walker
            assert giver is not None
            assert (giver.stage, giver.num_steps) == (puppet.seat.stage, puppet.go.iteration)
            puppet.walker = Walker(giver.stage, giver.num_stages, num_steps=giver.num_steps)
        puppet.has_begun = True
        self._say(puppet, Begun(puppet.epoch, 10, 20))

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
        puppet.stopped = Stopped(epoch, walker.standing(), stage=walker.stage) if walker is not None else Stopped(epoch, None)
        self._say(puppet, puppet.stopped)

    def _say(self, puppet: Puppet, message: Message) -> None:
        if puppet.caller is not None:
            self.coordinator.hear(self.coordinator.members[puppet.number], message)

    def _plan(self) -> None:
        failed = self.office.desk.questions.pop(0)
        self.coordinator.answered(failed, answer_for(self.shape, failed, evened(self.shape, failed) if self.is_moving else None))

    # What the coordinator brings about.

    def _deliver(self, caller: int, message: Message) -> None:
        for puppet in self.puppets.values():
            if puppet.caller == caller:
                puppet.inbox.append(message)

    def _hold_epoch(self, answer: Answer, go: Go, members: Iterable[Member]) -> None:
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
