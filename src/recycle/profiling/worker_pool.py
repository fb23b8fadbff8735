"""A crew: processes on this machine, one for each worker of a cluster, that do what they are asked, all at the same time.

It is for measuring, where nobody dies: `train` has a coordinator for that. Each member is made in its process from a function
that is sent there, and answers one question after the other; whatever goes wrong in one of them ends the crew.
"""

import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.core.errors import WorkerFailed
from recycle.host.process_lifetime import end_with_parent, interrupts_held
from recycle.runtime.launch.forkserver import fork_context
from recycle.runtime.transport.gloo import TransportBroken
from recycle.runtime.worker.worker_spec import pickled

TIMEOUT = timedelta(seconds=120)
_HOST = "127.0.0.1"
# Who fails makes others fail who wait for it: so long all are listened to, for the one that was the first.
_ECHO_S = 2.0


class Station(NamedTuple):
    """Where a member of a crew is: which worker it is, among whom, and the store at which they meet."""

    worker: Worker
    workers: Sequence[Worker]
    store: Any

    @property
    def rank(self) -> int:
        return self.workers.index(self.worker)


class PoolMember(Protocol):
    """One process's part."""

    def answer(self, question: Any) -> Any: ...


MakePoolMember = Callable[[Station], PoolMember]


class WorkerPool:
    """Processes that answer questions."""

    def __init__(self, pipes: dict[Worker, Connection], processes: dict[Worker, BaseProcess]) -> None:
        self._pipes, self._processes = pipes, processes

    def ask(self, question: Any) -> dict[Worker, Any]:
        """Put a question to all members, and return what each answers."""
        for worker, pipe in self._pipes.items():
            try:
                pipe.send(question)
            except OSError:
                raise self._gone(worker) from None
        answers: dict[Worker, Any] = {}
        problems: list[WorkerFailed] = []
        missing = {pipe: worker for worker, pipe in self._pipes.items()}
        while missing:
            ready = wait(
                [*missing, *(self._processes[worker].sentinel for worker in missing.values())], _ECHO_S if problems else None
            )
            if not ready:
                break
            for pipe, worker in list(missing.items()):
                if pipe in ready or self._processes[worker].sentinel in ready:
                    del missing[pipe]
                    try:
                        answers[worker] = self._received(worker, pipe)
                    except WorkerFailed as problem:
                        problems.append(problem)
        if problems:
            raise next((problem for problem in problems if TransportBroken.__name__ not in str(problem)), problems[0])
        return answers

    def _received(self, worker: Worker, pipe: Connection) -> Any:
        try:
            problem, answer = pipe.recv()
        except (EOFError, OSError):  # the latter if it was killed before it had read the question
            raise self._gone(worker) from None
        if problem:
            raise WorkerFailed(f"{worker} failed while it was measured:\n{problem}")
        return answer

    def _gone(self, worker: Worker) -> WorkerFailed:
        self._processes[worker].join()
        return WorkerFailed(f"{worker} ended with exit code {self._processes[worker].exitcode} while it was measured")


@contextmanager
def worker_pool(workers: Sequence[Worker], make: MakePoolMember, preload: Sequence[str] = ()) -> Iterator[WorkerPool]:
    """A crew of these workers; its processes are gone when the context is left."""
    sent = pickled(make)
    pipes: dict[Worker, Connection] = {}
    processes: dict[Worker, BaseProcess] = {}
    try:
        with interrupts_held():
            store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            context = fork_context(preload)
            for worker in workers:
                pipes[worker], other = context.Pipe()
                process = context.Process(
                    target=_serve, args=(sent, worker, list(workers), store.port, other), daemon=True, name=str(worker)
                )
                process.start()
                other.close()
                processes[worker] = process
        yield WorkerPool(pipes, processes)
    finally:
        for started in processes.values():
            started.kill()  # nobody has anything to lose, and a GPU's slice is free again sooner
        for started in processes.values():
            started.join()
        for pipe in pipes.values():
            pipe.close()


def _serve(sent: bytes, worker: Worker, workers: Sequence[Worker], port: int, pipe: Connection) -> None:
    """The process of one member."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells everybody; the parent ends its crew
    torch.set_num_threads(1)
    member: PoolMember | None = None
    while True:
        try:
            question = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if member is None:
                make: MakePoolMember = pickle.loads(sent)
                store = dist.TCPStore(_HOST, port, is_master=False)  # type: ignore[attr-defined]
                member = make(Station(worker, workers, store))
            said = ("", member.answer(question))
        except Exception:
            said = (traceback.format_exc(), None)
        pipe.send(said)
