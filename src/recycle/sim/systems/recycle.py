"""ReCycle: peers take over the micro-batches of a dead worker; the planner's own plans give the iteration time.

Assumptions: `RecycleConstants` has the pauses of a recovery, which a real run can measure. The iteration in flight is repeated.
After a pause the pipeline fills again: the first iteration takes its makespan, not the period. With `moves`, live workers change
stage so that the failures are where the plan for their number has them (Failure Normalization), and copy the state of their new
stage from a peer; without, nobody changes stage. A worker that joins copies its state at an iteration boundary. If a stage has
lost all its workers, every stage is loaded from the last checkpoint; if no worker can move there, the job waits for a node.

With elastic cuts (`timings` of a problem with shared layers) nothing is copied for a cut, because neighbouring stages hold the
shared layers already. Their parameters and optimizer state count in memory, in reductions, in steps and in copies.

A worker that becomes slower or faster is known after `notice_steps`. Until then every step waits for it. Then a plan for the new
speeds is taken at the end of an iteration, or slow workers and workers with slow links are left out as if they were dead, if that
shortens the step by `LEAST_GAIN` at least and wins more than it costs within `SLOW_TIME_US`. The plan is made while training goes
on.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.profile import Profile
from recycle.planner.failure_normalization import move_time_us
from recycle.sim.iteration_times import IterationTime, IterationTimes, SlowPeers
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import (
    DOWN,
    ChangeKind,
    Loss,
    Members,
    MembershipChange,
    Pause,
    PolicyDecision,
    Speeds,
    SteadyState,
    pauses,
)
from recycle.sim.systems.constants import RecycleConstants
from recycle.sim.systems.slow_steps import link_delay_us, stretched

LEAST_GAIN = 0.01
# Of more workers than this share, but one, nobody asks whether the job is faster without them.
MOST_LEFT_OUT = 0.1
SLOW_TIME_US = 600_000_000  # ten minutes, as slow workers were found to last (FALCON, GREYHOUND)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The stage of each live worker, and whether the state of some stage exists only in a checkpoint.

    `speeds` are those that the plan knows, `left_out` workers that are alive but take no part, `steady_state` that of the plan.
    """

    stage_of: dict[Worker, int]
    is_lost: bool = False
    speeds: Speeds = ()
    left_out: frozenset[Worker] = frozenset()
    steady_state: SteadyState = DOWN

    def counts(self, num_stages: int) -> list[int]:
        held = Counter(self.stage_of.values())
        held.subtract(self.stage_of[worker] for worker in self.left_out if worker in self.stage_of)
        return [held[stage] for stage in range(num_stages)]

    def slow_peers(self, num_stages: int) -> SlowPeers:
        """The known speeds of the workers of each stage that take part."""
        found: list[list[float]] = [[] for _ in range(num_stages)]
        for worker, speed in self.speeds:
            if worker in self.stage_of and worker not in self.left_out:
                found[self.stage_of[worker]].append(round(speed, 2))
        return tuple(tuple(sorted(each)) for each in found) if any(found) else ()


