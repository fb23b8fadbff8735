"""SYSTEMS: the registry of training systems by name, and the context that each is made from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import UserError
from recycle.sim.fault_free_schedule import FaultFreeSchedule
from recycle.sim.iteration_times import IterationTime, IterationTimes, one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import System
from recycle.sim.shared_layer_choice import shared_layers_of_job
from recycle.sim.systems.bamboo import Bamboo
from recycle.sim.systems.baselines import FaultScaled, Ideal
from recycle.sim.systems.checkpoint_restart import CheckpointRestart
from recycle.sim.systems.constants import CheckpointConstants, Constants, young_us
from recycle.sim.systems.elaswave import ElasWave
from recycle.sim.systems.odyssey import Odyssey, OdysseyRerouting
from recycle.sim.systems.oobleck.policy import Oobleck
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.replica_drop import ReplicaDrop
from recycle.sim.systems.resihp import ResiHP
from recycle.sim.systems.slow_steps import waiting
from recycle.sim.systems.varuna import Varuna, best_layout

DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class SystemContext:
    """The job, the constants of all systems, the cache folder, and the expected time between two failures.

    Systems with checkpoints set their interval by `mtbf_us`. `shared_layers` is how many layers neighbouring stages of ReCycle
    share; None chooses by plans for `num_dead` workers, which are those of a trace if one is known.
    """

    job: SimulatedJob
    constants: Constants
    folder: Path | None = None
    mtbf_us: int = DAY_US
    shared_layers: int | None = None
    num_dead: tuple[int, ...] = ()

    @property
    def baseline(self) -> IterationTime:
        """Fault-free 1F1B."""
        return one_f_one_b_time(self.job.problem(), self.folder)

    def fault_free_time(self, schedule: FaultFreeSchedule) -> IterationTime:
        """An iteration of a schedule in the shape of the job, while every worker is alive.

        Zero bubble is the planner's plan, with split backward and staggered step, in the memory of the GPUs.
        """
        return self.baseline if schedule is FaultFreeSchedule.ONE_F_ONE_B else self.timings.fault_free()

    @property
    def timings(self) -> IterationTimes:
        """Iteration times by re-routing alone."""
        return IterationTimes(self.job.problem(), self.folder)

    @property
    def num_shared(self) -> int:
        """The given or chosen number of shared layers."""
        if self.shared_layers is not None:
            return self.shared_layers
        return shared_layers_of_job(self.job, self.folder, self.num_dead)

    @property
    def cut_timings(self) -> IterationTimes:
        """Iteration times with elastic cuts."""
        return IterationTimes(self.job.problem(shared_layers=self.num_shared), self.folder)

    def steps_between_checkpoints(self, costs: CheckpointConstants, step_us: int) -> int:
        """The steps in the configured interval, or in Young's interval if that is 0."""
        return max(1, (costs.checkpoint_interval_us or young_us(costs.checkpoint_us, self.mtbf_us)) // step_us)


def _varuna(context: SystemContext) -> System:
    costs, layout = context.constants.varuna, best_layout(context.job, context.job.num_nodes)
    step_us = context.job.scaled_us(layout.step_us if layout else 1)
    every = context.steps_between_checkpoints(costs, step_us)
    return Varuna(context.job, every, costs.checkpoint_us, costs.restart_us)


def _odyssey(context: SystemContext) -> System:
    return Odyssey(context.job, context.constants.odyssey, context.mtbf_us, context.constants.oobleck.faults)


def _checkpoint_restart(
    context: SystemContext, has_spares: bool = False, schedule: FaultFreeSchedule = FaultFreeSchedule.ONE_F_ONE_B
) -> System:
    costs, timing = context.constants.checkpoint_restart, context.fault_free_time(schedule)
    step_us = context.job.scaled_us(timing.period_us)
    every = context.steps_between_checkpoints(costs, step_us)
    return CheckpointRestart(context.job, timing, every, costs.checkpoint_us, costs.restart_us, has_spares, schedule)


def _replica_drop(schedule: FaultFreeSchedule) -> Callable[[SystemContext], System]:
    def make(context: SystemContext) -> System:
        timing = context.fault_free_time(schedule)
        return ReplicaDrop(context.job, timing, context.constants.replica_drop.reconfigure_us, schedule)

    return make


def _oobleck(schedule: FaultFreeSchedule) -> Callable[[SystemContext], System]:
    def make(context: SystemContext) -> System:
        costs = context.constants.oobleck
        return Oobleck(context.job, costs.reconfigure_us, costs.faults, schedule)

    return make


SYSTEMS: dict[str, Callable[[SystemContext], System]] = {
    "recycle": lambda context: Recycle(context.job, context.cut_timings, context.constants.recycle),
    "recycle-rerouting": waiting(
        lambda context: Recycle(context.job, context.timings, context.constants.recycle, name="recycle-rerouting")
    ),
    "elaswave": waiting(lambda context: ElasWave(context.job, context.constants.elaswave)),
    "resihp": lambda context: ResiHP(context.job, context.constants.resihp),
    "odyssey": waiting(_odyssey),
    "odyssey-rerouting": waiting(lambda context: OdysseyRerouting(context.job, context.constants.odyssey)),
    "oobleck": waiting(_oobleck(FaultFreeSchedule.ONE_F_ONE_B)),
    "oobleck-zb": waiting(_oobleck(FaultFreeSchedule.ZERO_BUBBLE)),
    "bamboo": waiting(
        lambda context: Bamboo(context.job, context.constants.bamboo.rebalance_us, context.constants.bamboo.fatal_us)
    ),
    "varuna": waiting(_varuna),
    "replica-drop": waiting(_replica_drop(FaultFreeSchedule.ONE_F_ONE_B)),
    "replica-drop-zb": waiting(_replica_drop(FaultFreeSchedule.ZERO_BUBBLE)),
    "checkpoint-restart": waiting(_checkpoint_restart),
    "checkpoint-restart-spare": waiting(lambda context: _checkpoint_restart(context, has_spares=True)),
    "checkpoint-restart-spare-zb": waiting(
        lambda context: _checkpoint_restart(context, has_spares=True, schedule=FaultFreeSchedule.ZERO_BUBBLE)
    ),
    "fault-scaled": lambda context: FaultScaled(context.job, context.baseline),
    "ideal": lambda context: Ideal(context.job, context.baseline),
}

BOUNDS = frozenset({"ideal", "resihp"})
"""Systems whose step is a lower bound, and no schedule that could be run."""


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
