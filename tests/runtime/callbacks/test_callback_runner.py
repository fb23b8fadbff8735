"""Callbacks: every event once and in order, also with a killed coordinator and a resumed run; slow and broken ones."""

import threading
import time

import pytest

from recycle.core.errors import CallbackFailed, UserError
from recycle.core.events.record import Evaluated, OpRan, Recovered, Resumed, Saved, Spell, Started, Stepped
from recycle.core.events.record_file import RECORD, write_record
from recycle.runtime.callbacks.callback_runner import CallbackRunner, running
from recycle.runtime.callbacks.callback_thread import CallbackThread
from recycle.runtime.callbacks.deliveries import STEP, Cursor, Delivery
from recycle.runtime.callbacks.protocol import Callback, Logger, RunStart, StepMetrics
from recycle.runtime.coordinator.ledger.trained import Trained
from tests.processes import depends_on_load

pytestmark = pytest.mark.timeout(60)
SECOND = 1_000_000
NEW = RunStart()


def step(number, loss=1.0):
    return Stepped(number - 1, number * SECOND, loss, 0.5, 1.0)


def recovery(epoch, at_s, iteration=0, worker="W0_0"):
    return Recovered(int(at_s * SECOND) - 10, int(at_s * SECOND), epoch, (worker,), False, "it died", iteration)


def trained(num_steps, recoveries=()):
    return Trained(num_steps, (), "", 0.0, 0, 0, 0, {}, {}, {}, {}, {}, (), 0, (), tuple(recoveries))


