"""ResiHP (arXiv 2605.06374): layers are repartitioned over the stages, and micro-batches migrate to other pipelines.

Published: of a tensor-parallel group only the bad GPU is dropped, and the group goes on with a power of two of its GPUs; layers
are repartitioned over the stages by their speed; micro-batches migrate to peers; a worker is slow if an iteration takes more than
25 % longer than predicted from its sequence lengths.

Assumptions, in favour of ResiHP:
- A step takes the lower bound that our planner proves for the new layers, with split backward and staggered step: no schedule at
  all is faster. So ResiHP loses what whole layers and whole micro-batches cost, and nothing by its schedule.
- The split is the best of all whole layers that fit in memory. No stage is ever lost: its layers go to other stages.
- Nodes of a trace are whole workers, so that nothing is left of a tensor-parallel group. With `gpu_failures` a node that leaves
  has lost one GPU, and its worker goes on at half of its speed.
- New groups take as long as ReCycle's. All copies are made at once, before training goes on; no overlap is published.
- Dead workers stay where they fell: workers that change stage are not published.
- Slow links are waited for.
"""

from dataclasses import dataclass, replace
from typing import Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.planner.model.load_split import layer_work
from recycle.planner.model.lower_bound import lower_bound
from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, ChangeKind, Loss, Members, MembershipChange, PolicyDecision, Speeds, SteadyState, pauses
from recycle.sim.systems.constants import ResiHPConstants
from recycle.sim.systems.layer_moves import Split, best_split, stage_room, transfer_us
from recycle.sim.systems.slow_steps import stretched


@dataclass(frozen=True, slots=True)
class _Layout:
    """The split, the speeds that it was made for, and the steady state at those speeds."""

    split: Split | None
    speeds: Speeds
    steady_state: SteadyState


@dataclass(frozen=True, slots=True)
class ResiHP:
    """The policy; its state is the layout."""

    job: SimulatedJob
    costs: ResiHPConstants
    name: str = "resihp"

    def begin(self, members: Members) -> PolicyDecision:
        return self._adapt(members, members.slow, None, (), Loss.NOTHING)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, _Layout)
        switch = (("regroup", self.costs.regroup_us), ("plan", self.costs.plan_us))
        if event.kind is ChangeKind.REVIEW:
            return self._adapt(event.members, event.members.slow, state.split, switch, Loss.NOTHING)
        if event.kind is ChangeKind.SPEEDS:
            return self._notice_later(event.members, state)
        if not event.left and not event.joined:
            return self._adapt(event.members, state.speeds, state.split, (), Loss.NOTHING)
        # A worker that is new, or gone, is not slow any more.
        known = tuple((worker, speed) for worker, speed in state.speeds if worker not in (*event.left, *event.joined))
        notice = (("detect", self.costs.detect_us),) if event.left else ()
        loses = Loss.STEP if event.left else Loss.NOTHING
        return self._adapt(event.members, known, state.split, (*notice, *switch), loses, event.joined)

    def _notice_later(self, members: Members, layout: _Layout) -> PolicyDecision:
        """Go on as before; adapt when it is known that workers are slower by more than the threshold, or fast again."""
        steady = stretched(self.job, layout.steady_state, members, dict(layout.speeds))
        alarm = layout.steady_state.step_us * (1 + self.costs.threshold_percent / 100)
        is_recovered = any(speed > dict(layout.speeds).get(worker, 1.0) for worker, speed in _all_speeds(members, layout.speeds))
        review_us = self.costs.notice_steps * steady.step_us if steady.step_us > alarm or is_recovered else 0
        return PolicyDecision(steady, reason="slow, not yet known", state=layout, keeps_unfinished=True, review_us=review_us)

    def _adapt(
        self,
        members: Members,
        known: Speeds,
        before: Split | None,
        costs: tuple[tuple[str, int], ...],
        loses: Loss,
        joined: tuple[Worker, ...] = (),
    ) -> PolicyDecision:
        """Repartition the layers for these members at the `known` speeds."""
        speeds = self._speeds(members, known)
        split = self.split(speeds)
        if split is None:
            layout = _Layout(None, known, DOWN)
            return PolicyDecision(DOWN, (), loses, "no split of the layers fits in the memory: the job waits", layout)
        timing = self.timing(split, speeds)
        num_live = sum(map(len, speeds))
        steady = SteadyState(self.job.scaled_us(timing.period_us), self.job.samples_per_step, timing.busy_share(num_live))
        profile = self.job.profile()
        copy_us = transfer_us(self.job, profile, before or split, split)
        if joined:
            copy_us = max(copy_us, profile.peer_link.time_us(max(split) * self.job.layer_state_bytes))
        reason = f"{num_live} workers, layers by stage: {', '.join(map(str, split))}"
        return PolicyDecision(
            stretched(self.job, steady, members, dict(known)),
            pauses(*costs, ("transfer", copy_us)) if costs else (),
            loses,
            reason,
            _Layout(split, known, steady),
            keeps_unfinished=loses is Loss.NOTHING,
        )

    def _speeds(self, members: Members, known: Speeds) -> tuple[tuple[float, ...], ...]:
        """The speeds of the workers of each stage that go on, slowest first."""
        slow = dict(known)
        found: list[list[float]] = [[] for _ in range(members.shape.num_stages)]
        for worker in members.live:
            found[worker.stage].append(slow.get(worker, 1.0))
        if self.costs.gpu_failures and self.job.tensor_parallel > 1:
            for worker in members.failed:
                left = 1 << (self.job.tensor_parallel - 1).bit_length() - 1
                found[worker.stage].append(left / self.job.tensor_parallel)
        return tuple(tuple(sorted(each)) for each in found)

    def split(self, speeds: tuple[tuple[float, ...], ...]) -> Split | None:
        """The split for workers of these speeds at each stage."""
        shape = self.job.shape
        num_inflight = [min(shape.num_stages - stage, shape.num_microbatches) for stage in range(shape.num_stages)]
        # Half of the GPUs of a group hold all of its layers: each twice as many.
        larger = [1.0] * shape.num_stages
        room = stage_room(self.job, [sum(each) for each in speeds], larger, num_inflight)
        return best_split(self.job, room, self.job.base_layers)

    def timing(self, split: Split, speeds: tuple[tuple[float, ...], ...]) -> IterationTime:
        """The least iteration with these layers and workers; stages without a worker are left out."""
        layers = tuple(num for num in split if num)
        stages = [each for each, num in zip(speeds, split, strict=True) if num]
        shape = Shape(self.job.shape.num_pipelines, len(layers), self.job.shape.num_microbatches)
        job = replace(self.job, shape=shape)
        dead = frozenset(
            Worker(pipeline, stage) for stage, own in enumerate(stages) for pipeline in range(len(own), shape.num_pipelines)
        )
        slow = tuple((Worker(pipeline, stage), one) for stage, own in enumerate(stages) for pipeline, one in enumerate(own))
        problem = replace(job.problem_of(job.profile_of(layers)), cluster=Cluster(shape, dead), speeds=slow)
        period_us, work_us = lower_bound(problem), shape.num_chains * layer_work(problem, len(layers))[-1]
        return IterationTime(period_us, period_us, work_us, problem.cluster.num_failed)


def _all_speeds(members: Members, known: Speeds) -> Speeds:
    """The speeds of all workers that are slow, or were known to be."""
    now = dict(members.slow)
    return tuple((worker, now.get(worker, 1.0)) for worker in sorted({*now, *dict(known)}))
