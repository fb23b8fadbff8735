"""Odyssey, also called Chameleon (arXiv 2508.21613): for each failure the better of re-routing and a new parallelism, by a model.

Published: with t the time of a step and x that of the transition, it takes the way with the largest B/t * (T - x)/T, where T is
the time between two failures. Its estimate of re-routing with f_i of D workers dead at stage i, by a public re-implementation, is

    (S + M - 1 + sum over i of M * f_i / (D - f_i)) * (F + B)

which has neither the split backward nor the staggered step of ReCycle, and adds up what the stages lose although they lose it at
the same time. `OdysseyRerouting` is a system that takes as long as that: the ReCycle that such papers compare with.

Assumptions, in favour of Odyssey:
- It chooses by its estimate, but a re-routed step takes 1F1B with the most loaded stage, not the sum.
- The new parallelism is the fastest of all depths with equal pipelines, and of pipelines of unequal depth as in Oobleck.
- A transition to it copies one stage's parameters and optimizer state to every worker, all at once. New groups take as long as
  ReCycle's. Redundant computation is left out: two stages in one GPU do not fit for the models here.
- The step in flight is run again. A stage without any worker leaves only the new parallelism, and nothing is lost.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import latencies_us
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, PolicyDecision, SteadyState, pauses
from recycle.sim.systems.constants import OdysseyConstants
from recycle.sim.systems.elaswave import live_counts_of
from recycle.sim.systems.oobleck.instances import best_sizes, layout_iteration_us
from recycle.sim.systems.varuna import layout_of

# Every change asks for all depths, and most have as many pipelines as before.
_known_layout = lru_cache(maxsize=65536)(layout_of)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to go on: its name, what Odyssey expects a step to take, what it takes, and how long the transition is."""

    name: str
    estimate_us: float
    step_us: float
    transition_us: int

    def worth(self, between_us: int) -> float:
        """Steps per microsecond until the next failure, by the estimate."""
        return max(0, between_us - self.transition_us) / between_us / self.estimate_us


def rerouting_estimate_us(job: SimulatedJob, counts: tuple[int, ...]) -> float:
    """The published estimate of a re-routed step with so many live workers at each stage, then reduction and optimizer step."""
    shape, profile = job.shape, job.profile()
    more = sum(shape.num_microbatches * (shape.num_pipelines - num) / num for num in counts)
    slots = shape.num_stages + shape.num_microbatches - 1 + more
    return slots * max(latencies_us(profile)) + _finish_us(job, counts)


