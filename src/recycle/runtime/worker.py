"""A worker process: it gets its row and its stage, plays iterations, reduces with its peers, steps, and tells what it did."""

import copy
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from recycle.core.cluster import Shape, Worker
from recycle.core.op import Kind, Op
from recycle.core.parent import end_with_parent
from recycle.core.plan import Row, microbatch_of
from recycle.core.routes import Routes
from recycle.runtime.digest import digest
from recycle.runtime.executor import Executor, Samples
from recycle.runtime.gradients import make_sums
from recycle.runtime.links import GlooLinks, Parcel
from recycle.runtime.stage import Loss, Stage
from recycle.runtime.step import MakeOptimizer, Stepper, clip_scale, norm_squared


@dataclass(frozen=True, slots=True)
class Settings:
    """How a job trains, the same for every worker."""

    num_steps: int
    seed: int = 0
    is_exact: bool = False
    max_norm: float | None = None
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker needs to take part: its row, its stage, and where the others are."""

    row: Row
    shape: Shape
    routes: Routes
    workers: Sequence[Worker]
    parcels: Mapping[int, Parcel]
    module: nn.Module
    samples: Samples
    loss: Loss
    make_optimizer: MakeOptimizer
    settings: Settings
    store_port: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker has stepped: its losses by chain (last stage only), and when each op ran, in µs of the machine's clock."""

    worker: Worker
    iteration: int
    losses: dict[int, float]
    spans: list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has done all its steps: the digest of its weights."""

    worker: Worker
    digest: str


@dataclass(frozen=True, slots=True)
class LastWords:
    """A worker cannot go on, and why."""

    worker: Worker
    text: str


def work(assignment: Assignment, tell: Connection) -> None:
    """Train to the end, or say why not. It ends with its parent whatever happens."""
    end_with_parent()
    torch.set_num_threads(1)
    worker = assignment.row.worker
    try:
        _train(assignment, tell)
    except Exception:
        tell.send(LastWords(worker, traceback.format_exc()))
        raise SystemExit(1) from None


def _train(assignment: Assignment, tell: Connection) -> None:
    settings, worker, shape = assignment.settings, assignment.row.worker, assignment.shape
    timeout = timedelta(seconds=settings.timeout_s)
    # Between processes of one machine torch hands tensors over as shared memory: without a copy, peers would step one another's
    # weights. The groups below are complete only when everybody has its own.
    module = copy.deepcopy(assignment.module)
    store = dist.TCPStore("127.0.0.1", assignment.store_port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    links = GlooLinks(store, 0, worker, assignment.workers, assignment.parcels, shape.num_chains, timeout)
    sums = make_sums(module.parameters(), shape.num_chains, settings.is_exact)
    is_last = worker.stage == shape.num_stages - 1
    stage = Stage(module, sums, worker.stage, assignment.loss if is_last else None)
    executor = Executor(assignment.row, shape, assignment.routes, stage, links, assignment.samples, settings.seed)
    stepper = Stepper(stage.parameters(), assignment.make_optimizer)
    for iteration in range(settings.num_steps):
        executor.losses.clear()
        spans = _play(executor, iteration)
        links.add_over_peers(sums.flat())
        means = sums.means(shape.num_chains)
        stepper.step(means, clip_scale(_norms(links, assignment, norm_squared(means)), settings.max_norm))
        sums.clear()
        links.settle(iteration)
        tell.send(Stepped(worker, iteration, dict(executor.losses), spans))
    links.settle(settings.num_steps)
    tell.send(Finished(worker, digest(module)))


def _play(executor: Executor, iteration: int) -> list[tuple[str, int, int]]:
    """Play the row, and return when each op ran."""
    spans, row = [], executor.row
    for letter, chain in zip(row.kinds, row.chains, strict=True):
        kind = Kind(letter)
        begin = time.monotonic_ns() // 1000
        executor.run(iteration, kind, chain)
        op = Op(row.worker.stage, kind, microbatch_of(executor.shape, chain))
        spans.append((str(op), begin, time.monotonic_ns() // 1000))
    return spans


def _norms(links: GlooLinks, assignment: Assignment, own: float) -> list[float]:
    """Every stage's sum of squares: the first live peer of each stage puts in its own, which no addition of zeros changes."""
    norms = torch.zeros(assignment.shape.num_stages, dtype=torch.float64)
    worker = assignment.row.worker
    if worker == next(other for other in assignment.workers if other.stage == worker.stage):
        norms[worker.stage] = own
    links.add_over_all(norms)
    return [float(value) for value in norms]
