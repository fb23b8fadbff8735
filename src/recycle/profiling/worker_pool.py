"""WorkerPool: processes on this machine, one for each worker of a cluster, that all run the same request at the same time.

It is for measuring, where no worker dies: `train` has a coordinator for that. Each member is made in its process by a function
that is sent there, and answers one request after the other; an error in one of them ends the pool.
"""

import gc
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from recycle.runtime.transport.specs import TransportBroken
from recycle.runtime.worker.worker_spec import pickled

TIMEOUT = timedelta(seconds=120)
_HOST = "127.0.0.1"
# A member that fails makes others fail that wait for it: for so long all answers are collected, to find the first error.
_FOLLOWING_ERRORS_S = 2.0


class MemberContext(NamedTuple):
    """The worker that a member of the pool is, all workers of the pool, and the store for their process groups."""

    worker: Worker
    workers: Sequence[Worker]
    store: Any

    @property
    def rank(self) -> int:
        return self.workers.index(self.worker)


class PoolMember(Protocol):
    """The object that answers requests in one process of the pool."""

    def answer(self, request: Any) -> Any: ...


MakePoolMember = Callable[[MemberContext], PoolMember]


ChooseCores = Callable[[int], Sequence[int]]
"""From a number of workers to a core for each of them; to none if they run anywhere, or there are no workers."""


def any_core(num_workers: int) -> Sequence[int]:
    """Workers run anywhere."""
    return ()


class WorkerPool:
    """The processes of a pool."""

    def __init__(
        self, pipes: dict[Worker, Connection], processes: dict[Worker, BaseProcess], choose_cores: ChooseCores = any_core
    ) -> None:
        self._pipes, self._processes, self._choose_cores = pipes, processes, choose_cores

    def ask(self, request: Any) -> dict[Worker, Any]:
        """Send a request to all members, and return the answer of each."""
        self._pin()
        for worker, pipe in self._pipes.items():
            try:
                pipe.send(request)
            except OSError:
                raise self._gone(worker) from None
        answers: dict[Worker, Any] = {}
        problems: list[WorkerFailed] = []
        missing = {pipe: worker for worker, pipe in self._pipes.items()}
        while missing:
            ready = wait(
                [*missing, *(self._processes[worker].sentinel for worker in missing.values())],
                _FOLLOWING_ERRORS_S if problems else None,
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

    def _pin(self) -> None:
        """Let each process run on the core that is chosen for it, with all of its threads; later ones inherit that."""
        for process, core in zip(self._processes.values(), self._choose_cores(len(self._processes)), strict=False):
            for thread in _threads(process):
                with suppress(OSError):  # it has ended meanwhile
                    os.sched_setaffinity(thread, {core})

    def _received(self, worker: Worker, pipe: Connection) -> Any:
        try:
            problem, answer = pipe.recv()
        except (EOFError, OSError):  # the latter if it was killed before it had read the request
            raise self._gone(worker) from None
        if problem:
            raise WorkerFailed(f"{worker} failed while it was measured:\n{problem}")
        return answer

    def _gone(self, worker: Worker) -> WorkerFailed:
        self._processes[worker].join()
        return WorkerFailed(f"{worker} ended with exit code {self._processes[worker].exitcode} while it was measured")


@contextmanager
def worker_pool(
    workers: Sequence[Worker], make: MakePoolMember, preload: Sequence[str] = (), choose_cores: ChooseCores = any_core
) -> Iterator[WorkerPool]:
    """A pool of these workers; its processes have ended when the context is left.

    Before every request `choose_cores` says on which core each worker runs alone; if it names none, workers run anywhere.
    """
    packed = pickled(make)
    pipes: dict[Worker, Connection] = {}
    processes: dict[Worker, BaseProcess] = {}
    try:
        with interrupts_held():
            store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            context = fork_context(preload)
            for worker in workers:
                pipes[worker], other = context.Pipe()
                process = context.Process(
                    target=_serve, args=(packed, worker, list(workers), store.port, other), daemon=True, name=str(worker)
                )
                process.start()
                other.close()
                processes[worker] = process
        yield WorkerPool(pipes, processes, choose_cores)
    finally:
        for started in processes.values():
            started.kill()  # a member has nothing to lose, and a GPU's slice is free again sooner
        for started in processes.values():
            started.join()
        for pipe in pipes.values():
            pipe.close()
        choose_cores(0)


def _threads(process: BaseProcess) -> Sequence[int]:
    try:
        return list(map(int, os.listdir(f"/proc/{process.pid}/task")))
    except OSError:  # it has ended: who asks it will see
        return ()


def _serve(packed: bytes, worker: Worker, workers: Sequence[Worker], port: int, pipe: Connection) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the parent ends the pool
    torch.set_num_threads(1)
    member: PoolMember | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if member is None:
                make: MakePoolMember = pickle.loads(packed)
                store = dist.TCPStore(_HOST, port, is_master=False)  # type: ignore[attr-defined]
                member = make(MemberContext(worker, workers, store))
                gc.freeze()  # as a worker does
            response = ("", member.answer(request))
        except Exception:
            response = (traceback.format_exc(), None)
        pipe.send(response)
