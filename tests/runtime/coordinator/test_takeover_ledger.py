"""The ledger of a coordinator that does not have the record of the one before: which iteration it begins with."""

from typing import Any

import pytest

from recycle.control.decide.journal import JournalEntry
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.events.record import Event, Stepped, Warned
from recycle.core.plans.packed_plan import pack_plan
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.ledger.takeover_ledger import TakeoverLedger
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import IterationApplied
from tests.control.decide.coordinator_harness import plan_for

PLAN = plan_for(Cluster(Shape(1, 2, 2)))
MEMBERS = {1: Worker(0, 0), 2: Worker(0, 1)}


class Harness:
    def __init__(self, iteration: int = 0, reporters: Any = None) -> None:
        self.events: list[Event] = []
        self.ledger = TakeoverLedger(PLAN, 4, PLAN.problem.profile.stages, self.events.extend, begin_us=0)
        places = {str(place): number for number, place in MEMBERS.items()}
        entry = JournalEntry(1, iteration, places, pack_plan(PLAN), "the job began", 2, reporters=reporters or {})
        assert self.ledger.take_over(entry, has_gap=True) == PLAN

    def report(self, member: int, iteration: int) -> IterationApplied:
        losses = {0: float(iteration)} if member == 2 else {}
        spans = columns_of([Span("0F0@0", 1000 * iteration, 1000 * iteration + 900)])
        report = IterationApplied(MEMBERS[member], iteration, losses, spans, StepVerdict(1.0, 1.0), "")
        self.ledger.add(member, report)
        return report

    @property
    def steps(self) -> list[int]:
        return [event.iteration for event in self.events if isinstance(event, Stepped)]

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Warned)]


def test_the_first_iteration_that_all_have_reported_is_the_first_of_the_record() -> None:
    harness = Harness()
    partial = harness.report(1, 5)  # of member 2, the coordinator before had acknowledged it
    assert harness.ledger.is_pending(partial)
    harness.report(1, 6)
    harness.report(2, 6)
    assert harness.steps == [6]
    assert not harness.ledger.is_pending(partial)  # it is acknowledged, and does not come again
    assert harness.ledger.num_steps == 7
    assert harness.warnings == ["the record of steps 1 to 6 is not here: their losses are unknown"]
    for member in (1, 2):
        harness.report(member, 7)
    assert harness.steps == [6, 7]
    losses = harness.ledger.summary(8, {}).losses
    assert [loss != loss for loss in losses] == [True] * 6 + [False] * 2


def test_the_gap_is_closed_once_and_later_iterations_wait_for_their_turn() -> None:
    harness = Harness()
    for member in (1, 2):
        harness.report(member, 3)
    for member in (1, 2):
        harness.report(member, 5)
    assert harness.steps == [3]
    for member in (1, 2):
        harness.report(member, 4)
    assert harness.steps == [3, 4, 5]


def test_iterations_before_the_epoch_are_known_to_be_recorded_unless_somebody_has_to_report_them() -> None:
    assert Harness(iteration=9).ledger.num_steps == 9
    harness = Harness(iteration=9, reporters={8: [1]})
    assert harness.ledger.num_steps == 8
    harness.report(1, 8)
    assert harness.steps == [8]


@pytest.mark.parametrize(("num_steps", "expected"), [(12, 12), (None, 9)])
def test_when_all_have_finished_and_nothing_was_reported_again_all_steps_are_done(num_steps: int | None, expected: int) -> None:
    harness = Harness(iteration=9)
    harness.ledger.all_finished(num_steps)
    assert harness.ledger.num_steps == expected
    assert harness.steps == []


def test_when_all_have_finished_the_reports_of_some_are_the_record_of_their_iterations() -> None:
    """A worker was killed with its reports, or the coordinator before had acknowledged them."""
    harness = Harness()
    for iteration in (5, 6, 7):
        harness.report(2, iteration)
    harness.ledger.all_finished(8)
    assert harness.steps == [5, 6, 7]
    assert harness.ledger.num_steps == 8
    assert harness.ledger.summary(8, {}).losses[5:] == (5.0, 6.0, 7.0)
    assert harness.warnings == ["the record of steps 1 to 5 is not here: their losses are unknown"]


def test_an_epoch_that_starts_in_the_gap_does_not_wait_for_iterations_of_which_nobody_knows() -> None:
    harness = Harness()
    harness.ledger.start_epoch(PLAN, 100_000, MEMBERS, {1, 2})
    assert harness.ledger.num_steps == 99_999
    assert list(harness.ledger.late_reporters()) == [99_999]
    for member in (1, 2):
        harness.report(member, 100_000)
    assert harness.steps == [100_000]
