"""The sides of a race: ReCycle by some plan, or one of the schedules of torch.distributed.pipelining."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.torch_contender import TorchContender
from recycle.profiling.plan_runner import PlanRun, PlanRunner
from recycle.profiling.worker_pool import Station
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.transport.gloo import TensorSpec
from recycle.runtime.worker.worker_spec import CopiedStages, WorkerSpec


@dataclass(frozen=True, slots=True)
class ContenderTurn:
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
class TurnResult:
    """What a worker did in a turn: when it ended each iteration, the mean losses at a last stage, and its spans if it has any."""

    ends_us: Sequence[int] = ()
    losses: Sequence[float] = ()
    played: PlanRun = field(default_factory=PlanRun)


class Contender:
    """A member of the crew, that takes every side in turn."""

    def __init__(self, setup: Setup, parcels: dict[int, TensorSpec], station: Station) -> None:
        self._setup, self._parcels, self._station = setup, parcels, station
        self._stages = CopiedStages(setup.modules())
        self._kits: dict[Shape, WorkerSpec] = {}
        self._torch: TorchContender | None = None
        prefix = dist.PrefixStore("race", station.store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=prefix, rank=station.rank, world_size=len(station.workers))

    def answer(self, turn: ContenderTurn) -> TurnResult:
        """Wait until all are there, and take part."""
        seat = turn.seat(self._station.worker)
        dist.barrier()
        if seat is None:
            return TurnResult()
        if turn.plan is None:
            self._torch = self._torch or TorchContender(self._setup, self._parcels, self._station)
            return TurnResult(*self._torch.run(turn.number, turn.side, turn.num_iterations))
        played = PlanRunner(self._kit(turn.plan), self._station.store).play(turn.number, turn.plan, seat, turn.num_iterations)
        return TurnResult([spans[-1].end_us for spans in played.spans], played.losses, played)

    def _kit(self, plan: Plan) -> WorkerSpec:
        shape = plan.problem.shape
        if shape not in self._kits:
            self._kits[shape] = worker_spec(self._setup.job(plan), self._stages, self._parcels)
        return self._kits[shape]
