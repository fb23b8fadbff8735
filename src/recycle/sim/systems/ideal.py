"""Two yardsticks that no failure can pause.

`ideal`: every live worker computes all the time; no bubble, no reduction, no pause, and steps so short that a change waits for
none. No system that runs the same ops on the same workers can be faster. `fault-scaled`: the paper's yardstick, fault-free 1F1B
times the share of workers that are alive; a system that fills 1F1B's bubbles can be faster than this one.
"""

import math
from dataclasses import dataclass
from typing import Any

from recycle.sim.iteration_times import IterationTime
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import DOWN, Event, Members, PolicyDecision, Regime

# With a few workers an iteration takes long; one that began before others joined must not keep them waiting.
_STEP_US = 10_000


@dataclass(frozen=True, slots=True)
class Ideal:
    """The work of an iteration, spread evenly over the live workers."""

    job: SimulatedJob
    timing: IterationTime
    name: str = "ideal"

    def begin(self, members: Members) -> PolicyDecision:
        num_live = min(members.num_live, self.job.num_nodes)
        if not num_live:
            return PolicyDecision(DOWN)
        sample_us = self.job.scale * self.timing.work_us / num_live / self.job.samples_per_step
        samples = min(self.job.samples_per_step, math.ceil(_STEP_US / sample_us))
        return PolicyDecision(Regime(max(1, int(samples * sample_us)), samples))

    def change(self, event: Event, state: Any) -> PolicyDecision:
        return self.begin(event.members)


@dataclass(frozen=True, slots=True)
class FaultScaled:
    """Fault-free 1F1B, slowed by the share of workers that are dead."""

    job: SimulatedJob
    timing: IterationTime
    name: str = "fault-scaled"

    def begin(self, members: Members) -> PolicyDecision:
        num_live = min(members.num_live, self.job.num_nodes)
        if not num_live:
            return PolicyDecision(DOWN)
        step_us = self.job.scaled_us(self.timing.period_us * self.job.num_nodes / num_live)
        return PolicyDecision(Regime(step_us, self.job.samples_per_step, self.timing.busy_share(self.job.num_nodes)))

    def change(self, event: Event, state: Any) -> PolicyDecision:
        return self.begin(event.members)
