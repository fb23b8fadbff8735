"""SYSTEMS: the registry of training systems by name, and the context that each is made from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import UserError
from recycle.sim.iteration_times import IterationTime, IterationTimes, one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import System
from recycle.sim.systems.bamboo import Bamboo
from recycle.sim.systems.baselines import FaultScaled, Ideal
from recycle.sim.systems.checkpoint_restart import CheckpointRestart
from recycle.sim.systems.constants import CheckpointConstants, Constants, young_us
from recycle.sim.systems.oobleck.policy import Oobleck
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.replica_drop import ReplicaDrop
from recycle.sim.systems.varuna import Varuna, best_layout

DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class SystemContext:
    """The job, the constants of all systems, the cache folder, and the expected time between two failures.

    Systems with checkpoints set their interval by `mtbf_us`.
    """

    job: SimulatedJob
    constants: Constants
    folder: Path | None = None
    mtbf_us: int = DAY_US

    @property
    def baseline(self) -> IterationTime:
        """Fault-free 1F1B."""
        return one_f_one_b_time(self.job.problem(), self.folder)

    @property
    def timings(self) -> IterationTimes:
        return IterationTimes(self.job.problem(), self.folder)

    def steps_between_checkpoints(self, costs: CheckpointConstants, step_us: int) -> int:
        """The steps in the configured interval, or in Young's interval if that is 0."""
        return max(1, (costs.checkpoint_interval_us or young_us(costs.checkpoint_us, self.mtbf_us)) // step_us)


def _varuna(context: SystemContext) -> System:
    costs, layout = context.constants.varuna, best_layout(context.job, context.job.num_nodes)
    step_us = context.job.scaled_us(layout.step_us if layout else 1)
    every = context.steps_between_checkpoints(costs, step_us)
    return Varuna(context.job, every, costs.checkpoint_us, costs.restart_us)


def _checkpoint_restart(context: SystemContext, has_spares: bool = False) -> System:
    costs, baseline = context.constants.checkpoint_restart, context.baseline
    step_us = context.job.scaled_us(baseline.period_us)
    every = context.steps_between_checkpoints(costs, step_us)
    return CheckpointRestart(context.job, baseline, every, costs.checkpoint_us, costs.restart_us, has_spares)


SYSTEMS: dict[str, Callable[[SystemContext], System]] = {
    "recycle": lambda context: Recycle(context.job, context.timings, context.constants.recycle),
    "oobleck": lambda context: Oobleck(context.job, context.constants.oobleck.reconfigure_us, context.constants.oobleck.faults),
    "bamboo": lambda context: Bamboo(context.job, context.constants.bamboo.rebalance_us, context.constants.bamboo.fatal_us),
    "varuna": _varuna,
    "replica-drop": lambda context: ReplicaDrop(context.job, context.baseline, context.constants.replica_drop.reconfigure_us),
    "checkpoint-restart": _checkpoint_restart,
    "checkpoint-restart-spare": lambda context: _checkpoint_restart(context, has_spares=True),
    "fault-scaled": lambda context: FaultScaled(context.job, context.baseline),
    "ideal": lambda context: Ideal(context.job, context.baseline),
}


def parse_systems(text: str) -> list[str]:
    """Read a list of systems, or `all`; each is named once."""
    names = list(SYSTEMS) if text.strip() == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"no system is named: choose from {', '.join(SYSTEMS)}, or all")
    for name in names:
        if name not in SYSTEMS:
            raise UserError(f"{name!r} is not a system: choose from {', '.join(SYSTEMS)}, or all")
        if names.count(name) > 1:
            raise UserError(f"{name} is named twice: name each system once")
    return names
