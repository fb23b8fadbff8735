"""held_memory(): the memory that a worker held in a run, beside what its plan says of it."""

from recycle.core.events.record import Held
from recycle.core.plans.memory_use import memory_use_of
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.worker.worker_reports import WorkerFinished


def held_memory(report: WorkerFinished, plan: Plan, memory_profile: Profile) -> Held:
    """The memory of a worker, measured and planned: activations by the bytes of this job, its state by those of the plan."""
    planned = memory_use_of(report.worker, plan, memory_profile)
    return Held(
        str(report.worker),
        report.peak_bytes,
        report.activation_bytes,
        planned.activation_bytes if planned is not None else 0,
        report.static_bytes,
        plan.problem.static_bytes(report.worker.stage) if planned is not None else 0,
    )
