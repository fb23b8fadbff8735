"""The coordinator's process: `run_coordinator_process` as a child of a launcher, `serve_job` in any process."""

import gc
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from recycle.control.planning.planning_process import PlanningProcess
from recycle.control.store.file_store import FileStore
from recycle.control.store.protocol import Store
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Event
from recycle.core.events.record_file import RECORD
from recycle.host.folder_lock import locked
from recycle.host.process_lifetime import end_with_parent
from recycle.host.process_title import set_title
from recycle.host.stop_signals import stop_signals
from recycle.runtime.checkpoint.folder import make_folder
from recycle.runtime.coordinator.config import CoordinatorConfig, EventSink, JobFailed
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.service import CoordinatorService

_SWITCH_S = 0.0005
# The coordinator of a run that was killed a moment ago ends when it has noticed that, and then leaves the folder.
_WAIT_S = 5.0


def run_coordinator_process(
    config: CoordinatorConfig, listener: socket.socket, sink: EventSink, before: Sequence[Event] | None = None
) -> None:
    """Coordinate a job to its end, as a process of a launcher. The process ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
    set_title(f"recycle coordinator of {config.job}")
    # Before this process has a thread: then the planning process can be forked, and has what the fork server has loaded.
    planning = PlanningProcess(get_context("fork")) if config.source is not None else None
    end_with_parent()
    serve_job(config, listener, sink, before, planning, is_repeatable=True)


def serve_job(
    config: CoordinatorConfig,
    listener: socket.socket,
    sink: EventSink,
    before: Sequence[Event] | None = None,
    planning: PlanningProcess | None = None,
    is_repeatable: bool = False,
    store: Store | None = None,
) -> None:
    """Coordinate a job to its end. With `before`, replace a coordinator that was killed: its events, unless on disk.

    `store` is led by this process; without one, the journal is a file. If another coordinator leads then, the job goes on there.

    A first SIGTERM, or SIGINT if it is not ignored, lets the job write a checkpoint and end. A second one ends this process,
    unless they are `is_repeatable`: a launcher sends one, and the user's tools may send another to all processes of the job.
    """

    # So that the serving thread, which waits for the interpreter after every message, need not wait long for a busy one.
    sys.setswitchinterval(_SWITCH_S)
    with ExitStack() as stack:
        try:
            service = _set_up(config, listener, sink, before, planning, stack, store)
        except (UserError, OSError) as problem:
            sink.send(JobFailed(_refusal(config, problem, is_takeover=before is not None), is_over=False))
            return
        if config.stops_early:
            service.stop_early()
        gc.freeze()  # what exists now stays: a collection that looks at a large plan again and again would delay heartbeats
        try:
            with stop_signals(lambda number: service.stop_early(), is_repeatable):
                service.run()
        except UserError as problem:
            sink.send(JobFailed(problem))


def _set_up(
    config: CoordinatorConfig,
    listener: socket.socket,
    sink: EventSink,
    before: Sequence[Event] | None,
    planning: PlanningProcess | None,
    stack: ExitStack,
    store: Store | None,
) -> CoordinatorService:
    """Make the service, with the run folder if there is one; `stack` closes the folder."""
    earlier: Iterable[Event] | None = before
    run, is_takeover = None, before is not None
    if config.folder is not None:
        if not config.checkpoint.resume:
            make_folder(config.folder)
        stack.enter_context(locked(config.folder, is_required=store is None, wait_s=_WAIT_S))
        # Without a record, this folder is not that of the coordinator which is replaced: its machine may be gone.
        has_record = is_takeover and (store is None or (config.folder / RECORD).exists())
        options, plan = (config.run_folder, config.checkpoint), config.initial.plan
        folder = RunFolder(config.folder, *options, plan, config.fingerprint, config.num_steps, has_record)
        run = stack.enter_context(folder)
        earlier = folder.before if has_record or not is_takeover else ()
    return CoordinatorService(config, listener, sink, run, earlier, planning, store or _led_file(config.journal, stack))


def _led_file(path: Path, stack: ExitStack) -> Store:
    """The journal in a file of this machine, led by this process."""
    store = FileStore(path)
    if store.campaign() is not None:
        raise FileProblem(f"{path} is in use by another run: wait until that is over, or name another folder")
    stack.callback(store.resign)
    return store


def _refusal(config: CoordinatorConfig, problem: UserError | OSError, is_takeover: bool) -> UserError:
    """Why the coordinator cannot start, and how the job goes on if it was running."""
    if isinstance(problem, OSError):
        problem = FileProblem(f"cannot write {problem.filename or config.folder}: {problem.strerror or problem}")
    if not is_takeover or config.folder is None:
        return problem
    resume = f"go on from the last checkpoint with: recycle train --resume {config.folder}"
    return FileProblem(f"no other coordinator can take over: {problem}; {resume}")
