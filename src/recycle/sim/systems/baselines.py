"""Two baselines that failures never pause: `ideal` and `fault-scaled`.

`ideal`: every live worker computes all the time, without bubble, reduction or pause, in steps so short that no change waits for
one. No system that runs the same ops on the same workers can be faster. `fault-scaled`: the paper's baseline, fault-free 1F1B
times the share of live workers; a system that fills the bubbles of 1F1B can be faster. For both,
a slow worker counts by its speed.
"""

import math
from dataclasses import dataclass
from typing import Any

from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Members, MembershipChange, PolicyDecision, SteadyState

# With few workers an iteration takes long, and workers that join must not wait for its end.
_STEP_US = 10_000


@dataclass(frozen=True, slots=True)
class Ideal:
    """The work of an iteration, spread evenly over the live workers."""

    job: SimulatedJob
    timing: IterationTime
    name: str = "ideal"

    def begin(self, members: Members) -> PolicyDecision:
        capacity = min(members.capacity, self.job.num_nodes)
        if not capacity:
            return PolicyDecision(DOWN)
        sample_us = self.job.scale * self.timing.work_us / capacity / self.job.samples_per_step
        samples = min(self.job.samples_per_step, math.ceil(_STEP_US / sample_us))
        return PolicyDecision(SteadyState(max(1, int(samples * sample_us)), samples))

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        return self.begin(event.members)


@dataclass(frozen=True, slots=True)
class FaultScaled:
    """Fault-free 1F1B, slowed down by the share of dead workers."""

    job: SimulatedJob
    timing: IterationTime
    name: str = "fault-scaled"

    def begin(self, members: Members) -> PolicyDecision:
        capacity = min(members.capacity, self.job.num_nodes)
        if not capacity:
            return PolicyDecision(DOWN)
        step_us = self.job.scaled_us(self.timing.period_us * self.job.num_nodes / capacity)
        return PolicyDecision(SteadyState(step_us, self.job.samples_per_step, self.timing.busy_share(self.job.num_nodes)))

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        return self.begin(event.members)
