"""The report inbox: a report reaches the ledger once, and is acknowledged when the record holds it for good."""

import recycle
from recycle.control.decide.messages import Report
from recycle.core.cluster import Worker
from recycle.core.events.record import Stepped, Warned
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.coordinator.report_inbox import ReportInbox
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import IterationApplied, StepUndone, WorkerCrashed, WorkerFinished, report_to_json

NAMES = ["W0_0", "W0_1", "W1_0", "W1_1"]


class Inbox:
    """A report inbox with its ledger, and what it published and acknowledged."""

    def __init__(self):
        self.published, self.acks = [], []
        plan = recycle.solve(recycle.problem(2, 2, 2, costs=(1, 1, 1)), "greedy")
        self.ledger = RunLedger(plan, 8, plan.problem.profile, lambda events: self.published.append(list(events)), begin_us=0)
        self.ledger.start_epoch(plan, 0, {number: Worker.parse(name) for number, name in enumerate(NAMES, 1)}, {1, 2, 3, 4})
        self.inbox = ReportInbox(self.ledger, lambda member, ack: self.acks.append((member, ack.number)))

    def accept(self, member, number, report, clock_offset_us=0, made_in=0, origin=0):
        return self.inbox.accept(member, Report(number, report_to_json(report), made_in), clock_offset_us, origin)


def applied(name, iteration=0):
    worker = Worker.parse(name)
    losses = dict.fromkeys(range(4), 1.0) if worker.stage == 1 else {}
    span = Span(f"{worker.stage}F0@0", 100 * (iteration + 1), 100 * (iteration + 1) + 50)
    return IterationApplied(worker, iteration, losses, columns_of([span]), StepVerdict(1.0, 1.0))


def test_an_iteration_is_acknowledged_to_all_when_its_last_worker_has_reported_it():
    made = Inbox()
    for member, name in enumerate(NAMES[:3], 1):
        assert made.accept(member, 7, applied(name)) == applied(name)
    assert (made.acks, made.published) == ([], [])
    made.accept(4, 1, applied("W1_1"))
    assert sorted(made.acks) == [(1, 7), (2, 7), (3, 7), (4, 1)]
    assert sum(isinstance(event, Stepped) for event in made.published[0]) == 1


def test_the_events_of_one_report_are_published_together_and_others_one_by_one():
    made = Inbox()
    for member, name in enumerate(NAMES, 1):
        made.accept(member, 1, applied(name))
    assert len(made.published) == 1
    made.ledger.warn("it is slow")
    assert [type(event) for event in made.published[1]] == [Warned]


def test_a_report_that_is_sent_again_is_neither_added_nor_acknowledged_again():
    made = Inbox()
    undone = StepUndone(Worker(0, 0), 3, columns_of([Span("0F0@0", 10, 20)]))
    assert made.accept(1, 1, undone) == undone
    assert made.accept(1, 1, undone) is None
    assert made.acks == [(1, 1)]
    assert len(made.published) == 1


def test_reports_are_acknowledged_in_order_even_if_a_later_one_is_recorded_first():
    made = Inbox()
    made.accept(1, 1, applied("W0_0"))
    made.accept(1, 2, StepUndone(Worker(0, 0), 1, columns_of([])))
    assert made.acks == []
    for member, name in enumerate(NAMES[1:], 2):
        made.accept(member, 1, applied(name))
    assert (1, 2) in made.acks


def test_a_member_that_is_removed_gets_no_acknowledgement():
    made = Inbox()
    for member, name in enumerate(NAMES[:3], 1):
        made.accept(member, 1, applied(name))
    made.inbox.remove(2)
    made.accept(4, 1, applied("W1_1"))
    assert sorted(made.acks) == [(1, 1), (3, 1), (4, 1)]


def test_times_of_a_member_are_converted_to_the_coordinators_clock():
    made = Inbox()
    assert made.accept(1, 1, applied("W0_0"), clock_offset_us=1000).ran.ran() == [("0F0@0", 1100, 1150, False)]


def test_a_report_from_before_all_went_back_is_acknowledged_and_does_not_count():
    made = Inbox()
    finished = WorkerFinished(Worker(0, 0), "a digest", 1, 1, 1)
    assert made.accept(1, 1, applied("W0_0"), made_in=1, origin=3) is None
    assert made.accept(1, 2, finished, made_in=1, origin=3) is None
    assert made.acks == [(1, 1), (1, 2)]
    assert (made.ledger.late_reporters(), made.published) == ({}, [])
    crashed = WorkerCrashed(Worker(0, 0), 0, "no more")
    assert made.accept(1, 3, crashed, made_in=1, origin=3) == crashed
    assert made.accept(1, 4, applied("W0_0"), made_in=3, origin=3) == applied("W0_0")
