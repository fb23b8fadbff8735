"""A worker process: it gets its turns and its stage, plays iterations, reduces with its peers, steps, and tells what it did."""

import os
import pickle
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.parent import end_with_parent
from recycle.runtime.checkpoint import Checkpoint, StageNotSaved, StageSaved, StageWriter, load_stage
from recycle.runtime.digest import digest
from recycle.runtime.executor import Executor, Samples, Span, now_us
from recycle.runtime.gradients import make_sums
from recycle.runtime.job import Saving, Settings
from recycle.runtime.links import Address, GlooLinks, Parcel
from recycle.runtime.memory import Meter
from recycle.runtime.nccl_links import NcclLinks
from recycle.runtime.stage import Loss, Stage
from recycle.runtime.step import MakeOptimizer, Schedule, Stepper, Verdict
from recycle.runtime.ties import Tie
from recycle.runtime.trainer import Trainer
from recycle.runtime.turns import Turn


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one worker needs to take part: its turns, its stage, and where the others are."""

    address: Address
    shape: Shape
    turns: Sequence[Turn]
    warm_up: int
    is_staggered: bool
    parcels: Mapping[int, Parcel]
    ties: Sequence[Tie]
    module: nn.Module
    samples: Samples
    loss: Loss
    make_optimizer: MakeOptimizer
    schedule: Schedule
    settings: Settings
    store_port: int
    saving: Saving | None = None
    resumed: Checkpoint | None = None

    @property
    def worker(self) -> Worker:
        return self.address.worker


@dataclass(frozen=True, slots=True)
class Applied:
    """A worker has applied an iteration for good: its losses by chain (last stage only), its spans, the verdict."""

    worker: Worker
    iteration: int
    losses: Mapping[int, float]
    spans: Sequence[Span]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has done all its steps: the digest of its weights, and what it held at most."""

    worker: Worker
    digest: str
    peak_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class LastWords:
    """A worker cannot go on, and why: the error itself if it is one of the user's."""

    worker: Worker
    at_us: int
    text: str
    problem: UserError | None


Told = Applied | Finished | LastWords | StageSaved | StageNotSaved


def work(name: str, packed: bytes, mouth: Connection) -> None:
    """Train by a packed assignment to the end, or say why not. It ends with its parent whatever happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells everybody; the launcher ends its workers
    end_with_parent()
    torch.set_num_threads(1)
    lock = Lock()

    def tell(told: Told) -> None:
        with lock:  # checkpoints are told of by the thread that writes them
            mouth.send(told)

    try:
        _train(pickle.loads(packed), tell)
    except UserError as problem:
        tell(LastWords(Worker.parse(name), now_us(), str(problem), problem))
        raise SystemExit(1) from None
    except Exception:
        tell(LastWords(Worker.parse(name), now_us(), traceback.format_exc(), None))
        raise SystemExit(1) from None


def _train(given: Assignment, tell: Callable[[Told], None]) -> None:
    settings, worker = given.settings, given.worker
    timeout = timedelta(seconds=settings.timeout_s)
    device = _device(given)
    module = given.module.to(device)
    store = dist.TCPStore("127.0.0.1", given.store_port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    common = store, given.address, given.parcels, given.shape.num_chains, given.ties, timeout
    links = NcclLinks(*common, given.turns, device) if _has_own_gpu(given) else GlooLinks(*common)
    trainer = make_trainer(given, module, links, device)
    writer = StageWriter(given.saving.folder, worker.stage, tell) if given.saving and given.address.is_first_peer else None
    first = 0
    if given.resumed is not None:
        load_stage(given.resumed, worker.stage, module, trainer.stepper.optimizer)
        first = given.resumed.num_steps

    def applied(iteration: int, losses: Mapping[int, float], spans: Sequence[Span], verdict: Verdict) -> None:
        tell(Applied(worker, iteration, losses, spans, verdict))
        if writer is not None and given.saving is not None and given.saving.is_due(iteration + 1, settings.num_steps):
            writer.save(iteration + 1, module, trainer.stepper.optimizer, is_last=iteration + 1 == settings.num_steps)

    trainer.train(first, settings.num_steps, applied)
    if writer is not None:
        writer.wait()
    tell(Finished(worker, digest(module), _peak_bytes(settings.device), trainer.activation_bytes))


def make_trainer(given: Assignment, module: nn.Module, links: GlooLinks, device: torch.device | None = None) -> Trainer:
    """The trainer of a worker, with its own copy of the module on `device`, and its links."""
    settings, worker, shape = given.settings, given.worker, given.shape
    sums = make_sums(module.parameters(), shape.num_chains, settings.is_exact, settings.sum_dtype, device)
    loss = given.loss if worker.stage == shape.num_stages - 1 else None
    stage = Stage(module, sums, worker.stage, loss, Meter(module), settings.autocast, device)
    executor = Executor(worker, given.turns, shape.num_stages, stage, links, given.samples, settings.seed)
    stepper = Stepper(stage.parameters(), given.make_optimizer, given.schedule)
    return Trainer(
        executor, links, stepper, given.address, shape, given.ties, given.warm_up, given.is_staggered, settings.max_norm
    )


def _device(given: Assignment) -> torch.device:
    """Where the worker computes. Workers share the GPUs that there are; a sum is exact only if every kernel is repeatable."""
    if given.settings.device != "cuda":
        return torch.device(given.settings.device)
    if given.settings.is_exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    # autograd's own thread has no context at first, makes one, and says so.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    device = torch.device("cuda", given.address.workers.index(given.worker) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _has_own_gpu(given: Assignment) -> bool:
    """NCCL refuses two workers on one GPU."""
    return given.settings.device == "cuda" and 1 < len(given.address.workers) <= torch.cuda.device_count()


def _peak_bytes(device: str) -> int:
    """What the process held at most: of the GPU's memory, or of the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * 1024
