"""What the runtime's benchmark trains: two trainers in a race, a GPT by a plan, the same GPT by torch alone.

A race is run by the same processes for both sides, in turns: some iterations of one and some of the other, each between two
barriers, so that whatever else the machine does hits both.

Run as a script, it trains for a moment with twelve workers, and prints the seconds before their first op.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.record import Event, Stepped
from recycle.core.plans.row_programs import row_programs
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.profiling.worker_pool import TIMEOUT, MemberContext, worker_pool
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import TrainOptions
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.specs import GroupView, TransportSpec
from recycle.runtime.worker.epoch_setup import make_stage_state, make_trainer, partners_of, worker_program
from recycle.runtime.worker.worker_spec import WorkerSpec

ALL = "adaptive,decoupled,staggered"
COSTS = (10, 13, 9)
SAMPLES, SEED = 2, 1
# Before the clock runs: caches fill, and ReCycle has metered its memory.
WARM_UP = 2
OPTIONS = TrainOptions(SEED)
EXACT = TrainOptions(SEED, is_exact=True)
adamw = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A cluster, and the GPT that it trains."""

    pipelines: int
    stages: int
    microbatches: int
    width: int
    layers: int
    context: int = 128
    shared_layers: int = 0

    def plan(self, dead: str = "", techniques: str = ALL, memory: str | int | None = None) -> recycle.Plan:
        shape = self.pipelines, self.stages, self.microbatches
        problem = recycle.problem(
            *shape,
            fail=dead,
            costs=COSTS,
            memory=memory,
            techniques=techniques,
            layers=self.layers if self.shared_layers else None,
            shared_layers=self.shared_layers,
        )
        return recycle.solve(problem, "greedy")

    def one_f_one_b(self) -> recycle.Plan:
        return self.plan(techniques="none", memory=",".join(map(str, range(self.stages, 0, -1))))

    def gpt(self, dropout: float = 0.0, is_tied: bool = False) -> list[nn.Module]:
        config = GptConfig(
            context=self.context, width=self.width, num_layers=self.layers, dropout=dropout, ties_embeddings=is_tied
        )
        return gpt_stages(config, self.stages, SEED)

    def batches(self) -> MicroBatches:
        return MicroBatches(Text(self.context), recycle.Shape(self.pipelines, self.stages, self.microbatches), SAMPLES, SEED)

    def job(self, plan: recycle.Plan, steps: int = 10**6, options: TrainOptions = OPTIONS, **parts: Any) -> Job:
        """The training job by a plan, by default longer than any race; `parts` replace fields of the job."""
        job = Job(plan, self.gpt(), Text(self.context), next_byte_loss, adamw, steps, SAMPLES, options=options)
        return replace(job, **parts)


@dataclass(frozen=True, slots=True)
class RaceMember:
    """A worker of a race: its spec, its plan, and its group with its own place."""

    spec: WorkerSpec
    plan: recycle.Plan
    view: GroupView

    @property
    def worker(self) -> Worker:
        return self.view.worker


class Runner(Protocol):
    """A side of a race, in one of its workers."""

    def run(self, num_iterations: int) -> None: ...


Entrant = Callable[[RaceMember, Any], Runner]
"""Makes a worker's side of the race from the worker and a store for the rendezvous of that side."""


class Ours:
    """A worker of ReCycle."""

    def __init__(self, member: RaceMember, store: Any) -> None:
        spec, program = member.spec, worker_program(row_programs(member.plan)[member.worker], member.plan.problem.shape)
        transport_spec = TransportSpec(spec.boundaries, spec.shape.num_chains, spec.ties, TIMEOUT)
        view = replace(member.view, partners=partners_of(member.worker, program, {}))
        transport = GlooTransport(store, view, transport_spec)
        self._state = make_stage_state(spec, member.worker.stage)
        self._state.stage.meter = ActivationMeter(self._state.stage.module)
        self._trainer = make_trainer(spec, program, view, self._state, transport)

    def run(self, num_iterations: int) -> None:
        if not self._trainer.train(self._state.num_steps + num_iterations, lambda *report: None):
            raise RuntimeError("a worker paused, though nobody asked it to")


