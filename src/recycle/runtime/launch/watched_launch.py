"""`launch_watched`: a job on this machine with its observers and callbacks. An error of one of them is a warning."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from recycle.core.events.record import Event
from recycle.core.events.record_file import CHECKPOINTS
from recycle.runtime.callbacks.callback_runner import running
from recycle.runtime.callbacks.protocol import Callback, RunStart
from recycle.runtime.checkpoint.resume import latest
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import Watch, launch


def launch_watched(
    job: Job,
    observers: Mapping[str, Watch],
    callbacks: Sequence[Callback],
    say: Callable[[str], None],
    injections: "Connection[Any, Any] | None" = None,
) -> Trained:
    """Run a job as `launch` does, with `callbacks`; `say` gets their warnings, and the summary has them, too.

    `observers`, by their names in warnings, are called with every event. If one raises an error, the run goes on, with a warning.

    Raises:
        CallbackFailed: A callback that is required has raised an error.
    """
    folder, is_continued = job.run_folder, job.options.checkpoint.resume
    num_done = latest(folder / CHECKPOINTS)[0].num_steps if is_continued and folder is not None else 0
    with running(callbacks, RunStart(folder, is_continued, num_done), say) as (runner, ended):
        guarded = [_Guarded(name, observe, runner.warn) for name, observe in observers.items()]

        def on_event(event: Event) -> None:
            for observe in guarded:
                observe(event)
            runner.on_event(event)

        trained = launch(job, on_event, saves_if_stopped=True, injections=injections)
        ended(trained)
    return replace(trained, warnings=(*trained.warnings, *runner.warnings))


class _Guarded:
    """Calls an observer with events; `warn` gets a sentence when it raises an error for the first time."""

    def __init__(self, name: str, observe: Watch, warn: Callable[[str], None]) -> None:
        self._name, self._observe, self._warn, self._has_warned = name, observe, warn, False

    def __call__(self, event: Event) -> None:
        try:
            self._observe(event)
        except Exception as problem:
            if not self._has_warned:
                self._has_warned = True
                with suppress(Exception):  # what prints warnings may be what failed; the summary has them anyway
                    self._warn(f"{self._name} raised {type(problem).__name__}: {problem}; training goes on")
