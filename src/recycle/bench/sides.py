"""The sides of a race: ReCycle by some plan, or one of the schedules of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from recycle.bench.setup import SEED, Setup, make_optimizer
from recycle.core.cluster import Shape, Worker
from recycle.core.plan import Plan
from recycle.runtime.batches import Batches
from recycle.runtime.crew import Station
from recycle.runtime.executor import now_us
from recycle.runtime.kit import CopiedStages, Kit, kit_of
from recycle.runtime.links import Parcel
from recycle.runtime.player import Played, Player

TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV = "torch-1f1b", "torch-zero-bubble", "torch-zbv"
TORCH = (TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV)


@dataclass(frozen=True, slots=True)
class Turn:
    """The question to train for some iterations: by a plan, or without one by torch's schedule of that name.

    A plan of fewer pipelines is played by the first of those that `pipelines` names, and so on.
    """

    number: int
    side: str
    num_iterations: int
    plan: Plan | None = None
    pipelines: Sequence[int] = ()

    def seat(self, worker: Worker) -> Worker | None:
        """Where a worker sits in this turn, if it takes part."""
        if worker.pipeline not in self.pipelines:
            return None
        seat = Worker(self.pipelines.index(worker.pipeline), worker.stage)
        return seat if self.plan is None or self.plan.problem.cluster.is_live(seat) else None


@dataclass(frozen=True, slots=True)
class Ran:
    """What a worker did in a turn: when it ended each iteration, the mean losses at a last stage, and its spans if it has any."""

    ends_us: Sequence[int] = ()
    losses: Sequence[float] = ()
    played: Played = field(default_factory=Played)


class Racer:
    """A member of the crew, that takes every side in turn."""

    def __init__(self, setup: Setup, parcels: dict[int, Parcel], station: Station) -> None:
        self._setup, self._parcels, self._station = setup, parcels, station
        self._stages = CopiedStages(setup.modules())
        self._kits: dict[Shape, Kit] = {}
        self._torch: _Torch | None = None
        prefix = dist.PrefixStore("race", station.store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=prefix, rank=station.rank, world_size=len(station.workers))

    def answer(self, turn: Turn) -> Ran:
        """Wait until all are there, and take part."""
        seat = turn.seat(self._station.worker)
        dist.barrier()
        if seat is None:
            return Ran()
        if turn.plan is None:
            self._torch = self._torch or _Torch(self._setup, self._station)
            return self._torch.run(turn)
        played = Player(self._kit(turn.plan), self._station.store).play(turn.number, turn.plan, seat, turn.num_iterations)
        return Ran([spans[-1].end_us for spans in played.spans], played.losses, played)

    def _kit(self, plan: Plan) -> Kit:
        shape = plan.problem.shape
        if shape not in self._kits:
            self._kits[shape] = kit_of(self._setup.job(plan), self._stages, self._parcels)
        return self._kits[shape]


def make_racer(setup: Setup, parcels: dict[int, Parcel], station: Station) -> Racer:
    return Racer(setup, parcels, station)


class _Torch:
    """A worker by torch's schedules, with plain data parallelism around them: one all-reduce, then the step."""

    def __init__(self, setup: Setup, station: Station) -> None:
        self._setup, self._worker, shape = setup, station.worker, setup.shape
        self._stages: dict[int, CopiedStages] = {}
        ranks = [[p * shape.num_stages + s for s in range(shape.num_stages)] for p in range(shape.num_pipelines)]
        self._pipeline = [dist.new_group(own) for own in ranks][station.worker.pipeline]
        self._peers = [dist.new_group(list(own)) for own in zip(*ranks, strict=True)][station.worker.stage]

    def run(self, turn: Turn) -> Ran:
        setup, shape, worker = self._setup, self._setup.shape, self._worker
        batches = Batches(setup.text(), shape, setup.samples, SEED)
        schedule, modules = self._schedule(turn.side)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = make_optimizer(parameters)
        has_last = worker.stage == 0 if turn.side == TORCH_ZBV else worker.stage == shape.num_stages - 1
        ends_us: list[int] = []
        losses: list[float] = []
        for iteration in range(turn.num_iterations):
            parts = [batches.get(iteration, worker.pipeline, index) for index in range(shape.num_microbatches)]
            inputs = [torch.cat([x for x, _ in parts])] if worker.stage == 0 else []
            own: list[Tensor] = []
            given: dict[str, Any] = {"target": torch.cat([y for _, y in parts]), "losses": own} if has_last else {}
            schedule.step(*inputs, **given)
            self._reduce(parameters)
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(torch.stack(own).detach().mean())] if own else []
            ends_us.append(_done_us(setup))
        return Ran(ends_us, losses)

    def _schedule(self, side: str) -> tuple[Any, list[nn.Module]]:
        # Here, because nobody else needs them, and they take a second to load.
        from torch.distributed.pipelining import PipelineStage, schedules

        class Stage(PipelineStage):
            """A stage that does not greet its neighbours first: in a V one of them is itself, which gloo refuses."""

            def _get_init_p2p_neighbors_ops(self) -> list[Any]:
                return []

        shape, stage = self._setup.shape, self._worker.stage
        num_stages = shape.num_stages * (2 if side == TORCH_ZBV else 1)
        numbers = [stage, num_stages - 1 - stage] if side == TORCH_ZBV else [stage]
        hosted = [_Hosted(self._module(num_stages, number), number == num_stages - 1) for number in numbers]
        stages = [
            Stage(module, number, num_stages, torch.device("cpu"), group=self._pipeline)
            for module, number in zip(hosted, numbers, strict=True)
        ]
        if side == TORCH_1F1B:
            return schedules.Schedule1F1B(stages[0], shape.num_microbatches, loss_fn=_loss), list(hosted)
        kind: Callable[..., Any] = (
            schedules.ScheduleZBVZeroBubble if side == TORCH_ZBV else schedules.ScheduleInterleavedZeroBubble
        )
        return kind(stages, shape.num_microbatches, loss_fn=_loss), list(hosted)

    def _module(self, num_stages: int, number: int) -> nn.Module:
        """A stage as it is before the first step, where it computes."""
        if num_stages not in self._stages:
            self._stages[num_stages] = CopiedStages(self._setup.modules(num_stages))
        return self._stages[num_stages].make(number).to(self._setup.device)

    def _reduce(self, parameters: Sequence[Tensor]) -> None:
        """Replace gradients by their mean over the peers, in one go."""
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        host = flat.cpu().float()
        dist.all_reduce(host, group=self._peers)
        flat.copy_(host / self._setup.pipelines)
        parts = torch.split(flat, [own.numel() for own in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)


class _Hosted(nn.Module):
    """A stage whose messages are in the host's memory, where gloo finds them, wherever it computes."""

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.module, self._is_last = module, is_last
        self._device = next(module.parameters()).device

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = self.module(given.to(self._device))
        return made if self._is_last else made.cpu()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.to(logits.device).flatten())


def _done_us(setup: Setup) -> int:
    if setup.is_gpu:
        torch.cuda.synchronize()
    return now_us()
