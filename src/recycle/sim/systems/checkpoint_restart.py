"""Checkpoint and restart, as torchrun and Megatron do it: any failure stops the whole job, which resumes from a checkpoint.

Assumptions: 1F1B on all places of the cluster, or a zero-bubble schedule there, by the iteration time that is given (a restart is
not charged for filling its pipeline); a checkpoint every `checkpoint_every` steps stops training for `checkpoint_us`;
detection, restart and loading take `restart_us` together. With spares (`has_spares`) a node is always available if any is
live; without, the job waits until every place is filled again. A node that joins while all places are filled changes nothing.
"""

from dataclasses import dataclass
from typing import Any

from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses

_WAITS = "the job waits until every place is filled again"


@dataclass(frozen=True, slots=True)
class CheckpointRestart:
    """The policy; its state is whether the job runs. `timing` is an iteration of `schedule`."""

    job: SimulatedJob
    timing: IterationTime
    checkpoint_every: int
    checkpoint_us: int
    restart_us: int
    has_spares: bool = False
    schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B

    @property
    def name(self) -> str:
        return f"checkpoint-restart{'-spare' if self.has_spares else ''}{self.schedule.suffix}"

    def begin(self, members: Members) -> PolicyDecision:
        runs = self._can_run(members)
        return PolicyDecision(self._steady_state(runs), reason="" if runs else _WAITS, state=runs)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        steady_state = self._steady_state(self._can_run(event.members))
        if steady_state.is_down:
            return PolicyDecision(steady_state, (), Loss.SINCE_CHECKPOINT, _WAITS, False)
        if not event.left and state:
            return PolicyDecision(steady_state, (), Loss.NOTHING, "nothing changes", True, keeps_unfinished=True)
        restart = pauses(("restart", self.restart_us))
        return PolicyDecision(steady_state, restart, Loss.SINCE_CHECKPOINT, "the job starts again from its checkpoint", True)

    def _can_run(self, members: Members) -> bool:
        return bool(members.live) if self.has_spares else not members.failed

    def _steady_state(self, runs: bool) -> SteadyState:
        if not runs:
            return SteadyState(0, 0, checkpoint_every=self.checkpoint_every)
        step_us, busy_share = self.job.scaled_us(self.timing.period_us), self.timing.busy_share(self.job.num_nodes)
        return SteadyState(step_us, self.job.samples_per_step, busy_share, self.checkpoint_every, self.checkpoint_us)
