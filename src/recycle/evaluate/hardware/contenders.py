"""Contender: a member of the race's worker pool, which trains by a plan of ReCycle or by a schedule of torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import nn

from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.evaluate.hardware.setup import Setup, layers_of_stages
from recycle.evaluate.hardware.torch_contender import TorchContender
from recycle.profiling.plan_runner import PlanRun, PlanRunner
from recycle.profiling.worker_pool import MemberContext
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.compute.stage_bytes import return_gpu_memory
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.worker.worker_spec import WorkerSpec, copied_stage


@dataclass(frozen=True, slots=True)
class ContenderTurn:
    """The request to train for some iterations: by a plan, or without one by torch's schedule of that name.

    The first pipeline of the plan is run by the first of `pipelines`, and so on. `speeds` are those of workers that are slowed.
    `layers` are those of each stage of torch's schedule; by default they are balanced by FLOPs.
    """

    number: int
    variant: str
    num_iterations: int
    plan: Plan | None = None
    pipelines: Sequence[int] = ()
    speeds: tuple[tuple[Worker, float], ...] = ()
    layers: tuple[int, ...] = ()

    def place(self, worker: Worker) -> Worker | None:
        """The place of a worker of the pool in the plan, if it takes part."""
        if worker.pipeline not in self.pipelines:
            return None
        place = Worker(self.pipelines.index(worker.pipeline), worker.stage)
        return place if self.plan is None or self.plan.problem.cluster.is_live(place) else None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """A worker's turn: the end of each iteration, the mean losses at a last stage, and its run if it was by a plan."""

    ends_us: Sequence[int] = ()
    losses: Sequence[float] = ()
    run: PlanRun = field(default_factory=PlanRun)


class Contender:
    """A member of the pool, which trains by every variant in turn."""

    def __init__(self, setup: Setup, boundaries: dict[int, BoundarySpec], context: MemberContext) -> None:
        self._setup, self._boundaries, self._context = setup, boundaries, context
        self._modules: dict[tuple[int, ...] | None, list[nn.Module]] = {}
        self._specs: dict[tuple[Shape, int, tuple[int, ...] | None], WorkerSpec] = {}
        self._torch: TorchContender | None = None
        prefix = dist.PrefixStore("race", context.store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=prefix, rank=context.rank, world_size=len(context.workers))

    def answer(self, turn: ContenderTurn) -> TurnResult:
        """Wait until all members are ready, and train if this worker takes part."""
        return_gpu_memory()  # what the variant before this one used
        place = turn.place(self._context.worker)
        dist.barrier()
        if place is None:
            return TurnResult()
        if turn.plan is None:
            self._torch = self._torch or TorchContender(self._setup, self._boundaries, self._context)
            return TurnResult(*self._torch.run(turn.number, turn.variant, turn.num_iterations, turn.layers))
        runner, speed = PlanRunner(self._spec(turn.plan), self._context, self._setup.emulated), dict(turn.speeds).get(place, 1.0)
        run = runner.run(turn.number, turn.plan, turn.num_iterations, place, speed)
        return TurnResult([spans[-1].end_us for spans in run.spans], run.losses, run)

    def _spec(self, plan: Plan) -> WorkerSpec:
        layers = layers_of_stages(plan)
        key = plan.problem.shape, plan.problem.shared_layers, layers
        if key not in self._specs:
            make_stage = None if plan.problem.shared_layers else partial(self._copy, layers)
            self._specs[key] = worker_spec(self._setup.job(plan), make_stage, self._boundaries)
        return self._specs[key]

    def _copy(self, layers: tuple[int, ...] | None, number: int) -> nn.Module:
        """A copy of a stage; plans of all shapes share the originals."""
        if layers not in self._modules:
            self._modules[layers] = self._setup.modules(layers=layers)
        return copied_stage(self._modules[layers], number)