def rerouted_us(job: SimulatedJob, counts: tuple[int, ...]) -> float:
    """The time of a re-routed step of 1F1B: the most loaded stage decides."""
    shape, profile = job.shape, job.profile()
    own = latencies_us(profile)
    loads = [-(-shape.num_chains // num) * time for num, time in zip(counts, own, strict=True)]
    fill = max(sum(own) - time + load for time, load in zip(own, loads, strict=True))
    travel = 2 * sum(profile.comm_us(stage) for stage in range(shape.num_stages - 1))
    return fill + travel + _finish_us(job, counts)


def _finish_us(job: SimulatedJob, counts: tuple[int, ...]) -> float:
    profile = job.profile()
    return max(profile.reduce_us(stage, num) + profile.stages[stage].optimizer_us for stage, num in enumerate(counts))


@dataclass(frozen=True, slots=True)
class Odyssey:
    """The policy; its state is the name of the way. `between_us` is the expected time between two failures."""

    job: SimulatedJob
    costs: OdysseyConstants
    between_us: int
    faults: int = 3
    name: str = "odyssey"

    def begin(self, members: Members) -> PolicyDecision:
        return self._continue(members, None, (), Loss.NOTHING)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        if not event.left and not event.joined:
            return self._continue(event.members, state, (), Loss.NOTHING)
        costs = (("regroup", self.costs.regroup_us), ("plan", self.costs.plan_us))
        if not event.left:
            return self._continue(event.members, state, costs, Loss.NOTHING)
        return self._continue(event.members, state, (("detect", self.costs.detect_us), *costs), Loss.STEP)

    def ways(self, members: Members, before: str | None = None) -> list[Way]:
        """All ways to go on with these members; going on as before needs no copy."""
        counts, found = live_counts_of(members), []
        copy_us = self.job.profile().peer_link.time_us(max(self.job.base_layers) * self.job.layer_state_bytes)
        if all(counts):
            # After another parallelism every worker needs its old stage again.
            back_us = copy_us if before not in (None, "re-routing") else 0
            found.append(Way("re-routing", rerouting_estimate_us(self.job, counts), rerouted_us(self.job, counts), back_us))
        num_nodes = min(members.num_live, self.job.num_nodes)
        for depth in range(1, min(self.job.model.num_layers, num_nodes) + 1):
            layout = _known_layout(self.job, depth, num_nodes // depth)
            if layout is not None:
                name = f"{layout.num_pipelines} pipelines of {depth}"
                found.append(Way(name, layout.step_us, layout.step_us, 0 if name == before else copy_us))
        if sizes := best_sizes(self.job, self.faults, num_nodes):
            name = f"pipelines of {', '.join(map(str, sizes))}"
            step_us = layout_iteration_us(self.job, self.faults, tuple(sorted(sizes, reverse=True)))
            found.append(Way(name, step_us, step_us, 0 if name == before else copy_us))
        return found

    def _continue(self, members: Members, before: str | None, costs: tuple[tuple[str, int], ...], loses: Loss) -> PolicyDecision:
        ways = self.ways(members, before)
        if not ways:
            return PolicyDecision(DOWN, (), loses, "too few workers for any parallelism: the job waits", None)
        way = max(ways, key=lambda one: one.worth(self.between_us))
        work_us = self.job.num_microbatches * sum(latencies_us(self.job.profile()))
        busy_share = min(1.0, work_us / (way.step_us * members.num_live))
        steady_state = SteadyState(self.job.scaled_us(way.step_us), self.job.samples_per_step, busy_share)
        wait = pauses(*costs, ("transfer", way.transition_us)) if costs else ()
        return PolicyDecision(steady_state, wait, loses, way.name, way.name, keeps_unfinished=loses is Loss.NOTHING)


@dataclass(frozen=True, slots=True)
class OdysseyRerouting:
    """ReCycle as Odyssey's paper estimates it: re-routing alone, by the published estimate. It has no state."""

    job: SimulatedJob
    costs: OdysseyConstants
    name: str = "odyssey-rerouting"

    def begin(self, members: Members) -> PolicyDecision:
        return self._continue(members, (), Loss.NOTHING)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        if not event.left and not event.joined:
            return self._continue(event.members, (), Loss.NOTHING)
        costs = (("regroup", self.costs.regroup_us), ("plan", self.costs.plan_us))
        notice = (("detect", self.costs.detect_us),) if event.left else ()
        return self._continue(event.members, (*notice, *costs), Loss.STEP if event.left else Loss.NOTHING)

    def _continue(self, members: Members, costs: tuple[tuple[str, int], ...], loses: Loss) -> PolicyDecision:
        counts = live_counts_of(members)
        if not all(counts):
            return PolicyDecision(DOWN, (), loses, f"no worker is left at stage {counts.index(0)}: the job waits for a node")
        step_us = rerouting_estimate_us(self.job, counts)
        work_us = self.job.num_microbatches * sum(latencies_us(self.job.profile()))
        busy_share = min(1.0, work_us / (step_us * sum(counts)))
        steady_state = SteadyState(self.job.scaled_us(step_us), self.job.samples_per_step, busy_share)
        return PolicyDecision(steady_state, pauses(*costs), loses, "re-routing", keeps_unfinished=loses is Loss.NOTHING)
