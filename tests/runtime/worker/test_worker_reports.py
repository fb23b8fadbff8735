"""Worker reports survive the wire: every report, every float, every kind of error."""

import inspect
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.control.decide.messages import Report, dumps, loads
from recycle.control.drift.message_times import LinkLag
from recycle.core import errors
from recycle.core.cluster import Worker
from recycle.core.errors import Unsendable, UserError
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.execute.spans import Span, columns_of
from recycle.runtime.worker.worker_reports import (
    IterationApplied,
    StepUndone,
    WorkerCrashed,
    WorkerFinished,
    report_from_json,
    report_to_json,
)

pytestmark = pytest.mark.timeout(60)
KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, UserError)]

counts = st.integers(0, 10**15)
workers = st.builds(Worker, st.integers(0, 999), st.integers(0, 999))
spans = st.lists(st.builds(Span, st.sampled_from(["2F0@1", "reduce", "optimizer"]), counts, counts, st.booleans()), max_size=4)
ran = spans.map(columns_of)
losses = st.dictionaries(st.integers(0, 99), st.floats(), max_size=4)
lags = st.dictionaries(workers.map(str), st.builds(LinkLag, counts, st.integers(-(10**15), 10**15), st.booleans()), max_size=3)
verdicts = st.builds(StepVerdict, st.floats(), st.none() | st.floats(allow_nan=False))
problems = st.none() | st.builds(lambda kind, text: kind(text), st.sampled_from(KINDS), st.text())
reports = st.one_of(
    st.builds(IterationApplied, workers, counts, losses, ran, verdicts, lags=lags),
    st.builds(StepUndone, workers, counts, ran),
    st.builds(WorkerFinished, workers, st.text(), counts, counts),
    st.builds(WorkerCrashed, workers, counts, st.text(), problems),
    st.builds(StageSaved, counts, counts, st.text(), counts, st.text()),
    st.builds(StageNotSaved, counts, counts, st.text()),
)


def received(report, clock_offset_us=0):
    """The report at the other end of a connection."""
    message = loads(dumps(Report(1, report_to_json(report))))
    return report_from_json(message.body, clock_offset_us)


def exactly(report):
    """A text that differs if anything does: types, every bit of a float, the kind of an error."""
    return repr(report)


@given(reports)
def test_every_report_survives_the_wire(report):
    assert exactly(received(report)) == exactly(report)


def test_losses_and_norms_that_are_not_finite_survive_the_wire():
    report = IterationApplied(
        Worker(1, 2), 3, {0: math.nan, 5: math.inf, 7: -math.inf, 8: -0.0, 9: 5e-324}, columns_of([]), StepVerdict(math.inf, None)
    )
    back = received(report)
    assert math.isnan(back.losses[0])
    assert [back.losses[5], back.losses[7], back.losses[9]] == [math.inf, -math.inf, 5e-324]
    assert math.copysign(1.0, back.losses[8]) == -1.0
    assert back.verdict == StepVerdict(math.inf, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_error_keeps_its_class_its_sentence_and_its_exit_code(kind):
    problem = received(WorkerCrashed(Worker(0, 1), 5, "what happened", kind("the loss is a list"))).problem
    assert type(problem) is kind
    assert (str(problem), problem.exit_code) == ("the loss is a list", kind.exit_code)


class OfAUser(Unsendable):
    """An error class that only the worker's side knows."""


@pytest.mark.parametrize("name", ["OfAUser", "__name__"])
def test_an_error_class_that_only_the_worker_knows_becomes_a_user_error(name):
    body = report_to_json(WorkerCrashed(Worker(0, 1), 5, "what happened", OfAUser("it is too large")))
    assert body["problem"][0] == "OfAUser"
    problem = report_from_json({**body, "problem": [name, "it is too large"]}).problem
    assert type(problem) is UserError
    assert str(problem) == "it is too large"


def test_a_text_that_is_no_utf_8_survives_the_wire():
    report = WorkerCrashed(Worker(0, 0), 1, "cannot read caf\udce9.txt", None)
    assert received(report) == report


def test_a_report_is_plain_json():
    lag = LinkLag(3, -250, is_one_clock=False)
    ran = columns_of([Span("0F0@1", 10, 20), Span("1F1@1", 22, 25), Span("0F2@1", 25, 26, True), Span("reduce", 30, 40)])
    report = IterationApplied(
        Worker(1, 0), 2, {3: 0.5}, ran, StepVerdict(2.0, 0.25, 512.0), pace={"F": (2, 7)}, lags={"W1_1": lag}
    )
    assert received(report) == report
    assert json.loads(json.dumps(report_to_json(report))) == {
        "type": "iteration_applied",
        "worker": "W1_0",
        "iteration": 2,
        "losses": [[3, 0.5]],
        "ran": [10, 40, 24, 2, 13, 10, 10, 25, True, ran.text],
        "verdict": [2.0, 0.25, 512.0],
        "checksum": "",
        "pace": {"F": [2, 7]},
        "lags": {"W1_1": [3, -250, False]},
    }


def test_times_of_a_clock_that_is_behind_are_moved():
    ran = columns_of([Span("0F0@1", 10, 20), Span("reduce", 30, 40, True)])
    moved = columns_of([Span("0F0@1", 110, 120), Span("reduce", 130, 140, True)])
    assert received(IterationApplied(Worker(0, 0), 1, {}, ran, StepVerdict(1.0, 1.0)), clock_offset_us=100).ran == moved
    assert received(StepUndone(Worker(0, 0), 1, ran), clock_offset_us=100).ran == moved
    assert received(WorkerCrashed(Worker(0, 0), 5, "gone"), clock_offset_us=100).at_us == 105
