"""Replica drop, as torchft does it: a dead worker takes its whole pipeline out until it is whole again.

Assumptions: the remaining pipelines run 1F1B with their own micro-batches, so that the batch shrinks and the step takes as long
as before; the step in flight is discarded and its samples are not seen again; a new quorum and new communicators take
`reconfigure_us`; a pipeline that is whole again copies its state from another one while that one goes on, and enters at the
next step. Spare nodes fill empty places as they come.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.job import Job
from recycle.sim.policy import DOWN, Event, Loss, Members, Regime, Verdict, pauses
from recycle.sim.timings import Timing

_NONE_WHOLE = "every pipeline misses a worker: the job waits"


@dataclass(frozen=True, slots=True)
class ReplicaDrop:
    """State: how many pipelines train."""

    job: Job
    timing: Timing
    reconfigure_us: int
    name: str = "replica-drop"

    def begin(self, members: Members) -> Verdict:
        num = self._whole_pipelines(members)
        return Verdict(self._regime(num), reason="" if num else _NONE_WHOLE, state=num)

    def change(self, event: Event, state: Any) -> Verdict:
        num, before = self._whole_pipelines(event.members), int(state)
        regime = self._regime(num)
        wait = pauses(("reconfigure", self.reconfigure_us)) if num else ()
        if num < before:
            reason = f"{before - num} pipelines drop out, {num} go on with a smaller batch" if num else _NONE_WHOLE
            return Verdict(regime, wait, Loss.STEP, reason, num, drops_samples=True)
        if num > before:
            return Verdict(regime, wait, Loss.NOTHING, f"{num - before} pipelines are whole again", num)
        reason = "no pipeline that trains is touched" if num else _NONE_WHOLE
        return Verdict(regime, (), Loss.NOTHING, reason, num, keeps_unfinished=True)

    def _whole_pipelines(self, members: Members) -> int:
        dead = {worker.pipeline for worker in members.failed}
        return self.job.shape.num_pipelines - len(dead)

    def _regime(self, num_pipelines: int) -> Regime:
        if num_pipelines == 0:
            return DOWN
        samples = self.job.samples_per_step * num_pipelines // self.job.shape.num_pipelines
        return Regime(self.job.scaled_us(self.timing.period_us), samples, self.timing.busy_share(self.job.num_nodes))
