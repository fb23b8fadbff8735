"""held_memory(): the memory that a worker held in a run, beside what its plan says of it."""

from recycle.core.events.record import Held
from recycle.core.layer_sums import with_layer_counts
from recycle.core.plans.memory_use import memory_use_of
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.worker.worker_reports import WorkerFinished


def held_memory(report: WorkerFinished, plan: Plan, memory_profile: Profile) -> Held:
    """The memory of a worker, measured and planned: activations by the bytes of this job, its state by those of the plan.

    If layers have moved, and the bytes of this job are not known by layer, those of the plan count.
    """
    counts = plan.problem.layer_counts
    if memory_profile.layers and counts:
        memory_profile = with_layer_counts(memory_profile, counts)
    planned = memory_use_of(report.worker, plan, memory_profile)
    return Held(
        str(report.worker),
        report.peak_bytes,
        report.activation_bytes,
        planned.activation_bytes if planned is not None else 0,
        report.static_bytes,
        plan.problem.static_bytes(report.worker.stage) if planned is not None else 0,
    )
