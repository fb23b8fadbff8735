"""How a run begins is found for callbacks alone, and what goes wrong in observers never ends a run."""

import signal
from pathlib import Path

import pytest

from recycle.core.errors import FileProblem, NoCheckpoint, Stopped
from recycle.core.events.record import Event, Stepped
from recycle.host.folder_lock import locked
from recycle.runtime.callbacks.protocol import Callback, RunStart
from recycle.runtime.callbacks.watched_run import run_start, watched

EVENT = Stepped(0, 1, 5.0, 1.0, 1.0)


class Seen(Callback):
    """Keeps how the run begins."""

    start: RunStart | None = None

    def on_start(self, run: RunStart) -> None:
        self.start = run


def test_a_run_without_callbacks_does_not_look_for_its_last_checkpoint() -> None:
    with watched({}, (), lambda: pytest.fail("it was looked for"), print):
        pass


def test_callbacks_are_told_how_the_run_begins() -> None:
    seen, start = Seen(), RunStart(None, True, 3)
    with watched({}, [seen], lambda: start, print):
        pass
    assert seen.start == start


def test_a_folder_without_a_checkpoint_is_refused_before_callbacks_begin(tmp_path: Path) -> None:
    seen = Seen()
    with pytest.raises(NoCheckpoint), watched({}, [seen], lambda: run_start(tmp_path, is_resumed=True), print):
        pytest.fail("the run began")
    assert seen.start is None


def test_a_folder_that_another_run_uses_is_refused_as_such(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(FileProblem, match="is in use by another run"):
        run_start(tmp_path, is_resumed=True)


def test_an_error_of_an_observer_is_one_warning_even_if_warnings_cannot_be_printed() -> None:
    def observe(event: Event) -> None:
        raise RuntimeError("no")

    def say(sentence: str) -> None:
        raise BrokenPipeError

    with watched({"the view": observe}, (), RunStart, say) as run:
        run.on_event(EVENT)
        run.on_event(EVENT)
    assert run.warnings == ("the view raised RuntimeError: no; training goes on",)


@pytest.mark.parametrize("is_warning", [False, True])
def test_a_run_that_is_stopped_while_an_observer_is_called_stops(is_warning: bool) -> None:
    """The handler of the signal raises in the midst of the observer, or of the warning about it."""

    def stop(*_: object) -> None:
        raise Stopped("stopped by SIGTERM before the first step", signal.SIGTERM)

    def fail(event: Event) -> None:
        raise RuntimeError

    with (
        pytest.raises(Stopped, match="before the first step"),
        watched({"the view": fail if is_warning else stop}, (), RunStart, stop) as run,
    ):
        run.on_event(EVENT)
