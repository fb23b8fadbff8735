"""Replica drop, as torchft does it: a dead worker takes its whole pipeline out until it is whole again.

Assumptions: the remaining pipelines run 1F1B with their own micro-batches, so that the batch shrinks and the step takes as long
as before; the step in flight is discarded and its samples are not seen again; a new quorum and new communicators take
`reconfigure_us`; a pipeline that is whole again copies its state from another one while that one goes on, and enters at the
next step. Spare nodes fill empty places as they come.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Event, Loss, Members, PolicyDecision, Regime, pauses

_NONE_WHOLE = "every pipeline misses a worker: the job waits"


@dataclass(frozen=True, slots=True)
class ReplicaDrop:
    """State: the pipelines that train."""

    job: SimulatedJob
    timing: IterationTime
    reconfigure_us: int
    name: str = "replica-drop"

    def begin(self, members: Members) -> PolicyDecision:
        whole = self._whole_pipelines(members)
        return PolicyDecision(self._regime(len(whole)), reason="" if whole else _NONE_WHOLE, state=whole)

    def change(self, event: Event, state: Any) -> PolicyDecision:
        before, whole = frozenset(state), self._whole_pipelines(event.members)
        # A pipeline that a spare makes whole at once, or another one instead, has lost its step all the same.
        hit = before & {worker.pipeline for worker in event.left}
        regime = self._regime(len(whole))
        wait = pauses(("reconfigure", self.reconfigure_us)) if whole else ()
        if hit:
            reason = f"{len(hit)} pipelines lost a worker, {len(whole)} go on" if whole else _NONE_WHOLE
            return PolicyDecision(regime, wait, Loss.STEP, reason, whole, drops_samples=True)
        if whole - before:
            return PolicyDecision(regime, wait, Loss.NOTHING, f"{len(whole - before)} pipelines are whole again", whole)
        reason = "no pipeline that trains is touched" if whole else _NONE_WHOLE
        return PolicyDecision(regime, (), Loss.NOTHING, reason, whole, keeps_unfinished=True)

    def _whole_pipelines(self, members: Members) -> frozenset[int]:
        return frozenset(range(self.job.shape.num_pipelines)) - {worker.pipeline for worker in members.failed}

    def _regime(self, num_pipelines: int) -> Regime:
        if num_pipelines == 0:
            return DOWN
        samples = self.job.samples_per_step * num_pipelines // self.job.shape.num_pipelines
        return Regime(self.job.scaled_us(self.timing.period_us), samples, self.timing.busy_share(self.job.num_nodes))
