"""The local launcher: every live worker of a plan as a process on this machine.

Processes are forked from a server that has torch loaded already, which starts a dozen of them in seconds. A worker that fails
says its last words; then all are ended, and the caller hears them. No process is left behind, however this one ends.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.plan import Plan
from recycle.core.routes import Routes
from recycle.runtime.digest import whole_digest
from recycle.runtime.executor import Samples
from recycle.runtime.links import Parcel
from recycle.runtime.stage import Loss
from recycle.runtime.step import MakeOptimizer
from recycle.runtime.worker import Assignment, Finished, LastWords, Settings, Stepped, work


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished job: the mean loss of every step, and one digest of all stages' weights."""

    losses: list[float]
    weights_sha256: str


class WorkerFailed(UserError):
    """A worker could not go on."""


def launch(
    plan: Plan,
    stages: Sequence[nn.Module],
    samples: Samples,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    settings: Settings,
    hear: Callable[[Stepped], None] = lambda event: None,
) -> Trained:
    """Train with a process for every live worker of `plan`; `hear` gets what each worker did in each step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "recycle.runtime.worker"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    parcels = _parcels(stages, samples)
    workers, routes = [row.worker for row in plan.rows], Routes(plan)
    processes: dict[Connection, BaseProcess] = {}
    try:
        for row in plan.rows:
            ear, mouth = context.Pipe(duplex=False)
            module = stages[row.worker.stage]
            shape, port = plan.problem.shape, store.port
            given = Assignment(row, shape, routes, workers, parcels, module, samples, loss, make_optimizer, settings, port)
            process = context.Process(target=work, args=(given, mouth), daemon=True, name=str(row.worker))
            process.start()
            mouth.close()
            processes[ear] = process
        return _follow(processes, settings.num_steps, hear)
    finally:
        for started in processes.values():
            started.terminate()
        for started in processes.values():
            started.join()


def _follow(processes: dict[Connection, BaseProcess], num_steps: int, hear: Callable[[Stepped], None]) -> Trained:
    """Listen to all workers until they are done."""
    losses: list[dict[int, float]] = [{} for _ in range(num_steps)]
    digests: dict[Worker, str] = {}
    ears = set(processes)
    while ears:
        for ear in wait(ears):
            assert isinstance(ear, Connection)
            match _heard(ear):
                case Stepped() as event:
                    losses[event.iteration] |= event.losses
                    hear(event)
                case Finished(worker, digest):
                    digests[worker] = digest
                case LastWords(worker, text):
                    raise WorkerFailed(f"{worker} cannot go on:\n{text}")
                case None if Worker.parse(processes[ear].name) in digests:
                    ears.discard(ear)
                case _:
                    processes[ear].join(5)
                    name, code = processes[ear].name, processes[ear].exitcode
                    raise WorkerFailed(f"{name} ended with exit code {code} and without a word: look at the machine's memory")
    return Trained([fmean(step[chain] for chain in sorted(step)) for step in losses], whole_digest(digests))


def _heard(ear: Connection) -> object:
    try:
        return ear.recv()
    except EOFError:
        return None


def _parcels(stages: Sequence[nn.Module], samples: Samples) -> dict[int, Parcel]:
    """What each stage but the last sends on, found by sending one micro-batch through; the modules are left as they were."""
    made: dict[int, Parcel] = {}
    given: Tensor = samples.get(0, 0, 0)[0]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, module in enumerate(stages[:-1]):
            given = module(given)
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise UserError(f"stage {number} returns no floating-point tensor, so that nothing can be sent on")
            made[number] = Parcel(tuple(given.shape), given.dtype)
    return made
