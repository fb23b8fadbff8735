"""What a choice needs of a GPU's memory, and whether a system that does not ask for it fits.

Oobleck and Odyssey choose pipelines without looking at the activations that 1F1B holds. A choice that needs more than a GPU has
is not advised, whatever its step would take.
"""

import re
from typing import Any

from recycle.core.plans.memory_use import memory_use
from recycle.core.units import format_bytes
from recycle.sim.advise.choices import BOUND_TO_SHAPE, SystemChoice, is_planned, job_of
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.iteration_times import fault_free_plan
from recycle.sim.job import SimulatedJob
from recycle.sim.one_f_one_b import most_bytes
from recycle.sim.systems.oobleck.policy import OobleckLayout
from recycle.sim.systems.varuna import VarunaLayout

_LOOKS_LATER = ("oobleck", "odyssey")


def memory_problem(job: SimulatedJob, system: str, state: Any) -> str:
    """Why the pipelines that a system chose do not fit, in a sentence; empty if they fit or it looked itself."""
    depths = depths_of(job, system, state)
    if not depths or not system.startswith(_LOOKS_LATER):
        return ""
    needed = one_f_one_b_bytes(job, depths)
    return _too_much(needed, job) if needed > job.gpu.memory_bytes else ""


def never_fits(job: SimulatedJob, system: str) -> str:
    """Why no pipelines of a system fit that looks at activations after it has chosen them; empty if some may.

    The shallowest of them is one of at most so many as all workers are enough for, and has as many micro-batches at least.
    """
    if not system.startswith(_LOOKS_LATER):
        return ""
    depths = range(1, min(job.model.num_layers, job.num_nodes) + 1)
    needed = min(most_bytes(job.profile(depth), -(-job.num_microbatches * depth // job.num_nodes)) for depth in depths)
    return _too_much(needed, job) if needed > job.gpu.memory_bytes else ""


def _too_much(needed: int, job: SimulatedJob) -> str:
    return f"1F1B of its pipelines needs {format_bytes(needed)} of {format_bytes(job.gpu.memory_bytes)}"


def depths_of(job: SimulatedJob, system: str, state: Any) -> tuple[int, ...]:
    """The numbers of stages of the pipelines that a system runs, by the state of its decision, each as often as it occurs."""
    if isinstance(state, OobleckLayout):
        return state.sizes
    if isinstance(state, VarunaLayout):
        return (state.num_stages,) * state.num_pipelines
    if isinstance(state, str) and (found := re.fullmatch(r"(\d+) pipelines of (\d+)", state)):
        return (int(found[2]),) * int(found[1])
    if isinstance(state, str) and state.startswith("pipelines of "):
        return tuple(int(size) for size in state.removeprefix("pipelines of ").split(", "))
    return (job.shape.num_stages,) * job.shape.num_pipelines


def one_f_one_b_bytes(job: SimulatedJob, depths: tuple[int, ...], times: int = 1) -> int:
    """The memory of the fullest GPU of pipelines of these depths in 1F1B, if layers are spread by time.

    `times` as many micro-batches are in flight as in 1F1B.
    """
    each = -(-job.num_microbatches // len(depths))
    # Oobleck counts the embedding and the head as layers, so that its pipelines may have more stages than the model has layers.
    return max(most_bytes(job.profile(min(depth, job.model.num_layers)), each, times) for depth in set(depths))


def memory_bytes(question: ClusterQuestion, choice: SystemChoice, depths: tuple[int, ...]) -> int:
    """The memory of the fullest GPU without failures: by the plan, if there is one, else by a schedule that fits in the GPU's.

    Pipelines of unequal depth have no plan here: without bubbles they are taken to hold twice the micro-batches of 1F1B.
    """
    job = job_of(question, choice)
    if not is_planned(choice.system):
        return min(one_f_one_b_bytes(job, depths), job.gpu.memory_bytes)
    if not choice.system.startswith(BOUND_TO_SHAPE):
        return min(one_f_one_b_bytes(job, depths, times=2), job.gpu.memory_bytes)
    plan = fault_free_plan(job.problem(shared_layers=choice.shared_layers))
    return max(use.total_bytes for use in memory_use(plan).values())
