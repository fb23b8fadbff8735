"""What a coordinator does for a connection with a purpose of its own: it serves a file of a checkpoint, or says its term."""

from functools import partial

from recycle.control.decide.messages import Hello, Refused
from recycle.control.net import file_transfer
from recycle.control.net.leader_probe import PROBE_PURPOSE, answer_probe
from recycle.control.net.server import ConnectionTask
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.runtime.coordinator.leadership import DecisionGate
from recycle.runtime.coordinator.ledger.run_folder import RunFolder

NOT_CERTAIN = Refused("it is not certain that this coordinator leads: the store is away", tries_again=True)


def task_of_purpose(hello: Hello, job: str, run: RunFolder | None, gate: DecisionGate) -> ConnectionTask | Refused:
    """The task that serves a connection, or why there is none.

    A coordinator that may not lead refuses, so that the worker tries another one: its files may be old, and what it is sent may
    be lost.
    """
    is_of_job = hello.job in ("", job)
    if is_of_job and not gate.is_certain:
        return NOT_CERTAIN
    if is_of_job and hello.purpose == PROBE_PURPOSE:
        return partial(answer_probe, term=gate.journal.term)
    if is_of_job and hello.purpose == file_transfer.PURPOSE and run is not None:
        return run.transfer_task()
    return Refused(f"job {job} serves no connection for {hello.purpose!r} of job {hello.job or 'any'}")


def preferred_place(hello: Hello) -> Worker | Refused | None:
    """The place that a new worker prefers, if it names one, or why it is refused."""
    try:
        return Worker.parse(hello.preferred_place) if hello.preferred_place else None
    except UserError as problem:
        return Refused(str(problem))
