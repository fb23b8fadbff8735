"""What the coordinator does about speeds: it names workers, compares plans, and plans failures for the speeds it knows."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import recycle
from recycle.control.drift.message_times import LinkLag
from recycle.control.drift.plan_change import PlanPeriods
from recycle.core.cluster import Worker
from recycle.core.events.op_columns import OpColumns
from recycle.core.events.record import LinkChanged, Recovered, SpeedChanged
from recycle.core.plans.plan_source import PlanAssignment
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.speed_planning import PATIENCE_US, SpeedPlanning
from recycle.runtime.worker.worker_reports import IterationApplied

PROBLEM = recycle.problem(3, 2, 4, costs="10,13,9")
PLAN = recycle.solve(PROBLEM, "greedy", effort=2000)
AS_IT_IS = PlanAssignment(PLAN, {row.worker: row.worker for row in PLAN.rows}, "the same")
PLACES = {str(row.worker): number for number, row in enumerate(PLAN.rows)}
SLOW = Worker(1, 1)
SECOND = 1_000_000


@dataclass
class FakePlans:
    """Plans that are never made; what is asked for is kept, and comparisons are answered by the test."""

    knows_speeds: bool = True
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    comparisons: list[tuple[Any, ...]] = field(default_factory=list)

    def request(self, failed: Any, speeds: Any) -> None:
        self.asked.append(("request", failed, speeds))

    def expect(self, failed: Any, speeds: Any) -> None:
        self.asked.append(("expect", failed, speeds))

    def prefetch(self, failed: Any, speeds: Any) -> None:
        self.asked.append(("prefetch", failed, speeds))

    def compare(self, present: Any, speeds: Any, without: Any, deliver: Any) -> None:
        self.comparisons.append((present, speeds, without, deliver))


@dataclass
class FakeLedger:
    events: list[Any] = field(default_factory=list)
    num_steps: int = 0
    recent_us: int = SECOND
    time_us: int = 5

    def now_us(self) -> int:
        return self.time_us

    def write(self, event: Any) -> None:
        self.events.append(event)

    def warn(self, text: str) -> None:
        self.events.append(text)


class Job:
    """Speed planning of a job of 3 x 2 workers, with everything around it recorded."""

    def __init__(self, follows: bool = True, knows_speeds: bool = True, num_steps: int = 1000) -> None:
        self.plans, self.ledger, self.causes = FakePlans(knows_speeds), FakeLedger(), list[str]()
        members = {number: SimpleNamespace(number=number, place=Worker.parse(place)) for place, number in PLACES.items()}
        self.members, left = _Table(members), lambda: self.causes.append("left")
        coordinator: Any = SimpleNamespace(members=self.members, change_plan=self.causes.append, update_membership=left)
        initial = PlanAssignment(PLAN, {row.worker: row.worker for row in PLAN.rows}, "the first")
        config: Any = SimpleNamespace(initial=initial, num_steps=num_steps, follows_speeds=follows, moves_layers=False)
        plans: Any = self.plans
        ledger: Any = self.ledger
        self.planning = SpeedPlanning(config, plans, ledger, lambda call: call(), lambda: coordinator)
        self.iteration = 0
        self.planning.start_epoch(PLAN, 0, PLACES)

    def iterate(self, num: int, speed: float = 1.0, link_us: int = 400) -> None:
        """Let all report iterations in which W1_1 has this speed, and messages to it take so long."""
        for _ in range(num):
            for place, number in PLACES.items():
                worker = Worker.parse(place)
                time_us = round(1000 / (speed if worker == SLOW else 1.0))
                pace = {"F": (4, time_us), "B": (4, 2 * time_us)}
                sender = Worker(worker.pipeline, 1 - worker.stage)
                lags = {str(sender): LinkLag(2, link_us if SLOW in (worker, sender) else 400, is_one_clock=True)}
                report = IterationApplied(worker, self.iteration, {}, OpColumns(), StepVerdict(1.0, 1.0), "", pace, lags)
                self.planning.add(number, report)
            self.iteration += 1

    def compared(self, present_us: int, new_us: int, without_us: int | None = None) -> None:
        *_, deliver = self.plans.comparisons.pop()
        deliver(PlanPeriods(present_us, new_us, without_us))


class _Table(dict[int, Any]):
    @property
    def placed(self) -> list[Any]:
        return list(self.values())


def test_a_slow_worker_is_named_and_a_better_plan_is_taken() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(3, 0.6)
    assert job.ledger.events == [SpeedChanged(5, "W1_1", 0.6, 4)]
    present, speeds, without, _ = job.plans.comparisons[0]
    assert (present, speeds, without) == (PLAN, ((SLOW, 0.6),), None)
    job.compared(150, 110)
    assert len(job.causes) == 1
    assert job.causes[0].startswith("W1_1 at 0.6 of the speed of peers; ")


def test_a_plan_that_is_hardly_better_is_not_taken_and_not_compared_again() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(3, 0.6)
    job.compared(150, 149)
    job.iterate(20, 0.6)
    assert (job.causes, job.plans.comparisons) == ([], [])


def test_a_failure_is_planned_for_with_the_speeds() -> None:
    job = Job()
    job.iterate(4)
    job.planning.request(frozenset())
    assert job.plans.asked[-1] == ("request", frozenset(), ())
    job.iterate(3, 0.6)
    assert job.plans.asked[-1] == ("prefetch", frozenset(), ((SLOW, 0.6),))
    dead = frozenset({Worker(0, 0)})
    job.planning.expect(dead)
    job.planning.request(dead)
    assert job.plans.asked[-2:] == [("expect", dead, ((SLOW, 0.6),)), ("request", dead, ((SLOW, 0.6),))]


def test_a_worker_that_is_far_too_slow_is_let_go_and_named() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(3, 0.1)
    job.compared(1000, 500, 150)
    assert len(job.causes) == 1, "it is left out after a while only; meanwhile it has less to do"
    job.causes.clear()
    job.iterate(9, 0.1)
    assert job.plans.comparisons == []
    job.ledger.time_us += PATIENCE_US
    job.iterate(1, 0.1)
    assert job.plans.comparisons[0][2] == SLOW
    job.compared(1000, 500, 150)
    member = job.members[PLACES["W1_1"]]
    assert member.is_leaving
    assert "left out" in member.leaves_because
    assert "W1_1 leaves: it is left out" in job.ledger.events[-1]
    assert job.causes == ["left"]


def test_a_worker_that_a_busy_machine_holds_up_for_a_while_is_not_let_go() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(20, 0.1)
    job.compared(150, 149, 100)
    job.ledger.time_us += PATIENCE_US // 2
    job.iterate(20)
    job.ledger.time_us += PATIENCE_US
    job.iterate(20)
    assert (job.plans.comparisons, job.causes) == ([], [])
    assert [event.speed for event in job.ledger.events] == [0.1, 1.0]


def test_speeds_that_change_while_plans_are_compared_are_compared_again() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(3, 0.6)
    job.iterate(6, 0.3)
    assert len(job.plans.comparisons) == 1, "one comparison at a time"
    job.compared(150, 100)
    assert job.causes == []
    assert job.plans.comparisons[0][1] == ((SLOW, 0.3),)


def test_the_speeds_of_a_plan_are_known_to_a_coordinator_that_takes_over() -> None:
    job = Job()
    planned = recycle.solve(recycle.problem(3, 2, 4, costs="10,13,9", speeds="W1_1=0.6"), "greedy", effort=2000)
    again = Job()
    again.planning._watch.keep_only({})
    again.planning.start_epoch(planned, 7, PLACES)
    again.planning.request(frozenset())
    assert again.plans.asked[-1] == ("request", frozenset(), ((SLOW, 0.6),))
    assert again.plans.comparisons == []
    assert again.ledger.events == [SpeedChanged(5, "W1_1", 0.6, 7)]
    assert job.ledger.events == []


def test_a_change_must_be_worth_the_pause_that_the_last_one_took() -> None:
    job = Job(num_steps=20)
    job.planning.recovered(Recovered(0, 1, 2, (), True, "another plan", 3, regroup_us=10 * SECOND))
    job.iterate(4)
    job.iterate(3, 0.6)
    job.compared(150, 110)
    assert job.causes == []


@pytest.mark.parametrize(("follows", "knows_speeds"), [(False, True), (True, False)])
def test_a_job_that_does_not_follow_speeds_only_names_them(follows: bool, knows_speeds: bool) -> None:
    job = Job(follows, knows_speeds)
    job.iterate(4)
    job.iterate(3, 0.6)
    assert job.ledger.events == [SpeedChanged(5, "W1_1", 0.6, 4)]
    assert job.plans.comparisons == []
    job.planning.request(frozenset())
    assert job.plans.asked[-1] == ("request", frozenset(), None)


def test_a_slow_link_is_named_and_peers_exchange_their_places() -> None:
    job = Job()
    job.iterate(4)
    job.iterate(5, link_us=100_000)
    assert job.ledger.events == [LinkChanged(5, "W1_0-W1_1", 0.004, 4, 100_000, 400)]
    (cause,) = job.causes
    assert cause.startswith("the link W1_0-W1_1 is slow, and messages go around it: ")
    answer = job.planning.exchanged(AS_IT_IS)
    assert isinstance(answer, PlanAssignment)
    assert [(now.stage, place.stage) for now, place in answer.moves] in ([(0, 0)] * 2, [(1, 1)] * 2)
    assert job.planning.exchanged("too few are left") == "too few are left"


def test_after_the_exchange_the_link_is_known_at_its_new_places() -> None:
    job = Job()
    job.iterate(9, link_us=100_000)
    job.ledger.events.clear()
    places = {**PLACES, "W1_1": PLACES["W2_1"], "W2_1": PLACES["W1_1"]}
    for place, number in places.items():
        job.members[number].place = Worker.parse(place)
    job.planning.start_epoch(PLAN, 20, places)
    assert job.ledger.events == [
        LinkChanged(5, "W1_0-W1_1", 1.0, 20, 0, 0),
        LinkChanged(5, "W1_0-W2_1", 0.004, 20, 100_000, 400),
    ]
    assert job.planning.exchanged(AS_IT_IS) == AS_IT_IS


@pytest.mark.parametrize(("follows", "num_steps", "link_us"), [(False, 1000, 100_000), (True, 12, 100_000), (True, 1000, 10_000)])
def test_nobody_moves_if_speeds_are_not_followed_or_it_would_win_too_little(follows: bool, num_steps: int, link_us: int) -> None:
    job = Job(follows=follows, num_steps=num_steps)
    job.ledger.num_steps = 9
    job.iterate(18, link_us=link_us)
    assert [event.link for event in job.ledger.events] == ["W1_0-W1_1"]
    assert job.causes == []
