"""ReCycle: peers take over the micro-batches of a dead worker; the planner's own plans give the iteration time.

Assumptions: `RecycleConstants` has the pauses of a recovery, which a real run can measure. The iteration in flight is repeated.
After a pause the pipeline fills again: the first iteration takes its makespan, not the period. With `moves`, live workers change
stage so that the failures are where the plan for their number has them (Failure Normalization), and copy the state of their new
stage from a peer; without, nobody changes stage. A worker that joins copies its state at an iteration boundary. If a stage has
lost all its workers, every stage is loaded from the last checkpoint; if no worker can move there, the job waits for a node.
"""

from dataclasses import dataclass, replace
from typing import Any

from recycle.core.cluster import Worker
from recycle.planner.failure_normalization import move_time_us
from recycle.sim.iteration_times import IterationTime, IterationTimes
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses
from recycle.sim.systems.constants import RecycleConstants


@dataclass(frozen=True, slots=True)
class _Holders:
    """The stage of each live worker, and whether the state of some stage exists only in a checkpoint."""

    stage_of: dict[Worker, int]
    is_lost: bool = False

    def counts(self, num_stages: int) -> list[int]:
        held = list(self.stage_of.values())
        return [held.count(stage) for stage in range(num_stages)]


@dataclass(frozen=True, slots=True)
class Recycle:
    """The policy; its state is `_Holders`. `fault_free`, if given, replaces the planner's plan while no worker is dead."""

    job: SimulatedJob
    timings: IterationTimes
    costs: RecycleConstants
    fault_free: IterationTime | None = None
    name: str = "recycle"

    def begin(self, members: Members) -> PolicyDecision:
        holders = _Holders({worker: worker.stage for worker in members.live})
        return self._continue(holders, Loss.STEP, (), [])

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, _Holders)
        kept = {worker: stage for worker, stage in state.stage_of.items() if worker not in event.left}
        joined = [worker for worker in event.joined if worker in event.members.live]
        before = _Holders(kept, state.is_lost)
        # A new worker has no state yet, so that it can take the stage with the fewest workers; without moves, its own.
        for worker in joined:
            kept[worker] = self._stage_for(worker, before)
        switch = (("regroup", self.costs.regroup_us), ("plan", self.costs.plan_us))
        if not event.left:
            # A spare has no place, so that its arrival or departure regroups nobody.
            return self._continue(before, Loss.NOTHING, switch if joined else (), joined)
        notice = (("detect", self.costs.detect_us), ("abort", self.costs.abort_us))
        return self._continue(before, Loss.STEP, (*notice, *switch), joined)

    def _stage_for(self, worker: Worker, holders: _Holders) -> int:
        if not self.costs.moves:
            return worker.stage
        counts = holders.counts(self.job.shape.num_stages)
        return min(range(len(counts)), key=lambda stage: (counts[stage], stage != worker.stage, stage))

    def _continue(
        self, holders: _Holders, loses: Loss, costs: tuple[tuple[str, int], ...], joined: list[Worker]
    ) -> PolicyDecision:
        """Continue with these holders: choose the plan, move workers, and load a checkpoint if a stage is lost."""
        shape = self.job.shape
        counts = holders.counts(shape.num_stages)
        is_lost = holders.is_lost or 0 in counts
        num_live = len(holders.stage_of)
        if num_live < shape.num_stages or (0 in counts and not self.costs.moves):
            reason = f"no worker is left at stage {counts.index(0)}: the job waits for a node"
            steady_state = SteadyState(0, 0, checkpoint_every=1)
            return PolicyDecision(
                steady_state, (), loses if not is_lost else Loss.SINCE_CHECKPOINT, reason, replace(holders, is_lost=True)
            )
        timing = self._timing(counts, num_live)
        copies = [holders.stage_of[worker] for worker in joined]
        if self.costs.moves:
            copies += _move(holders.stage_of, counts, timing.distribution, shape.num_pipelines)
        steady_state = self._steady_state(timing, num_live)
        refill_us = self.job.scaled_us(max(1, timing.makespan_us - timing.period_us)) if costs else 0
        if is_lost:
            restart = pauses(*costs, ("restart", self.costs.restart_us), ("refill", refill_us))
            reason = "a stage lost all its workers: all workers continue from the last checkpoint"
            return PolicyDecision(steady_state, restart, Loss.SINCE_CHECKPOINT, reason, replace(holders, is_lost=False))
        transfer_us = move_time_us(self.timings.problem.profile, copies, lambda stage: counts[stage] - copies.count(stage))
        wait = pauses(*costs, ("transfer", transfer_us), ("refill", refill_us))
        reason = f"{shape.num_workers - num_live} dead, {len(copies)} copies of a stage's state"
        return PolicyDecision(steady_state, wait, loses, reason, holders, keeps_unfinished=loses is Loss.NOTHING)

    def _timing(self, counts: list[int], num_live: int) -> IterationTime:
        num_failed = self.job.num_nodes - num_live
        if num_failed == 0 and self.fault_free:
            return self.fault_free
        if self.costs.moves:
            return self.timings.normalized(num_failed)
        return self.timings.for_distribution(tuple(self.job.shape.num_pipelines - count for count in counts))

    def _steady_state(self, timing: IterationTime, num_live: int) -> SteadyState:
        step_us = self.job.scaled_us(timing.period_us)
        every = max(1, self.costs.checkpoint_interval_us // step_us)
        return SteadyState(step_us, self.job.samples_per_step, timing.busy_share(num_live), every)


def _move(stage_of: dict[Worker, int], counts: list[int], distribution: tuple[int, ...], num_pipelines: int) -> list[int]:
    """Move workers from stages with more workers than planned to stages with fewer; return the new stage of each move."""
    wanted = [num_pipelines - dead for dead in distribution]
    moved = []
    for stage, need in enumerate(wanted):
        while counts[stage] < need:
            source = max(range(len(counts)), key=lambda other: counts[other] - wanted[other])
            if counts[source] <= wanted[source]:
                break
            mover = max(worker for worker, held in stage_of.items() if held == source)
            stage_of[mover] = stage
            counts[source] -= 1
            counts[stage] += 1
            moved.append(stage)
    return moved
