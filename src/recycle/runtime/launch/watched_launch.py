"""`launch_watched`: a job on this machine with its observers and callbacks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from recycle.runtime.callbacks.protocol import Callback
from recycle.runtime.callbacks.watched_run import Observe, run_start, watched
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch


def launch_watched(
    job: Job,
    observers: Mapping[str, Observe],
    callbacks: Sequence[Callback],
    say: Callable[[str], None],
    injections: "Connection[Any, Any] | None" = None,
) -> Trained:
    """Run a job as `launch` does, with `callbacks`; `say` gets their warnings, and the summary has them, too.

    `observers`, by their names in warnings, are called with every event. If one raises an error, the run goes on, with a warning.

    Raises:
        CallbackFailed: A callback that is required has raised an error.
    """
    start = partial(run_start, job.run_folder, job.options.checkpoint.resume)
    with watched(observers, callbacks, start, say) as run:
        trained = launch(job, run.on_event, saves_if_stopped=True, injections=injections)
        run.ended(trained)
    return replace(trained, warnings=(*trained.warnings, *run.warnings))
