"""Varuna (EuroSys'22): the job is partitioned again for the live nodes, and every loss rolls back to the last checkpoint.

Assumptions, in favour of Varuna:
- A depth is a divisor of the number of transformer layers, smaller than that number, at which every stage fits in memory:
  parameters, optimizer state and the activations that 1F1B holds. G nodes form `G // depth` pipelines; the rest is idle.
- The global batch is fixed and spread evenly; the pipeline with most micro-batches determines the step. The depth with the
  shortest step is chosen, of equal ones the shallowest.
- A step is `pipeline_us`, then the reduction and the optimizer of the slowest stage. Messages take time only while the pipeline
  fills and drains; else they overlap with computation.
- After every `checkpoint_every` steps training stops for `checkpoint_us`.
- Any loss of a place, also of an idle node, is a morph: the job rolls back to its last complete checkpoint and pauses for
  `restart_us`, which includes no checkpoint.
- A node that joins is a morph only if it makes the step shorter. The job first finishes its step and writes a checkpoint, so that
  nothing is rolled back and the pause is `checkpoint_us + restart_us`; another change during the pause starts it again.
- Nodes beyond the size of the cluster are not used. With too few nodes for any depth, the job waits.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import latencies_us, most_bytes, pipeline_us
from recycle.sim.policy import Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses


@dataclass(frozen=True, slots=True)
class VarunaLayout:
    """So many pipelines of so many stages, and their step time before the job's scale."""

    num_pipelines: int
    num_stages: int
    step_us: int
    work_us: int


@dataclass(frozen=True, slots=True)
class Varuna:
    """The policy; its state is the layout, None while the job waits."""

    job: SimulatedJob
    checkpoint_every: int
    checkpoint_us: int
    restart_us: int
    name: str = "varuna"

    def begin(self, members: Members) -> PolicyDecision:
        layout = best_layout(self.job, members.num_live)
        return PolicyDecision(self._steady_state(layout, members), reason=_reason(layout), state=layout)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert state is None or isinstance(state, VarunaLayout)
        layout = best_layout(self.job, event.members.num_live)
        restart = pauses(("restart", self.restart_us)) if layout else ()
        if event.left:
            return PolicyDecision(
                self._steady_state(layout, event.members), restart, Loss.SINCE_CHECKPOINT, _reason(layout), layout
            )
        if layout is None or (state is not None and layout.step_us >= state.step_us):
            kept = self._steady_state(state, event.members)
            return PolicyDecision(kept, (), Loss.NOTHING, "no layout is faster", state, keeps_unfinished=True)
        save = pauses(("checkpoint", self.checkpoint_us)) if state else ()
        steady_state = self._steady_state(layout, event.members)
        return PolicyDecision(steady_state, (*save, *restart), Loss.NOTHING, _reason(layout), layout, secures=state is not None)

    def _steady_state(self, layout: VarunaLayout | None, members: Members) -> SteadyState:
        if layout is None:
            return SteadyState(0, 0, checkpoint_every=self.checkpoint_every)
        busy_share = min(1.0, layout.work_us / (layout.step_us * members.num_live))
        step_us = self.job.scaled_us(layout.step_us)
        return SteadyState(step_us, self.job.samples_per_step, busy_share, self.checkpoint_every, self.checkpoint_us)


def best_layout(job: SimulatedJob, num_nodes: int) -> VarunaLayout | None:
    """Return the fastest layout of `job` on so many nodes, None if no depth fits."""
    usable = min(num_nodes, job.num_nodes)
    layouts = [layout_of(job, depth, usable // depth) for depth in depths(job.model.num_layers) if depth <= usable]
    return min((layout for layout in layouts if layout), key=lambda layout: layout.step_us, default=None)


def depths(num_layers: int) -> list[int]:
    """The possible depths: every divisor of the number of layers but that number itself, and always 1."""
    return [depth for depth in range(1, num_layers) if num_layers % depth == 0] or [1]


def layout_of(job: SimulatedJob, num_stages: int, num_pipelines: int) -> VarunaLayout | None:
    """The layout of this depth, None if a stage does not fit in a GPU's memory."""
    profile = job.profile(num_stages)
    num_microbatches = -(-job.num_microbatches // num_pipelines)
    if most_bytes(profile, num_microbatches) > job.gpu.memory_bytes:
        return None
    finish_us = max(profile.reduce_us(stage, num_pipelines) + cost.optimizer_us for stage, cost in enumerate(profile.stages))
    work_us = job.num_microbatches * sum(latencies_us(profile))
    return VarunaLayout(num_pipelines, num_stages, pipeline_us(profile, num_microbatches) + finish_us, work_us)


def _reason(layout: VarunaLayout | None) -> str:
    if layout is None:
        return "no depth fits on so few nodes and in their memory: the job waits"
    return f"the job is cut into {layout.num_pipelines} pipelines of {layout.num_stages} stages"
