"""The ledger's part for evaluations: each once and behind its step; the reasons for which a run ends early."""

import pytest

from recycle.core.cluster import Worker
from recycle.core.events.record import Evaluated
from recycle.runtime.coordinator.ledger.loss_watch import EvaluationLog
from recycle.runtime.worker.worker_reports import EvaluationDone, report_from_json, report_to_json


def done(num_steps, loss=1.0, pipeline=0):
    return EvaluationDone(Worker(pipeline, 1), num_steps, loss, 4, at_us=1000 * num_steps, took_us=10)


class Log:
    """An evaluation log, and what it wrote and asked for."""

    def __init__(self, num_steps=0):
        self.num_steps, self.written, self.stops = num_steps, [], []
        self.log = EvaluationLog(lambda event, at_us: self.written.append(event.num_steps), lambda: self.num_steps)


def test_an_evaluation_waits_for_its_step_and_is_written_once():
    seen = Log(num_steps=1)
    seen.log.add(done(2), 0)
    assert seen.log.is_pending(done(2))
    assert seen.written == []
    seen.num_steps = 2
    seen.log.stepped(0)
    seen.log.add(done(2, pipeline=1), 0)  # a peer has it, too
    assert seen.written == [2]
    assert not seen.log.is_pending(done(2))


def test_an_evaluation_of_steps_that_are_redone_is_forgotten():
    seen = Log(num_steps=1)
    seen.log.add(done(2), 0)
    seen.log.go_back(1)
    seen.num_steps = 2
    seen.log.stepped(0)
    assert seen.written == []


def test_a_report_comes_back_from_its_json_with_the_clock_of_the_coordinator():
    report = done(2, float("inf"))
    assert report_from_json(report_to_json(report), clock_offset_us=7) == EvaluationDone(
        Worker(0, 1), 2, float("inf"), 4, 2007, 10
    )


@pytest.mark.parametrize(
    ("losses", "patience", "stops_after"),
    [
        ([3, 2, 1, 2, 2], 2, 5),
        ([3, 3, 3], 2, 3),
        ([3, 2, 3, 1, 2], 2, None),
        ([None, None, 1, None, None], 2, 5),
        ([1, 2, 3, 4], 0, None),
        ([1, 2], 2, None),
    ],
)
def test_a_run_ends_when_its_patience_does(losses, patience, stops_after):
    seen, stopped = Log(), []
    seen.log.end_by(patience, None, lambda reason: stopped.append((seen.num_steps, reason)))
    for number, loss in enumerate(losses, start=1):
        seen.num_steps = number
        seen.log.add(done(number, float("nan") if loss is None else loss), 0)
        seen.log.stepped(0)
    sentence = f"the evaluation loss has not fallen in {patience} evaluations"
    assert stopped == ([(stops_after, sentence)] if stops_after else [])
    assert seen.log.summary()["stopped_because"] == (sentence if stops_after else "")


def test_evaluations_before_a_resume_count_for_the_patience():
    seen, stopped = Log(num_steps=3), []
    seen.log.end_by(2, None, stopped.append)
    for number, loss in enumerate((1.0, 2.0), start=1):
        seen.log.restore(Evaluated(0, number, loss))
    seen.log.add(done(3, 2.0), 0)
    seen.log.stepped(0)
    assert len(stopped) == 1
    assert [each.num_steps for each in seen.log.done] == [1, 2, 3]


def test_a_run_ends_after_its_time():
    seen, stopped = Log(num_steps=3), []
    seen.log.end_by(0, 2.5, stopped.append)
    for run_us in (2_499_999, 2_500_000, 3_000_000):
        seen.log.stepped(run_us)
    assert stopped == ["the time limit of 2.5 s is reached"]