def ours_exact(member: RaceMember, store: Any) -> Ours:
    spec = replace(member.spec, options=replace(member.spec.options, is_exact=True))
    return Ours(replace(member, spec=spec), store)


class Theirs:
    """The same worker by torch.distributed.pipelining's 1F1B, with plain data parallelism around it."""

    def __init__(self, member: RaceMember, store: Any) -> None:
        # Here, because only races need it, and it takes a second to load.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        worker, shape = member.worker, member.spec.shape
        ranks = [[p * shape.num_stages + s for s in range(shape.num_stages)] for p in range(shape.num_pipelines)]
        pipelines = [dist.new_group(own) for own in ranks]
        peers = [dist.new_group(list(own)) for own in zip(*ranks, strict=True)]
        self._member, self._peers, self._num_peers = member, peers[worker.stage], shape.num_pipelines
        module = member.spec.make_stage(worker.stage)
        self._parameters: list[Tensor] = list(module.parameters())
        stage = PipelineStage(module, worker.stage, shape.num_stages, torch.device("cpu"), group=pipelines[worker.pipeline])
        self._schedule = Schedule1F1B(stage, shape.num_microbatches, loss_fn=next_byte_loss)
        self._optimizer = member.spec.make_optimizer(self._parameters)
        self._done = 0

    def run(self, num_iterations: int) -> None:
        for _ in range(num_iterations):
            self._step()
            self._done += 1

    def _step(self) -> None:
        worker, shape = self._member.worker, self._member.spec.shape
        is_first, is_last = worker.stage == 0, worker.stage == shape.num_stages - 1
        inputs, targets = self._data() if is_first or is_last else (None, None)
        losses: list[Tensor] = []
        arguments: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        self._schedule.step(*([inputs] if is_first else []), **arguments)
        if self._num_peers > 1:
            self._reduce()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _reduce(self) -> None:
        """Replace gradients by their mean over the peers, in one go."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters if parameter.grad is not None])
        dist.all_reduce(flat, group=self._peers)
        flat /= self._num_peers
        for parameter, part in zip(self._parameters, torch.split(flat, [own.numel() for own in self._parameters]), strict=True):
            parameter.grad = part.view(parameter.shape)

    def _data(self) -> tuple[Tensor, Tensor]:
        spec, pipeline = self._member.spec, self._member.worker.pipeline
        parts = [spec.microbatches.get(self._done, pipeline, index) for index in range(spec.shape.num_microbatches)]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


class _Racer:
    """One worker of a race, on every side of it."""

    def __init__(self, spec: WorkerSpec, plan: recycle.Plan, entrants: Sequence[Entrant], station: MemberContext) -> None:
        store, size = station.store, len(station.workers)
        dist.init_process_group("gloo", store=PrefixStore("all", store), rank=station.rank, world_size=size, timeout=TIMEOUT)
        member = RaceMember(spec, plan, GroupView(station.worker, station.workers))
        self._runners = [enter(member, PrefixStore(str(number), store)) for number, enter in enumerate(entrants)]
        for runner in self._runners:
            runner.run(WARM_UP)

    def answer(self, num_iterations: int) -> list[float]:
        """The seconds of an iteration of each side."""
        return [_timed_s(runner, num_iterations) for runner in self._runners]


def race(job: Job, entrants: Sequence[Entrant], num_rounds: int, num_iterations: int) -> list[list[float]]:
    """Return the seconds of an iteration of each entrant, round by round. Nobody must be dead in the job's plan."""
    assert isinstance(job.plan, recycle.Plan)
    spec, workers = worker_spec(job), [row.worker for row in job.plan.rows]
    with worker_pool(workers, partial(_Racer, spec, job.plan, entrants), ["torch.distributed.pipelining"]) as pool:
        return [pool.ask(num_iterations)[workers[0]] for _ in range(num_rounds)]


