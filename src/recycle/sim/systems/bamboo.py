"""Bamboo (NSDI'23): every worker shadows the next stage of its pipeline, and takes it over when its worker is lost.

Assumptions, the peer at its best in time and as it was published in memory:
- Pipelines are half as deep again as the shape's, 12 stages where 8 serve; of N nodes `N // depth` pipelines are made, the rest
  are spares. The successor of the last stage is the first. The global batch is fixed and spread evenly.
- Redundancy: for every micro-batch a worker also runs the forward of the next stage. That is of use only until the backward
  there, so that it fits into two kinds of 1F1B's bubbles: the wait between a worker's first forwards and its first backward,
  which is a forward and a backward of every later stage; and, for the last worker, which shadows the first stage, the wait for
  its first input. What does not fit makes the step longer, by the worst worker's share, since workers do it side by side. With
  M micro-batches for a pipeline,

      step = 1F1B + max over stages of (M * forward of the next stage - its bubbles of use) + finish

  where finish is the reduction and the optimizer of two stages, because a shadow's parameters must stay up to date.
- Memory of a worker: 16 bytes for each parameter of both stages, and the activations of both stages' micro-batches in flight.
  Training is in single precision with Adam, as in Bamboo's public configurations, and attention stores its scores. Step times
  are nevertheless those of the kernels that all systems here have.
- Losing a worker costs the step in flight. Its predecessor takes over (fail-over), and steps take 1.5 times as long until
  pipelines are formed anew (rebalance). That takes `rebalance_us`, and `wants_rebalance` decides it, at once; it is not done
  where it would leave no pipeline. The loss of a spare costs nothing.
- Two neighbours lost, or one who had taken over, is fatal: everybody meets and forms pipelines anew, `fatal_us`. The stage's
  state comes from another pipeline; where there is none, it is assumed to be found elsewhere in that time.
- A node that joins is a spare; a job that waits for nodes starts with a meeting. Nodes beyond the cluster's size are not used.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from recycle.core.cluster import Worker
from recycle.core.profile import Profile
from recycle.core.units import format_bytes
from recycle.planner.profiles.estimate import estimate
from recycle.sim.job import BYTES_PER_PARAMETER, SimulatedJob
from recycle.sim.one_f_one_b import latencies_us, pipeline_us
from recycle.sim.policy import DOWN, Event, Loss, Members, PolicyDecision, Regime, pauses

FATAL_US = 30_000_000
SLOWDOWN = 1.5
# fp32 weight, gradient and Adam's two moments; activations twice as large as in bf16.
_FP32_STATE_BYTES, _FP32_OVER_BF16 = 16, 2
_MOST_OVERLOAD = 0.05

Node = TypeVar("Node", bound=Hashable)


def take_over(pipeline: Sequence[Node], lost: Node) -> tuple[Node, ...] | None:
    """Return who holds which stage after the predecessor took over from `lost`, or None if that is fatal.

    It is fatal if `lost` held two stages, or if the predecessor does, or if there is no other worker.
    """
    shadow = pipeline[pipeline.index(lost) - 1]  # of stage 0 it is the last one
    if pipeline.count(lost) > 1 or pipeline.count(shadow) > 1 or shadow == lost:
        return None
    return tuple(shadow if holder == lost else holder for holder in pipeline)


def wants_rebalance(num_pipelines: int, depth: int, num_overloaded: int, num_spare: int) -> bool:
    """Say whether pipelines are formed anew: spares can relieve all who hold two stages, or too many do, or one more fits."""
    num_active = num_pipelines * depth - num_overloaded
    if num_overloaded and (num_spare >= num_overloaded or 2 * num_overloaded / num_active > _MOST_OVERLOAD):
        return True
    return (num_active + num_spare) // depth > num_pipelines


@dataclass(frozen=True, slots=True)
class PipelineCrew:
    """Who holds which stage of each pipeline, and who is spare. Nodes go by their place in the cluster."""

    pipelines: tuple[tuple[Worker, ...], ...]
    spares: tuple[Worker, ...]

    @staticmethod
    def form(nodes: Sequence[Worker], depth: int) -> "PipelineCrew":
        """Seat the nodes in order, as many whole pipelines as there are."""
        seated = len(nodes) // depth * depth
        pipelines = tuple(tuple(nodes[first : first + depth]) for first in range(0, seated, depth))
        return PipelineCrew(pipelines, tuple(nodes[seated:]))

    @property
    def nodes(self) -> list[Worker]:
        return sorted({node for pipeline in self.pipelines for node in pipeline} | set(self.spares))

    @property
    def num_overloaded(self) -> int:
        return sum(len(pipeline) - len(set(pipeline)) for pipeline in self.pipelines)

    def without(self, node: Worker) -> "PipelineCrew | None":
        """The crew after the loss of `node`; None if that is fatal."""
        if node in self.spares:
            return replace(self, spares=tuple(spare for spare in self.spares if spare != node))
        number, pipeline = next((n, p) for n, p in enumerate(self.pipelines) if node in p)
        after = take_over(pipeline, node)
        if after is None:
            return None
        return replace(self, pipelines=(*self.pipelines[:number], after, *self.pipelines[number + 1 :]))


@dataclass(frozen=True, slots=True)
class Bamboo:
    """State: the crew. `depth` is the number of stages of a pipeline, 1.5 times the shape's if not said."""

    job: SimulatedJob
    rebalance_us: int
    fatal_us: int = FATAL_US
    depth: int | None = None
    name: str = "bamboo"

    @property
    def num_stages(self) -> int:
        if self.depth is not None:
            return self.depth
        half_again = (3 * self.job.shape.num_stages + 1) // 2
        return min(half_again, self.job.model.num_layers)

    @property
    def memory_bytes(self) -> int:
        """What the fullest GPU would hold."""
        return _memory_bytes(self.job, self.num_stages)

    @property
    def is_out_of_memory(self) -> bool:
        return self.memory_bytes > self.job.gpu.memory_bytes

    def begin(self, members: Members) -> PolicyDecision:
        return self._go_on(PipelineCrew.form(sorted(members.live), self.num_stages), members, (), Loss.NOTHING)

    def change(self, event: Event, state: Any) -> PolicyDecision:
        assert isinstance(state, PipelineCrew)
        before = len(state.pipelines)
        crew, is_fatal = _lose(state, event.left)
        crew = replace(crew, spares=(*crew.spares, *event.joined))
        loses = Loss.STEP if crew.pipelines != state.pipelines or is_fatal else Loss.NOTHING
        again = PipelineCrew.form(crew.nodes, self.num_stages)
        if is_fatal or (not before and again.pipelines):
            return self._go_on(again, event.members, (("rendezvous", self.fatal_us),), loses)
        if again.pipelines and wants_rebalance(before, self.num_stages, crew.num_overloaded, len(crew.spares)):
            return self._go_on(again, event.members, (("rebalance", self.rebalance_us),), loses)
        return self._go_on(crew, event.members, (), loses)

    def _go_on(self, crew: PipelineCrew, members: Members, costs: tuple[tuple[str, int], ...], loses: Loss) -> PolicyDecision:
        """Train with this crew after the pauses; without any, those of an earlier change are still sat out."""
        if self.is_out_of_memory:
            needs, has = format_bytes(self.memory_bytes), format_bytes(self.job.gpu.memory_bytes)
            return PolicyDecision(DOWN, reason=f"out of memory: two stages on a GPU take {needs}, but it has {has}", state=crew)
        if not crew.pipelines:
            reason = f"{len(crew.spares)} nodes are too few for {self.num_stages} stages: the job waits"
            return PolicyDecision(DOWN, (), loses, reason, crew)
        reason = f"{len(crew.pipelines)} pipelines, {crew.num_overloaded} workers hold two stages, {len(crew.spares)} spare"
        return PolicyDecision(self._regime(crew, members), pauses(*costs), loses, reason, crew, keeps_unfinished=not costs)

    def _regime(self, crew: PipelineCrew, members: Members) -> Regime:
        num_pipelines = len(crew.pipelines)
        profile = self.job.profile(self.num_stages)
        step_us = step_time_us(profile, -(-self.job.num_microbatches // num_pipelines), num_pipelines)
        step_us = round(step_us * SLOWDOWN) if crew.num_overloaded else step_us
        work_us = self.job.num_microbatches * sum(latencies_us(profile))
        busy_share = min(1.0, work_us / (step_us * members.num_live))
        return Regime(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share)


def _lose(crew: PipelineCrew, left: Sequence[Worker]) -> tuple[PipelineCrew, bool]:
    """The crew after these losses, one after the other, and whether one was fatal: then nobody has a seat any more."""
    for node in left:
        after = crew.without(node)
        if after is None:
            return PipelineCrew((), tuple(other for other in crew.nodes if other not in left)), True
        crew = after
    return crew, False


def step_time_us(profile: Profile, num_microbatches: int, num_pipelines: int) -> int:
    """The time of a step with so many micro-batches for each pipeline: 1F1B, what of the redundancy no bubble hides, finish."""
    num_stages = len(profile.stages)
    successors = [(stage + 1) % num_stages for stage in range(num_stages)]
    latencies = latencies_us(profile)
    bubbles = [sum(latencies[stage + 1 :]) for stage in range(num_stages)]
    bubbles[-1] = sum(stage.forward_us for stage in profile.stages[:-1])
    redundant = [num_microbatches * profile.stages[other].forward_us for other in successors]
    shown_us = max(0, *(work - bubble for work, bubble in zip(redundant, bubbles, strict=True)))
    finish = [profile.reduce_us(stage, num_pipelines) + cost.optimizer_us for stage, cost in enumerate(profile.stages)]
    finish_us = max(finish[stage] + finish[other] for stage, other in enumerate(successors))
    return pipeline_us(profile, num_microbatches) + shown_us + finish_us


@lru_cache(maxsize=64)
def _memory_bytes(job: SimulatedJob, num_stages: int) -> int:
    """What the fullest GPU holds of its own stage and of the next one, each as if it ran that stage in 1F1B."""
    stages = estimate(job.model, job.gpu, num_stages, job.tensor_parallel, flash=False).stages
    held = [
        round(stage.static_bytes * _FP32_STATE_BYTES / BYTES_PER_PARAMETER)
        + stage.activation_bytes * _FP32_OVER_BF16 * min(num_stages - number, job.num_microbatches)
        for number, stage in enumerate(stages)
    ]
    return max(held[stage] + held[(stage + 1) % num_stages] for stage in range(num_stages))
