"""Replica drop, as torchft does it: a pipeline with a dead worker does not train until the worker is replaced.

Assumptions: the other pipelines run 1F1B, or a zero-bubble schedule, with their own micro-batches, so that the batch shrinks and
the step takes as long as before; the step in flight is discarded and its samples are dropped; a new quorum and new communicators
take `reconfigure_us`; a complete pipeline copies its state from another one while that one trains, and joins at the next step.
Spares fill empty places. No pause is charged for filling the pipelines again.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses

_NONE_WHOLE = "every pipeline misses a worker: the job waits"


@dataclass(frozen=True, slots=True)
class ReplicaDrop:
    """The policy; its state is the set of pipelines that train. `timing` is an iteration of `schedule`."""

    job: SimulatedJob
    timing: IterationTime
    reconfigure_us: int
    schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B

    @property
    def name(self) -> str:
        return f"replica-drop{self.schedule.suffix}"

    def begin(self, members: Members) -> PolicyDecision:
        whole = self._whole_pipelines(members)
        return PolicyDecision(self._steady_state(len(whole)), reason="" if whole else _NONE_WHOLE, state=whole)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        before, whole = frozenset(state), self._whole_pipelines(event.members)
        # A pipeline has lost its step even if a spare replaces the dead worker at once.
        hit = before & {worker.pipeline for worker in event.left}
        steady_state = self._steady_state(len(whole))
        wait = pauses(("reconfigure", self.reconfigure_us)) if whole else ()
        if hit:
            reason = f"{len(hit)} pipelines lost a worker, {len(whole)} go on" if whole else _NONE_WHOLE
            return PolicyDecision(steady_state, wait, Loss.STEP, reason, whole, drops_samples=True)
        if whole - before:
            return PolicyDecision(steady_state, wait, Loss.NOTHING, f"{len(whole - before)} pipelines are whole again", whole)
        reason = "no pipeline that trains is touched" if whole else _NONE_WHOLE
        return PolicyDecision(steady_state, (), Loss.NOTHING, reason, whole, keeps_unfinished=True)

    def _whole_pipelines(self, members: Members) -> frozenset[int]:
        return frozenset(range(self.job.shape.num_pipelines)) - {worker.pipeline for worker in members.failed}

    def _steady_state(self, num_pipelines: int) -> SteadyState:
        if num_pipelines == 0:
            return DOWN
        samples = self.job.samples_per_step * num_pipelines // self.job.shape.num_pipelines
        return SteadyState(self.job.scaled_us(self.timing.period_us), samples, self.timing.busy_share(self.job.num_nodes))
