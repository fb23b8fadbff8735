"""Slow workers and links: how much longer a step takes, and systems that wait for the slowest worker.

A worker at speed x needs 1/x of the time for its own work, and everybody waits for it: the step becomes longer by what its work
becomes longer. With equal stages and 1F1B that is exact. A slow link lengthens the reduction of its stage, which goes around a
ring, and the messages of one micro-batch on its way down and up; the other messages overlap with computation, unless the link
cannot carry them all within a step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recycle.core.cluster import Worker
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import ChangeKind, Members, MembershipChange, PolicyDecision, SteadyState, System

EVEN: Mapping[Worker, float] = {}
"""A plan that knows of no slow worker."""


def stretched(job: SimulatedJob, steady: SteadyState, members: Members, planned: Mapping[Worker, float] = EVEN) -> SteadyState:
    """The steady state while some workers are slower than `planned`; those that are faster than planned wait."""
    if steady.is_down:
        return steady
    slowest = max((planned.get(worker, 1.0) / speed for worker, speed in members.slow), default=1.0)
    longer = 1 + steady.busy_share * max(0.0, slowest - 1)
    step_us = max(steady.step_us * longer + link_delay_us(job, members), _link_time_us(job, members))
    if round(step_us) == steady.step_us:
        return steady
    return replace(steady, step_us=round(step_us), busy_share=steady.busy_share * steady.step_us / step_us)


def link_delay_us(job: SimulatedJob, members: Members) -> float:
    """How much longer a step takes because of the slowest link."""
    profile, num_pipelines = job.profile(), job.shape.num_pipelines
    inner = range(job.shape.num_stages - 1)

    def usual_us(stage: int) -> float:
        message = max((profile.comm_us(boundary) for boundary in (stage - 1, stage) if boundary in inner), default=0)
        return profile.reduce_us(stage, num_pipelines) + 2 * message

    return max((job.scale * (1 / speed - 1) * usual_us(worker.stage) for worker, speed in members.slow_links), default=0.0)


def _link_time_us(job: SimulatedJob, members: Members) -> float:
    """The time that the slowest link needs for all messages of a step in one direction."""
    if job.shape.num_stages == 1:
        return 0.0
    message = max(job.profile().comm_us(stage) for stage in range(job.shape.num_stages - 1))
    return max((job.scale * job.shape.num_microbatches * message / speed for _, speed in members.slow_links), default=0.0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The state of a system, and its steady state while all workers are as fast as usual."""

    state: Any
    steady_state: SteadyState


@dataclass(frozen=True, slots=True)
class WaitsForSlowest:
    """A system that does nothing about slow workers and links: each step waits for them. Its own policy decides the rest."""

    system: System
    job: SimulatedJob

    @property
    def name(self) -> str:
        return self.system.name

    def begin(self, members: Members) -> PolicyDecision:
        return self._stretch(self.system.begin(_as_usual(members)), members)

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        assert isinstance(state, _Kept)
        if event.kind is ChangeKind.MEMBERS:
            unaware = replace(event, members=_as_usual(event.members))
            return self._stretch(self.system.change(unaware, state.state), event.members)
        kept = PolicyDecision(
            state.steady_state, reason="every step waits for the slowest", state=state.state, keeps_unfinished=True
        )
        return self._stretch(kept, event.members)

    def _stretch(self, decision: PolicyDecision, members: Members) -> PolicyDecision:
        kept = _Kept(decision.state, decision.steady_state)
        return replace(decision, steady_state=stretched(self.job, decision.steady_state, members), state=kept)


def _as_usual(members: Members) -> Members:
    """The members as a system sees them that does not look at speeds."""
    return replace(members, slow=(), slow_links=())


def waiting(make: Callable[[Any], System]) -> Callable[[Any], System]:
    """The maker of a system, changed so that the system waits for slow workers."""
    return lambda context: WaitsForSlowest(make(context), context.job)
