"""`watched`: the observers and callbacks of a run. What goes wrong in them is a warning, and training goes on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import NoCheckpoint, Stopped
from recycle.core.events.record import Event
from recycle.core.events.record_file import CHECKPOINTS
from recycle.host.folder_lock import locked
from recycle.runtime.callbacks.callback_runner import CallbackRunner, running
from recycle.runtime.callbacks.protocol import Callback, RunStart
from recycle.runtime.checkpoint.resume import latest
from recycle.runtime.coordinator.ledger.trained import Trained

Observe = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """Passes every event on, and at the end the summary of the run; raises CallbackFailed for a callback that is required."""

    on_event: Observe
    ended: Callable[[Trained], None]
    _runner: CallbackRunner

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._runner.warnings)


@contextmanager
def watched(
    observers: Mapping[str, Observe], callbacks: Sequence[Callback], start: Callable[[], RunStart], say: Callable[[str], None]
) -> Iterator[WatchedRun]:
    """Observers, by their names in warnings, and callbacks of a run that lasts as long as the block; `say` gets the warnings.

    `start` says how the run begins, and may refuse it. Only callbacks are told: without them it is not called, as it may read a
    whole checkpoint.
    """
    run = start() if callbacks else RunStart()
    with running(callbacks, run, say) as (runner, ended):
        guarded = [_Guarded(name, observe, runner.warn) for name, observe in observers.items()]

        def on_event(event: Event) -> None:
            for observe in guarded:
                observe(event)
            runner.on_event(event)

        yield WatchedRun(on_event, ended, runner)


def run_start(folder: Path | None, is_resumed: bool, is_takeover: bool = False) -> RunStart:
    """How a run begins in this process: anew, from the last checkpoint in its folder, or where another process was killed.

    Raises:
        NoCheckpoint: The folder has no whole checkpoint to resume from.
        FileProblem: Nor may it have one, because another run is using it.
    """
    num_done = 0
    if is_resumed and not is_takeover and folder is not None:
        try:
            num_done = latest(folder / CHECKPOINTS)[0].num_steps
        except NoCheckpoint:
            with locked(folder):  # which says so if another run is using it, and has not written its first checkpoint yet
                raise
    return RunStart(folder, is_resumed or is_takeover, num_done)


class _Guarded:
    """Calls an observer with events; `warn` gets a sentence when it raises an error for the first time."""

    def __init__(self, name: str, observe: Observe, warn: Callable[[str], None]) -> None:
        self._name, self._observe, self._warn, self._has_warned = name, observe, warn, False

    def __call__(self, event: Event) -> None:
        try:
            self._observe(event)
        except Stopped:  # raised by the handler of a signal that came meanwhile
            raise
        except Exception as problem:
            if not self._has_warned:
                self._has_warned = True
                self._warn_of(problem)

    def _warn_of(self, problem: Exception) -> None:
        try:
            self._warn(f"{self._name} raised {type(problem).__name__}: {problem}; training goes on")
        except Stopped:
            raise
        except Exception:  # what prints warnings may be what failed; the summary has them anyway
            return