class Seen(Callback):
    """Keeps every call."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.num_done))

    def on_step(self, step):
        self.calls.append(("step", step.step))

    def on_evaluate(self, evaluation):
        self.calls.append(("evaluate", evaluation.num_steps))

    def on_recovery(self, recovery):
        self.calls.append(("recovery", recovery.epoch))

    def on_checkpoint(self, saved):
        self.calls.append(("checkpoint", saved.num_steps))

    def on_end(self, trained):
        self.calls.append(("end", trained.num_steps if trained is not None else None))


class SeenLogger(Seen, Logger):
    NAME = "seen"


class RewindingLogger(SeenLogger):
    REWINDS = True


def run_through(events, callback=None, run=NEW, end=None, warn=lambda sentence: None):
    """The calls that a callback gets of these events."""
    callback = callback or Seen()
    with running([callback], run, warn) as (runner, ended):
        for event in events:
            runner.on_event(event)
        if end is not None:
            ended(end)
    return callback.calls


def test_every_kind_of_event_has_its_call():
    events = [Started("train", ""), OpRan(0, "W0_0", "0F0@0", 0, 1), step(1), Evaluated(1, 1, 2.0), Saved(2, 1, "a", 3)]
    assert run_through([*events, recovery(2, 1.5), step(2)], end=trained(2, [recovery(2, 1.5)])) == [
        ("start", 0),
        ("step", 1),
        ("evaluate", 1),
        ("checkpoint", 1),
        ("recovery", 2),
        ("step", 2),
        ("end", 2),
    ]


def test_a_step_has_the_rates_of_its_own_spell():
    seen = []

    class Metrics(Seen):
        def on_step(self, step):
            seen.append(step)

    spells = [Spell(0, SECOND, "train", samples=10), Spell(SECOND, 2 * SECOND, "train", samples=30)]
    run_through([spells[0], step(1), spells[1], step(2, None), step(4)], Metrics())
    assert seen == [
        StepMetrics(1, 1.0, 0.5, 1.0, None, 10.0),
        StepMetrics(2, None, 0.5, 1.0, 1.0, 30.0),
        StepMetrics(4, 1.0, 0.5, 1.0, None, None),
    ]


def test_steps_that_are_trained_again_are_not_passed_again():
    events = [step(1), step(2), step(3), recovery(2, 3.5, iteration=1), step(2), step(3), step(4)]
    calls = run_through(events)
    assert [call for call in calls if call[0] == "step"] == [("step", number) for number in (1, 2, 3, 4)]


def test_what_a_killed_coordinator_wrote_but_did_not_send_comes_from_the_record(tmp_path):
    events = [step(1), Evaluated(1, 1, 1.0), recovery(2, 1.5, 1), step(2), recovery(3, 2.5, 2), step(3), step(4)]
    write_record(tmp_path / RECORD, events)
    calls = run_through([events[0], step(4)], run=RunStart(tmp_path), end=trained(4))
    assert calls[1:] == [
        *[("step", 1), ("evaluate", 1), ("recovery", 2), ("step", 2), ("recovery", 3), ("step", 3), ("step", 4)],
        ("end", 4),
    ]


def test_a_recovery_that_another_coordinator_writes_again_is_one_recovery():
    assert [each for each in run_through([recovery(2, 1), recovery(2, 1.25), recovery(3, 2)]) if each[0] == "recovery"] == [
        ("recovery", 2),
        ("recovery", 3),
    ]


def test_the_last_steps_and_recoveries_come_at_the_end_if_they_were_not_sent(tmp_path):
    write_record(tmp_path / RECORD, [step(1), recovery(2, 1.5), step(2)])
    calls = run_through([step(1)], run=RunStart(tmp_path), end=trained(2, [recovery(2, 1.5)]))
    assert calls[1:] == [("step", 1), ("recovery", 2), ("step", 2), ("end", 2)]


@pytest.mark.parametrize(
    ("make", "again"),
    [(SeenLogger, [("step", 5)]), (RewindingLogger, [("step", 4), ("step", 5)]), (Seen, [("step", 4), ("step", 5)])],
)
def test_a_resumed_run_goes_on_where_it_was(make, again, tmp_path):
    before = [step(1), recovery(2, 1.5), step(2), step(3), step(4)]
    write_record(tmp_path / RECORD, before)
    run_through(before, make(), RunStart(tmp_path))
    # The process is killed after step 4; the checkpoint is of step 3. Epochs count from 1 again.
    calls = run_through([step(4), recovery(2, 4.5, 4), step(5)], make(), RunStart(tmp_path, True, 3), trained(5))
    assert calls == [("start", 3), *again[:-1], ("recovery", 2), again[-1], ("end", 5)]


def test_a_logger_that_missed_events_before_a_resume_gets_them_from_the_record(tmp_path):
    events = [step(1), recovery(2, 1.5), step(2), step(3), step(4)]
    run_through(events[:1], SeenLogger(), RunStart(tmp_path))
    write_record(tmp_path / RECORD, events)
    calls = run_through([step(4)], SeenLogger(), RunStart(tmp_path, True, 3))
    assert calls[1:-1] == [("recovery", 2), ("step", 2), ("step", 3), ("step", 4)]


def test_a_process_that_takes_over_without_a_checkpoint_goes_on_behind_the_record(tmp_path):
    events = [step(1), Resumed(10, 1), step(2), step(3)]
    write_record(tmp_path / RECORD, events)
    run_through(events[:3], RewindingLogger(), RunStart(tmp_path))
    assert run_through([step(3), step(4)], RewindingLogger(), RunStart(tmp_path, True)) == [
        ("start", 3),
        ("step", 3),
        ("step", 4),
        ("end", None),
    ]


class Raising(Seen):
    def on_step(self, step):
        super().on_step(step)
        raise ConnectionError("no such host")


def test_a_callback_that_raises_gives_one_warning_and_is_called_again():
    warnings = []
    calls = run_through([step(1), step(2)], Raising(), warn=warnings.append, end=trained(2))
    assert calls[1:] == [("step", 1), ("step", 2), ("end", 2)]
    assert warnings == ["Raising.on_step raised ConnectionError: no such host; training goes on"]


def test_a_required_callback_that_raises_ends_the_run():
    callback = Raising()
    callback.is_required = True
    runner = CallbackRunner([callback], RunStart(), print)
    runner.on_event(step(1))
    with pytest.raises(CallbackFailed, match=r"Raising\.on_step raised ConnectionError: no such host; the run ends"):
        runner.close(trained(1))


def test_a_callback_that_hangs_delays_neither_the_run_nor_for_long_its_end():
    hangs = threading.Event()
    warnings = []

    class Hanging(Callback):
        def on_step(self, step):
            hangs.wait(50)

    other = Seen()
    runner = CallbackRunner([Hanging(), other], RunStart(), warnings.append, deadline_s=0.2)
    start_s = time.monotonic()
    for number in range(1, 1001):
        runner.on_event(step(number))
    runner.close(trained(1000))
    with depends_on_load():
        assert time.monotonic() - start_s < 20
    assert len(other.calls) == 1002
    assert warnings == ["Hanging has not ended in time: about 1001 calls of it are missing"]
    hangs.set()


def test_a_full_queue_loses_events_with_one_warning():
    hangs, warnings = threading.Event(), []

    class Hanging(Seen):
        def on_start(self, run):
            hangs.wait(50)

    callback = Hanging()
    thread = CallbackThread(callback, RunStart(), Cursor(), warnings.append, most_waiting=3)
    for number in range(1, 10):
        thread.put(Delivery(STEP, number, StepMetrics(number, 1.0, 1.0)))
    assert warnings == ["Hanging is 3 events behind, and misses later ones until it catches up"]
    hangs.set()
    while len(callback.calls) < 3:
        time.sleep(0.01)
    thread.end(None)
    thread.join(10)
    assert callback.calls == [("step", 1), ("step", 2), ("step", 3), ("end", None)]


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([Seen], "the class Seen, but it must be an object of a class that extends recycle.Callback"),
        ([print], "a builtin_function_or_method, but"),
        ([SeenLogger(), RewindingLogger()], "two loggers named seen"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks, says):
    with pytest.raises(UserError, match=says):
        CallbackRunner(callbacks, RunStart(), print)


@pytest.mark.parametrize("text", ["{}", '{"format": "recycle-logger", "version": 1, "step": -1}', "no"])
def test_a_file_that_does_not_say_what_was_logged_is_refused(text, tmp_path):
    (tmp_path / "loggers").mkdir()
    (tmp_path / "loggers" / "seen.json").write_text(text)
    with pytest.raises(UserError, match=r"seen\.json"):
        CallbackRunner([SeenLogger()], RunStart(tmp_path, True), print)
