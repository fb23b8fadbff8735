"""The sides of a race: ReCycle by some plan, or one of the schedules of torch.distributed.pipelining."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.torch_contender import TorchSide
from recycle.profiling.plan_runner import Played, Player
from recycle.profiling.worker_pool import Station
from recycle.runtime.transport.gloo import Parcel
from recycle.runtime.worker.worker_spec import CopiedStages, Kit, kit_of


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
        self._torch: TorchSide | None = None
        prefix = dist.PrefixStore("race", station.store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=prefix, rank=station.rank, world_size=len(station.workers))

    def answer(self, turn: Turn) -> Ran:
        """Wait until all are there, and take part."""
        seat = turn.seat(self._station.worker)
        dist.barrier()
        if seat is None:
            return Ran()
        if turn.plan is None:
            self._torch = self._torch or TorchSide(self._setup, self._parcels, self._station)
            return Ran(*self._torch.run(turn.number, turn.side, turn.num_iterations))
        played = Player(self._kit(turn.plan), self._station.store).play(turn.number, turn.plan, seat, turn.num_iterations)
        return Ran([spans[-1].end_us for spans in played.spans], played.losses, played)

    def _kit(self, plan: Plan) -> Kit:
        shape = plan.problem.shape
        if shape not in self._kits:
            self._kits[shape] = kit_of(self._setup.job(plan), self._stages, self._parcels)
        return self._kits[shape]
