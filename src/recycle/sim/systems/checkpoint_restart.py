"""Checkpoint and restart, as torchrun and Megatron do it: any failure stops the whole job, which resumes from a checkpoint.

Assumptions: 1F1B on all places of the cluster; a checkpoint every `checkpoint_every` steps stops training for `checkpoint_us`;
a failure is noticed, the job is started again and loads its state, `restart_us` in all. With spares (`has_spares`) there is
always another node; without, the job stands still until every place is filled again. A node that joins while all places are
filled changes nothing.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Event, Loss, Members, PolicyDecision, Regime, pauses

_WAITS = "the job waits until every place is filled again"


@dataclass(frozen=True, slots=True)
class CheckpointRestart:
    """State: whether the job runs."""

    job: SimulatedJob
    timing: IterationTime
    checkpoint_every: int
    checkpoint_us: int
    restart_us: int
    has_spares: bool = False

    @property
    def name(self) -> str:
        return "checkpoint-restart-spare" if self.has_spares else "checkpoint-restart"

    def begin(self, members: Members) -> PolicyDecision:
        runs = self._can_run(members)
        return PolicyDecision(self._regime() if runs else self._waiting(), reason="" if runs else _WAITS, state=runs)

    def change(self, event: Event, state: Any) -> PolicyDecision:
        runs = self._can_run(event.members)
        if not runs:
            return PolicyDecision(self._waiting(), (), Loss.SINCE_CHECKPOINT, _WAITS, False)
        if not event.left and state:
            return PolicyDecision(self._regime(), (), Loss.NOTHING, "nothing changes", True, keeps_unfinished=True)
        restart = pauses(("restart", self.restart_us))
        return PolicyDecision(self._regime(), restart, Loss.SINCE_CHECKPOINT, "the job starts again from its checkpoint", True)

    def _can_run(self, members: Members) -> bool:
        return self.has_spares or not members.failed

    def _waiting(self) -> Regime:
        return Regime(0, 0, checkpoint_every=self.checkpoint_every)

    def _regime(self) -> Regime:
        return Regime(
            self.job.scaled_us(self.timing.period_us),
            self.job.samples_per_step,
            self.timing.busy_share(self.job.num_nodes),
            self.checkpoint_every,
            self.checkpoint_us,
        )
