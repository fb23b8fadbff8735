"""ElasWave (arXiv 2510.00606): micro-batches are resized and whole layers move, so that the stages are even again.

Published: the global batch stays. At a failure the workers that are left at a stage share its samples, layers move between stages
by a minimax partition, clocks of slow stages are raised, communicators are repaired within 1 s, the copies of layers take up to
51 % less time than blocking ones, and a step that was interrupted is run again from snapshots in memory.

Assumptions, in favour of ElasWave:
- 1F1B in closed form, then the reduction and the optimizer step of the slowest stage. A stage with n of D workers takes D/n of
  its time for a micro-batch: samples can be divided as finely as that takes, although micro-batches have few of them.
- The split is the best of all whole layers that fit in memory, with 1F1B's activations of the larger micro-batches.
- No stage is ever lost: the state of a stage without any worker is found in a snapshot, and its layers go to other stages.
- Death is noticed as soon as ReCycle notices it. `clock_percent` is how fast a slow stage can be clocked: 100 by default, because
  the times of this simulator are those of GPUs at full clock.
- Dead workers stay where they fell: workers that change stage are not published.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import latencies_us
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses
from recycle.sim.systems.constants import ElasWaveConstants
from recycle.sim.systems.layer_moves import Split, best_split, stage_room, transfer_us


@dataclass(frozen=True, slots=True)
class ElasWave:
    """The policy; its state is the split, None while no split fits."""

    job: SimulatedJob
    costs: ElasWaveConstants
    name: str = "elaswave"

    def begin(self, members: Members) -> PolicyDecision:
        return self._continue(members, None, (), Loss.NOTHING)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        if not event.left and not event.joined:
            return self._continue(event.members, state, (), Loss.NOTHING)
        repair = ("repair", self.costs.regroup_us)
        if not event.left:
            return self._continue(event.members, state, (repair,), Loss.NOTHING, event.joined)
        return self._continue(event.members, state, (("detect", self.costs.detect_us), repair), Loss.STEP, event.joined)

    def _continue(
        self,
        members: Members,
        before: Split | None,
        costs: tuple[tuple[str, int], ...],
        loses: Loss,
        joined: tuple[Any, ...] = (),
    ) -> PolicyDecision:
        counts = live_counts_of(members)
        split = self.split(counts)
        if split is None:
            return PolicyDecision(DOWN, (), loses, "no split of the layers fits in the memory: the job waits", None)
        step_us, busy_share = self.step_us(split, counts)
        steady_state = SteadyState(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share)
        profile = self.job.profile()
        moved_us = transfer_us(self.job, profile, before or split, split)
        # A worker that joins copies the layers of its stage, while others receive theirs.
        stage_bytes = max(split) * self.job.layer_state_bytes
        copy_us = max(moved_us, profile.peer_link.time_us(stage_bytes) if joined else 0)
        transfer = ("transfer", round(copy_us * (100 - self.costs.hidden_percent) / 100))
        reason = f"{members.num_live} workers, layers by stage: {', '.join(map(str, split))}"
        wait = pauses(*costs, transfer)
        return PolicyDecision(steady_state, wait, loses, reason, split, keeps_unfinished=loses is Loss.NOTHING)

    def split(self, counts: tuple[int, ...]) -> Split | None:
        """The split for so many live workers at each stage."""
        shape = self.job.shape
        larger = [shape.num_pipelines / num if num else 1.0 for num in counts]
        num_inflight = [min(shape.num_stages - stage, shape.num_microbatches) for stage in range(shape.num_stages)]
        return best_split(self.job, stage_room(self.job, counts, larger, num_inflight), self.job.base_layers)

    def step_us(self, split: Split, counts: tuple[int, ...]) -> tuple[float, float]:
        """The time of a step, and the share of it in which live workers compute."""
        job, num_pipelines = self.job, self.job.shape.num_pipelines
        profile = job.profile_of(tuple(num for num in split if num))
        live = [num for num in counts if num]
        own = latencies_us(profile)
        latencies = [time * num_pipelines / num for time, num in zip(own, live, strict=True)]
        # Raised clocks bring slow stages down, but not below the others.
        fastest, boost = min(latencies), self.costs.clock_percent / 100
        latencies = [max(fastest, time / boost) for time in latencies]
        travel = 2 * sum(profile.comm_us(stage) for stage in range(len(live) - 1))
        finish = max(profile.reduce_us(s, num) + profile.stages[s].optimizer_us for s, num in enumerate(live))
        step = sum(latencies) + (job.shape.num_microbatches - 1) * max(latencies) + travel + finish
        return step, min(1.0, job.num_microbatches * sum(own) / (step * sum(live)))


def live_counts_of(members: Members) -> tuple[int, ...]:
    """The number of live workers of each stage."""
    dead = Counter(worker.stage for worker in members.failed)  # of thousands of workers few are dead
    return tuple(members.shape.num_pipelines - dead[stage] for stage in range(members.shape.num_stages))
