"""Bamboo (NSDI'23): every worker also holds the next stage of its pipeline, and takes it over when that worker is lost.

Assumptions, in favour of Bamboo in time, and as published in memory:
- Pipelines are 1.5 times as deep as the shape's (12 stages instead of 8). N nodes form `N // depth` pipelines; the rest are
  spares. The successor of the last stage is the first. The global batch is fixed and spread evenly.
- Redundancy: for every micro-batch a worker also runs the forward of the next stage, which must precede the backward there. So it
  fits into two kinds of bubbles of 1F1B: the wait between a worker's first forwards and its first backward, which is a forward
  and a backward of every later stage; and, for the last worker, whose successor is stage 0, the wait for its first input. The
  rest lengthens the step, by the share of the worst worker, since all workers do it in parallel. With M micro-batches for a
  pipeline,

      step = 1F1B + max over stages of (M * forward of the next stage - its usable bubbles) + finish

  where finish is the reduction and the optimizer of two stages, because the second stage's parameters must stay up to date.
- Memory of a worker: 16 bytes for each parameter of both stages, and the activations of both stages' micro-batches in flight.
  Training is in fp32 with Adam, as in Bamboo's public configurations, and attention stores its scores. Step times are
  nevertheless those of the kernels that all systems here have.
- The predecessor of a lost worker takes over (fail-over) within the step in flight. The rest of that step, and later steps, take
  1.5 times as long until pipelines are formed again (rebalance), in `rebalance_us`. `wants_rebalance` decides at once whether
  that follows the step; it is not done if no pipeline would be left. The loss of a spare costs nothing.
- The loss of two neighbours, or of a worker that had taken over, is fatal: all nodes form pipelines again in a rendezvous of
  `fatal_us`, and the step in flight is lost. The state of the stage comes from another pipeline; without one, it is assumed to
  be found elsewhere in that time.
- A node that joins is a spare; a job that waits for nodes starts with a rendezvous. Nodes beyond the cluster's size are not used.
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
from recycle.sim.measured_model import MeasuredDevice, MeasuredModel
from recycle.sim.one_f_one_b import latencies_us, pipeline_us
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses

SLOWDOWN = 1.5
# fp32 weight, gradient and Adam's two moments; activations twice as large as in bf16.
_FP32_STATE_BYTES, _FP32_OVER_BF16 = 16, 2
_MOST_OVERLOAD = 0.05

Node = TypeVar("Node", bound=Hashable)


def take_over(pipeline: Sequence[Node], lost: Node) -> tuple[Node, ...] | None:
    """Return the holder of each stage after the predecessor took over from `lost`, or None if the loss is fatal.

    It is fatal if `lost` held two stages, if the predecessor does, or if there is no other worker.
    """
    predecessor = pipeline[pipeline.index(lost) - 1]  # of stage 0: the last stage
    if pipeline.count(lost) > 1 or pipeline.count(predecessor) > 1 or predecessor == lost:
        return None
    return tuple(predecessor if holder == lost else holder for holder in pipeline)


def wants_rebalance(num_pipelines: int, depth: int, num_overloaded: int, num_spare: int) -> bool:
    """Whether pipelines are formed again: spares can relieve all overloaded workers, too many are, or one more pipeline fits."""
    num_active = num_pipelines * depth - num_overloaded
    if num_overloaded and (num_spare >= num_overloaded or 2 * num_overloaded / num_active > _MOST_OVERLOAD):
        return True
    return (num_active + num_spare) // depth > num_pipelines


@dataclass(frozen=True, slots=True)
class BambooLayout:
    """The holder of each stage of each pipeline, and the spares. A node is named by its place in the cluster."""

    pipelines: tuple[tuple[Worker, ...], ...]
    spares: tuple[Worker, ...]

    @staticmethod
    def form(nodes: Sequence[Worker], depth: int) -> "BambooLayout":
        """Form as many complete pipelines as possible, with the nodes in order."""
        num_used = len(nodes) // depth * depth
        pipelines = tuple(tuple(nodes[first : first + depth]) for first in range(0, num_used, depth))
        return BambooLayout(pipelines, tuple(nodes[num_used:]))

    @property
    def nodes(self) -> list[Worker]:
        return sorted({node for pipeline in self.pipelines for node in pipeline} | set(self.spares))

    @property
    def num_overloaded(self) -> int:
        return sum(len(pipeline) - len(set(pipeline)) for pipeline in self.pipelines)

    def without(self, node: Worker) -> "BambooLayout | None":
        """The layout after the loss of `node`; None if the loss is fatal."""
        if node in self.spares:
            return replace(self, spares=tuple(spare for spare in self.spares if spare != node))
        number, pipeline = next((n, p) for n, p in enumerate(self.pipelines) if node in p)
        after = take_over(pipeline, node)
        if after is None:
            return None
        return replace(self, pipelines=(*self.pipelines[:number], after, *self.pipelines[number + 1 :]))


@dataclass(frozen=True, slots=True)
class Bamboo:
    """The policy; its state is the layout. `depth` is the number of stages of a pipeline (default: 1.5 times the shape's)."""

    job: SimulatedJob
    rebalance_us: int
    fatal_us: int
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
        return _memory_bytes(self.job, self.num_stages)

    @property
    def is_out_of_memory(self) -> bool:
        return self.memory_bytes > self.job.gpu.memory_bytes

    def begin(self, members: Members) -> PolicyDecision:
        nodes = sorted(members.live, key=lambda node: (node.pipeline, node.stage))  # as workers are ordered, but faster
        return self._decide(BambooLayout.form(nodes, self.num_stages), members, (), Loss.NOTHING)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, BambooLayout)
        before = len(state.pipelines)
        layout, is_fatal = _lose(state, event.left)
        layout = replace(layout, spares=(*layout.spares, *event.joined))
        loses = Loss.STEP if is_fatal else Loss.NOTHING
        again = BambooLayout.form(layout.nodes, self.num_stages)
        if is_fatal or (not before and again.pipelines):
            return self._decide(again, event.members, (("rendezvous", self.fatal_us),), loses)
        slows = SLOWDOWN if layout.num_overloaded else 1.0
        if again.pipelines and wants_rebalance(before, self.num_stages, layout.num_overloaded, len(layout.spares)):
            rebalanced = self._decide(again, event.members, (("rebalance", self.rebalance_us),), loses)
            return replace(rebalanced, slows_step=slows)
        return replace(self._decide(layout, event.members, (), loses), slows_step=slows)

    def _decide(self, layout: BambooLayout, members: Members, costs: tuple[tuple[str, int], ...], loses: Loss) -> PolicyDecision:
        """Train with this layout after the pauses; without any, the rest of earlier pauses remains."""
        if self.is_out_of_memory:
            needs, has = format_bytes(self.memory_bytes), format_bytes(self.job.gpu.memory_bytes)
            return PolicyDecision(DOWN, reason=f"out of memory: two stages on a GPU take {needs}, but it has {has}", state=layout)
        if not layout.pipelines:
            reason = f"{len(layout.spares)} nodes are too few for {self.num_stages} stages: the job waits"
            return PolicyDecision(DOWN, (), loses, reason, layout)
        reason = f"{len(layout.pipelines)} pipelines, {layout.num_overloaded} workers hold two stages, {len(layout.spares)} spare"
        return PolicyDecision(
            self._steady_state(layout, members), pauses(*costs), loses, reason, layout, keeps_unfinished=not costs
        )

    def _steady_state(self, layout: BambooLayout, members: Members) -> SteadyState:
        num_pipelines = len(layout.pipelines)
        profile = self.job.profile(self.num_stages)
        step_us = step_time_us(profile, -(-self.job.num_microbatches // num_pipelines), num_pipelines)
        slowdown = SLOWDOWN if layout.num_overloaded else 1.0
        step_us = round(step_us * slowdown)
        work_us = self.job.num_microbatches * sum(latencies_us(profile))
        busy_share = min(1.0, work_us / (step_us * members.num_live))
        return SteadyState(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share, slowdown=slowdown)


def _lose(layout: BambooLayout, left: Sequence[Worker]) -> tuple[BambooLayout, bool]:
    """The layout after these losses, and whether one was fatal: then all nodes are spares."""
    for node in left:
        after = layout.without(node)
        if after is None:
            return BambooLayout((), tuple(other for other in layout.nodes if other not in left)), True
        layout = after
    return layout, False


def step_time_us(profile: Profile, num_microbatches: int, num_pipelines: int) -> int:
    """The time of a step with so many micro-batches a pipeline: 1F1B, the redundant work outside bubbles, and finish."""
    num_stages = len(profile.stages)
    successors = [(stage + 1) % num_stages for stage in range(num_stages)]
    latencies = latencies_us(profile)
    bubbles = [sum(latencies[stage + 1 :]) for stage in range(num_stages)]
    bubbles[-1] = sum(stage.forward_us for stage in profile.stages[:-1])
    redundant = [num_microbatches * profile.stages[other].forward_us for other in successors]
    exposed_us = max(0, *(work - bubble for work, bubble in zip(redundant, bubbles, strict=True)))
    finish = [profile.reduce_us(stage, num_pipelines) + cost.optimizer_us for stage, cost in enumerate(profile.stages)]
    finish_us = max(finish[stage] + finish[other] for stage, other in enumerate(successors))
    return pipeline_us(profile, num_microbatches) + exposed_us + finish_us


def _stored_scores(job: SimulatedJob, num_stages: int) -> Profile:
    """The profile of a model whose attention stores its scores; a measured model stores what it was measured with."""
    if isinstance(job.model, MeasuredModel) or isinstance(job.gpu, MeasuredDevice):
        return job.profile(num_stages)
    return estimate(job.model, job.gpu, num_stages, job.tensor_parallel, flash=False, context_parallel=job.context_parallel)


@lru_cache(maxsize=64)
def _memory_bytes(job: SimulatedJob, num_stages: int) -> int:
    """The memory of the fullest GPU: its own stage and the next one, each as in 1F1B."""
    stages = _stored_scores(job, num_stages).stages
    held = [
        round(stage.static_bytes * _FP32_STATE_BYTES / BYTES_PER_PARAMETER)
        + stage.activation_bytes * _FP32_OVER_BF16 * min(num_stages - number, job.num_microbatches)
        for number, stage in enumerate(stages)
    ]
    return max(held[stage] + held[(stage + 1) % num_stages] for stage in range(num_stages))
