"""`fault_free_rates`: the throughputs without failures that results are compared with.

A share of fault-free 1F1B mixes two things: how well a system fills the pipeline while every worker is alive, and what failures
cost it. Two more shares tell them apart:

- *goodput*: the throughput over that of the same system with every worker alive at its usual speed. Steps alone count in the
  latter: neither pauses nor checkpoints, because they are part of fault handling. What is missing to 1 is fault handling.
- *best share*: the throughput over that of the best fault-free schedule that anybody could run on the same workers. That is the
  fastest of (a) the planner's zero-bubble plans for the shape of the job, in the memory of its GPUs: split backward, staggered
  step, and 0, 1 or 2 shared layers, as far as they fit; (b) the fault-free step of every system in `SYSTEMS` that runs a
  schedule, in the pipelines that it chooses. `BOUNDS` are left out, because nobody can run them.

So best share over goodput is scheduling alone: the system's fault-free schedule beside the best one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from recycle.core.errors import UserError
from recycle.sim.campaign.campaign import TIMINGS_OF
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.policy import Members, all_places
from recycle.sim.shared_layer_choice import MOST_SHARED
from recycle.sim.systems.registry import BOUNDS, SYSTEMS, SystemContext


@dataclass(frozen=True, slots=True)
class FaultFreeRates:
    """Samples a second with every worker alive: of 1F1B, of the best schedule and whose that is, and of each system itself."""

    one_f_one_b: float
    best: float
    best_schedule: str
    own: Mapping[str, float]

    def goodput(self, system: str, throughput: float) -> float | None:
        """The throughput as a share of the system's own without failures; None if it cannot run the job at all."""
        return throughput / self.own[system] if self.own[system] else None

    def best_share(self, throughput: float) -> float:
        """The throughput as a share of the best fault-free schedule."""
        return throughput / self.best


def fault_free_rates(context: SystemContext, systems: Iterable[str]) -> FaultFreeRates:
    """Return the fault-free throughputs of a job, and of these systems."""
    best, name = max(_schedules(context), key=lambda found: found[0])
    own = {system: own_fault_free(context, system) for system in systems}
    one_f_one_b = _samples_per_s(context, context.baseline.period_us)
    return FaultFreeRates(one_f_one_b, best, name, MappingProxyType(own))


def own_fault_free(context: SystemContext, system: str) -> float:
    """Samples a second of a system while every worker is alive, without pauses and checkpoints; 0 if it cannot run the job."""
    shape = context.job.shape
    members = Members(shape, all_places(shape))
    return SYSTEMS[system](context).begin(members).steady_state.samples_per_s


def _schedules(context: SystemContext) -> Iterator[tuple[float, str]]:
    """The throughput and the name of every fault-free schedule that somebody could run."""
    for num_shared in sorted({*range(MOST_SHARED + 1), context.shared_layers or 0}):
        try:
            problem = context.job.problem(shared_layers=num_shared)
        except UserError:
            continue  # a stage has fewer layers, or they do not fit in the memory
        name = f"zero-bubble plan, shared layers: {num_shared}" if num_shared else "zero-bubble plan"
        yield _samples_per_s(context, IterationTimes(problem, context.folder).fault_free().period_us), name
    for system in SYSTEMS:
        if system not in BOUNDS and system not in TIMINGS_OF:  # their plans are those above
            yield own_fault_free(context, system), system


def _samples_per_s(context: SystemContext, period_us: int) -> float:
    return context.job.samples_per_step * 1e6 / context.job.scaled_us(period_us)