def _timed_s(runner: Runner, num_iterations: int) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    runner.run(num_iterations)
    dist.barrier()
    return (time.perf_counter() - start_s) / num_iterations


def alone(
    sizes: Sizes, num_steps: int, is_reversed: bool = False, first_weight: float = 1.0, model: nn.Module | None = None
) -> list[float]:
    """The loss of every step by torch alone: one process, one model, the same micro-batches, the last first if reversed.

    The gradient of the first micro-batch counts `first_weight` times, which should be once. A model that is given is trained.
    """
    torch.set_num_threads(1)  # as every worker has: sums inside an op depend on it
    model, batches = nn.Sequential(*sizes.gpt()) if model is None else model, sizes.batches()
    optimizer = adamw(model.parameters())
    chains = [(pipeline, index) for pipeline in range(sizes.pipelines) for index in range(sizes.microbatches)]
    losses = []
    for step in range(num_steps):
        own = {}
        for chain in reversed(chains) if is_reversed else chains:
            inputs, targets = batches.get(step, *chain)
            loss = next_byte_loss(model(inputs), targets)
            torch.autograd.backward([loss * (first_weight if chain == chains[0] else 1.0) / len(chains)])
            own[chain] = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fmean(own[chain] for chain in chains))
    return losses


class Bursting:
    """Text of which one sample has targets that no byte is: `bursting_loss` makes infinite gradients from it."""

    def __init__(self, context: int, at: int) -> None:
        self._text, self._at = Text(context), at

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._text[number]
        return inputs, -1 - targets if number == self._at else targets


def bursting_loss(logits: Tensor, targets: Tensor) -> Tensor:
    is_burst = targets < 0
    loss = next_byte_loss(logits, torch.where(is_burst, -1 - targets, targets))
    return loss * (torch.inf if is_burst.any() else 1.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The weights of a run, and what became of its steps."""

    weights_sha256: str
    num_clipped: int
    num_skipped: int
    num_begun_again: int


def outcome(sizes: Sizes, plan: recycle.Plan, steps: int, options: TrainOptions = EXACT, **parts: Any) -> Outcome:
    """Train with a process for every live worker, in exact mode; `parts` replace fields of the job."""
    scales: list[float | None] = []

    def watch(event: Event) -> None:
        if isinstance(event, Stepped):
            scales.append(event.scale)

    trained = launch(sizes.job(plan, steps, options, **parts), watch)
    clipped = sum(scale is not None and scale < 1 for scale in scales)
    return Outcome(trained.weights_sha256, clipped, scales.count(None), trained.num_begun_again)


TWELVE = Sizes(3, 4, 6, 64, 8, context=64)


def start_s() -> float:
    """From calling recycle.train to the first op of twelve workers, in a process that has started none before."""
    with _process(sys.executable, __file__, stdout=subprocess.PIPE) as process:
        printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"training with twelve workers ended with exit code {process.returncode}")
    return float(printed)


def command_s() -> float:
    """From starting `recycle train` with twelve workers to the line that says that its first step is done."""
    cluster = ("--pipelines", TWELVE.pipelines, "--stages", TWELVE.stages, "--microbatches", TWELVE.microbatches)
    model = ("--width", TWELVE.width, "--layers", TWELVE.layers, "--context", TWELVE.context, "--samples", SAMPLES)
    words = map(str, (sys.executable, "-m", "recycle", "train", *cluster, *model, "--steps", 1))
    began_s, lines = time.perf_counter(), []
    with _process(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 1 of 1"):
                seconds = time.perf_counter() - began_s
                process.communicate()  # let it end by itself
                return seconds
            lines.append(line)
    raise RuntimeError(f"recycle train ended before its first step:\n{''.join(lines)}")


@contextmanager
def _process(*words: str, **streams: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that is gone when the context is left, however it is left."""
    # In a group of its own, a Ctrl-C at the terminal reaches this process alone, which ends the other.
    process = subprocess.Popen(words, text=True, process_group=0, **streams)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    print(launch(TWELVE.job(TWELVE.plan(), 1)).start_us / 1e6)
