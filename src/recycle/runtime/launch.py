"""The local launcher: every live worker of a plan as a process on this machine.

Processes are forked from a server that has torch loaded already, which starts a dozen of them in seconds. A worker that fails
says its last words; then all are ended, and the caller hears them. No process is left behind, however this one ends.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.core.errors import PortInUse, UserError, WorkerFailed
from recycle.core.routes import Routes
from recycle.runtime.checkpoint import Checkpoint
from recycle.runtime.forkserver import forking
from recycle.runtime.job import Job, Saving
from recycle.runtime.links import Address, Parcel
from recycle.runtime.turns import make_turns
from recycle.runtime.warm_up import warm_ups
from recycle.runtime.worker import Assignment, Finished, LastWords, Told, work


def launch(
    job: Job,
    hear: Callable[[Told], None],
    saving: Saving | None = None,
    resumed: Checkpoint | None = None,
    port: int = 0,
    parcels: Mapping[int, Parcel] | None = None,
) -> dict[Worker, Finished]:
    """Train with a process for every live worker of the job's plan, and return how each finished; `hear` gets all they tell.

    `parcels` are the job's, if somebody has asked for them already: it takes a forward pass to find them.
    """
    store = _store(port)
    context = forking(_homes(job))
    processes: dict[Connection, BaseProcess] = {}
    try:
        for given in assignments(job, store.port, saving, resumed, parcels):
            ear, mouth = context.Pipe(duplex=False)
            process = context.Process(
                target=work, args=(str(given.worker), _packed(given), mouth), daemon=True, name=str(given.worker)
            )
            process.start()
            mouth.close()
            processes[ear] = process
        return _follow(processes, hear)
    finally:
        for started in processes.values():
            started.terminate()
        for started in processes.values():
            started.join()


def _homes(job: Job) -> list[str]:
    """The modules that define what is trained: loaded once by the server, instead of by every worker."""
    parts = {type(part).__module__ for stage in job.stages for part in stage.modules()}
    return sorted(parts - {"__main__"})


def _store(port: int) -> Any:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise UserError(f"the port is {port!r}, but it must be a whole number from 0 to 65535, where 0 is any free one")
    try:
        return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    except dist.DistNetworkError as problem:
        raise PortInUse(
            f"port {port} cannot be listened on, another program probably does: name a free one, or 0 for any "
            f"({_first_line(problem)})"
        ) from None


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0]


def assignments(
    job: Job,
    port: int,
    saving: Saving | None = None,
    resumed: Checkpoint | None = None,
    parcels: Mapping[int, Parcel] | None = None,
) -> list[Assignment]:
    """What every live worker of the job's plan is given; they meet at a store on `port`."""
    plan, ties = job.plan, job.ties
    parcels = job.parcels() if parcels is None else parcels
    routes = Routes(plan)
    warm = warm_ups(plan, routes)
    turns = make_turns(plan, routes, warm)
    workers = [row.worker for row in plan.rows]
    return [
        Assignment(
            address=Address(worker, workers),
            shape=plan.problem.shape,
            turns=turns[worker],
            warm_up=warm[worker],
            is_staggered=plan.problem.techniques.staggered,
            parcels=parcels,
            ties=ties,
            module=job.stages[worker.stage],
            samples=job.samples,
            loss=job.loss,
            make_optimizer=job.make_optimizer,
            schedule=job.schedule,
            settings=job.settings,
            store_port=port,
            saving=saving,
            resumed=resumed,
        )
        for worker in workers
    ]


def _packed(given: Assignment) -> bytes:
    """What a worker is given, in bytes: torch's own way between processes needs a file for every tensor, and shares them."""
    try:
        return pickle.dumps(given)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as problem:
        raise UserError(
            f"the model, data, loss or optimizer cannot be sent to a worker process: {_first_line(problem)}; use functions and "
            "classes of a module's top level instead of lambdas and inner ones"
        ) from None


def _follow(processes: dict[Connection, BaseProcess], hear: Callable[[Told], None]) -> dict[Worker, Finished]:
    """Listen to all workers until they are done."""
    finished: dict[Worker, Finished] = {}
    ears = set(processes)
    while ears:
        for ear in wait(ears):
            assert isinstance(ear, Connection)
            match told := _heard(ear):
                case LastWords():
                    first = min([told, *_last_words(ears - {ear})], key=lambda words: words.at_us)
                    killed = [process for process in processes.values() if (process.exitcode or 0) < 0]
                    if first.problem is None and killed:  # the others only tell that it is gone
                        raise WorkerFailed(_epitaph(killed[0]))
                    raise first.problem or WorkerFailed(f"{first.worker} cannot go on:\n{first.text}")
                case None if Worker.parse(processes[ear].name) in finished:
                    ears.discard(ear)
                case None:
                    processes[ear].join(5)
                    raise WorkerFailed(_epitaph(processes[ear]))
                case Finished():
                    finished[told.worker] = told
                    hear(told)
                case _:
                    hear(told)
    return finished


def _last_words(ears: Iterable[Connection]) -> list[LastWords]:
    """Last words that others have said already: who failed first is to blame, not who noticed it first."""
    found = []
    for ear in ears:
        while ear.poll() and (told := _heard(ear)) is not None:
            if isinstance(told, LastWords):
                found.append(told)
    return found


def _epitaph(process: BaseProcess) -> str:
    """What can be said of a worker that ended without a word."""
    if process.exitcode == 1:
        return (
            f"{process.name} could not start: a worker imports the script that started the run, which must be a file that keeps "
            'its work under if __name__ == "__main__":'
        )
    return f"{process.name} ended with exit code {process.exitcode} and without a word: look at the machine's memory"


def _heard(ear: Connection) -> Any:
    try:
        return ear.recv()
    except (EOFError, OSError):  # gone, or gone in the middle of a message
        return None
