"""The line-up: every system by the name that a user gives it, made for a job and its constants."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import UserError
from recycle.sim.iteration_times import IterationTime, IterationTimes, one_f_one_b
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import System
from recycle.sim.systems.bamboo import Bamboo
from recycle.sim.systems.checkpoint_restart import CheckpointRestart
from recycle.sim.systems.constants import Constants, young_us
from recycle.sim.systems.ideal import FaultScaled, Ideal
from recycle.sim.systems.oobleck.policy import Oobleck
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.replica_drop import ReplicaDrop
from recycle.sim.systems.varuna import Varuna, best_layout

DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class SystemContext:
    """What a system is made from: the job, the constants of all systems, and where timings are kept.

    `mtbf_us` is the time between two failures that who sets a checkpoint interval expects.
    """

    job: SimulatedJob
    constants: Constants
    folder: Path | None = None
    mtbf_us: int = DAY_US

    @property
    def baseline(self) -> IterationTime:
        """Fault-free 1F1B."""
        return one_f_one_b(self.job.problem(), self.folder)

    @property
    def timings(self) -> IterationTimes:
        return IterationTimes(self.job.problem(), self.folder)

    def steps_between_checkpoints(self, interval_us: int, checkpoint_us: int, step_us: int) -> int:
        """The steps in `interval_us`, or in Young's interval if that is 0."""
        return max(1, (interval_us or young_us(checkpoint_us, self.mtbf_us)) // step_us)


def _recycle(given: SystemContext) -> System:
    return Recycle(given.job, given.timings, given.constants.recycle)


def _oobleck(given: SystemContext) -> System:
    return Oobleck(given.job, given.constants.oobleck.reconfigure_us, given.constants.oobleck.faults)


def _bamboo(given: SystemContext) -> System:
    return Bamboo(given.job, given.constants.bamboo.rebalance_us, given.constants.bamboo.fatal_us)


def _varuna(given: SystemContext) -> System:
    costs, layout = given.constants.varuna, best_layout(given.job, given.job.num_nodes)
    step_us = given.job.scaled_us(layout.step_us if layout else 1)
    every = given.steps_between_checkpoints(costs.checkpoint_interval_us, costs.checkpoint_us, step_us)
    return Varuna(given.job, every, costs.checkpoint_us, costs.restart_us)


def _replica_drop(given: SystemContext) -> System:
    return ReplicaDrop(given.job, given.baseline, given.constants.replica_drop.reconfigure_us)


def _checkpoint_restart(given: SystemContext, has_spares: bool = False) -> System:
    costs, baseline = given.constants.checkpoint_restart, given.baseline
    step_us = given.job.scaled_us(baseline.period_us)
    every = given.steps_between_checkpoints(costs.checkpoint_interval_us, costs.checkpoint_us, step_us)
    return CheckpointRestart(given.job, baseline, every, costs.checkpoint_us, costs.restart_us, has_spares)


def _checkpoint_restart_spare(given: SystemContext) -> System:
    return _checkpoint_restart(given, has_spares=True)


def _ideal(given: SystemContext) -> System:
    return Ideal(given.job, given.baseline)


def _fault_scaled(given: SystemContext) -> System:
    return FaultScaled(given.job, given.baseline)


SYSTEMS: dict[str, Callable[[SystemContext], System]] = {
    "recycle": _recycle,
    "oobleck": _oobleck,
    "bamboo": _bamboo,
    "varuna": _varuna,
    "replica-drop": _replica_drop,
    "checkpoint-restart": _checkpoint_restart,
    "checkpoint-restart-spare": _checkpoint_restart_spare,
    "fault-scaled": _fault_scaled,
    "ideal": _ideal,
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