@dataclass(frozen=True, slots=True)
class Recycle:
    """The policy; its state is `_Holders`. `fault_free`, if given, replaces the planner's plan while no worker is dead."""

    job: SimulatedJob
    timings: IterationTimes
    costs: RecycleConstants
    fault_free: IterationTime | None = None
    name: str = "recycle"

    def begin(self, members: Members) -> PolicyDecision:
        stages = {worker: worker.stage for worker in members.live}
        decisions = []
        for left_out in dict.fromkeys((frozenset[Worker](), _slow_workers(members))):
            holders = _Holders(dict(stages), speeds=members.slow, left_out=left_out)
            decisions.append(self._watched(self._continue(holders, Loss.STEP, (), []), members))
        running = [decision for decision in decisions if not decision.steady_state.is_down]
        return min(running or decisions, key=lambda decision: decision.steady_state.step_us)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, _Holders)
        if event.kind is ChangeKind.REVIEW:
            return self._adapt(state, event.members)
        if event.kind is ChangeKind.SPEEDS:
            as_before = PolicyDecision(state.steady_state, state=state, reason="a speed changed", keeps_unfinished=True)
            return self._watched(as_before, event.members)
        return self._watched(self._change_members(event, state), event.members)

    def _change_members(self, event: MembershipChange, state: _Holders) -> PolicyDecision:
        gone = {*event.left, *event.joined}
        kept = dict(state.stage_of)  # a copy does not hash the workers again, of which there may be thousands
        for worker in event.left:
            kept.pop(worker, None)
        joined = [worker for worker in event.joined if worker in event.members.live]
        known = tuple((worker, speed) for worker, speed in state.speeds if worker not in gone)
        before = replace(state, stage_of=kept, speeds=known, left_out=state.left_out - gone)
        # A new worker has no state yet, so that it can take the stage with the fewest workers; without moves, its own.
        for worker in joined:
            kept[worker] = self._stage_for(worker, before)
        if not event.left:
            # A spare has no place, so that its arrival or departure regroups nobody.
            return self._continue(before, Loss.NOTHING, self._switch if joined else (), joined)
        notice = (("detect", self.costs.detect_us), ("abort", self.costs.abort_us))
        return self._continue(before, Loss.STEP, (*notice, *self._switch), joined)

    @property
    def _switch(self) -> tuple[tuple[str, int], ...]:
        return (("regroup", self.costs.regroup_us), ("plan", self.costs.plan_us))

    def _watched(self, decision: PolicyDecision, members: Members) -> PolicyDecision:
        """The decision with steps that wait for slow workers, and a review if the plan has other speeds than there are."""
        holders = decision.state
        assert isinstance(holders, _Holders)
        steady = stretched(self.job, decision.steady_state, _taking_part(members, holders), dict(holders.speeds))
        is_news = dict(holders.speeds) != dict(members.slow) or bool(members.slow_links) or bool(holders.left_out)
        review_us = self.costs.notice_steps * steady.step_us if is_news else 0
        return replace(decision, steady_state=steady, review_us=review_us)

    def _adapt(self, holders: _Holders, members: Members) -> PolicyDecision:
        """Take the plan for the real speeds, or leave slow workers or slow links out, if one of these is faster than going on."""
        as_is = stretched(self.job, holders.steady_state, _taking_part(members, holders), dict(holders.speeds))
        slow_links = frozenset(worker for worker, _ in members.slow_links)
        best: tuple[int, PolicyDecision, SteadyState] | None = None
        # Without them, the others have their work: only a link that costs more than that is worth it.
        costs_more = link_delay_us(self.job, members) * len(holders.stage_of) > len(slow_links) * as_is.step_us
        slow_links = slow_links if costs_more else frozenset[Worker]()
        slow = _slow_workers(members)
        for left_out in dict.fromkeys((frozenset[Worker](), slow_links, slow, slow | slow_links)):
            # A worker that comes back has old weights.
            back = [worker for worker in holders.left_out if worker not in left_out and worker in holders.stage_of]
            costs = self._switch if left_out != holders.left_out else (("plan", self.costs.plan_us),)
            stage_of = dict(holders.stage_of)
            planned = replace(holders, stage_of=stage_of, speeds=members.slow, left_out=left_out)
            decision = self._continue(planned, Loss.NOTHING, costs, back)
            if decision.steady_state.is_down:
                continue
            steady = stretched(self.job, decision.steady_state, _taking_part(members, planned), dict(members.slow))
            if best is None or steady.step_us < best[0]:
                best = steady.step_us, decision, steady
        if best is None or not self._pays(as_is, best[1].pauses, best[0]):
            reason = "no plan for these speeds is faster"
            return PolicyDecision(as_is, reason=reason, state=holders, keeps_unfinished=True)
        return replace(best[1], steady_state=best[2])

    def _pays(self, as_is: SteadyState, wait: tuple[Pause, ...], step_us: int) -> bool:
        """Whether a shorter step wins more than its pauses cost, if speeds stay as they are for `SLOW_TIME_US`."""
        if as_is.is_down:
            return True
        gain = 1 - step_us / as_is.step_us
        return gain >= LEAST_GAIN and gain * SLOW_TIME_US > sum(pause.time_us for pause in wait)

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
        num_live = sum(counts)
        if num_live < shape.num_stages or (0 in counts and not self.costs.moves):
            reason = f"no worker is left at stage {counts.index(0)}: the job waits for a node"
            steady_state = SteadyState(0, 0, checkpoint_every=1)
            waits = replace(holders, is_lost=True, steady_state=steady_state)
            return PolicyDecision(steady_state, (), loses if not is_lost else Loss.SINCE_CHECKPOINT, reason, waits)
        copies = [holders.stage_of[worker] for worker in joined]
        if self.costs.moves:
            wanted = self.timings.normalized(self.job.num_nodes - num_live).distribution
            copies += _move(holders, counts, wanted, shape.num_pipelines)
        timing = self._timing(counts, num_live, holders.slow_peers(shape.num_stages))
        steady_state = self._steady_state(timing, num_live)
        after = replace(holders, is_lost=False, steady_state=steady_state)
        refill_us = self.job.scaled_us(max(1, timing.makespan_us - timing.period_us)) if costs else 0
        if is_lost:
            restart = pauses(*costs, ("restart", self.costs.restart_us), ("refill", refill_us))
            reason = "a stage lost all its workers: all workers continue from the last checkpoint"
            return PolicyDecision(steady_state, restart, Loss.SINCE_CHECKPOINT, reason, after)
        transfer_us = move_time_us(self._held_profile, copies, lambda stage: counts[stage] - copies.count(stage))
        wait = pauses(*costs, ("transfer", transfer_us), ("refill", refill_us))
        reason = f"{shape.num_workers - num_live} dead, {len(copies)} copies of a stage's state"
        return PolicyDecision(steady_state, wait, loses, reason, after, keeps_unfinished=loses is Loss.NOTHING)

    @property
    def _held_profile(self) -> Profile:
        """The profile in which a stage has the bytes of all layers that it holds, those of its neighbours among them."""
        problem = self.timings.problem
        stages = (replace(stage, static_bytes=problem.static_bytes(at)) for at, stage in enumerate(problem.profile.stages))
        return replace(problem.profile, stages=tuple(stages), layers=())

    def _timing(self, counts: list[int], num_live: int, slow: SlowPeers) -> IterationTime:
        num_failed = self.job.num_nodes - num_live
        if not slow and num_failed == 0 and self.fault_free:
            return self.fault_free
        if not slow and self.costs.moves:
            return self.timings.normalized(num_failed)
        return self.timings.for_distribution(tuple(self.job.shape.num_pipelines - count for count in counts), slow)

    def _steady_state(self, timing: IterationTime, num_live: int) -> SteadyState:
        step_us = self.job.scaled_us(timing.period_us)
        every = max(1, self.costs.checkpoint_interval_us // step_us)
        return SteadyState(step_us, self.job.samples_per_step, timing.busy_share(num_live), every)


def _slow_workers(members: Members) -> frozenset[Worker]:
    """The slow workers, if they are few enough to be left out."""
    slow = frozenset(worker for worker, speed in members.slow if speed < 1 and worker in members.live)
    return slow if len(slow) <= max(1, MOST_LEFT_OUT * len(members.live)) else frozenset()


def _taking_part(members: Members, holders: _Holders) -> Members:
    """The members without the slowness of workers that are left out."""
    slow, links = (_without(speeds, holders.left_out) for speeds in (members.slow, members.slow_links))
    return replace(members, slow=slow, slow_links=links)


def _without(speeds: Speeds, workers: Iterable[Worker]) -> Speeds:
    return tuple((worker, speed) for worker, speed in speeds if worker not in workers)


def _move(holders: _Holders, counts: list[int], distribution: tuple[int, ...], num_pipelines: int) -> list[int]:
    """Move workers from stages with more workers than planned to stages with fewer; return the new stage of each move."""
    wanted = [num_pipelines - dead for dead in distribution]
    moved = []
    for stage, need in enumerate(wanted):
        while counts[stage] < need:
            source = max(range(len(counts)), key=lambda other: counts[other] - wanted[other])
            if counts[source] <= wanted[source]:
                break
            free = (worker for worker, held in holders.stage_of.items() if held == source and worker not in holders.left_out)
            holders.stage_of[max(free)] = stage
            counts[source] -= 1
            counts[stage] += 1
            moved.append(stage)
    return moved
