"""`launch_watched`: a job on this machine, with its callbacks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from recycle.core.events.record import Event
from recycle.core.events.record_file import CHECKPOINTS
from recycle.runtime.callbacks.callback_runner import running
from recycle.runtime.callbacks.protocol import Callback, RunStart
from recycle.runtime.checkpoint.resume import latest
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import Watch, launch


def launch_watched(job: Job, watch: Watch, callbacks: Sequence[Callback], say: Callable[[str], None]) -> Trained:
    """Run a job as `launch` does, with `callbacks`; `say` gets their warnings, and the summary has them, too.

    Raises:
        CallbackFailed: A callback that is required has raised an error.
    """
    folder, is_continued = job.run_folder, job.options.checkpoint.resume
    num_done = latest(folder / CHECKPOINTS)[0].num_steps if is_continued and folder is not None else 0
    with running(callbacks, RunStart(folder, is_continued, num_done), say) as (runner, ended):

        def on_event(event: Event) -> None:
            watch(event)
            runner.on_event(event)

        trained = launch(job, on_event, saves_if_stopped=True)
        ended(trained)
    return replace(trained, warnings=(*trained.warnings, *runner.warnings))
