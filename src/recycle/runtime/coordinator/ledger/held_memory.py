"""What workers report when they have finished: the memory that each held, beside what its plan says, and its waits for data."""

from collections.abc import Mapping
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.events.record import Held
from recycle.core.layer_sums import with_layer_counts
from recycle.core.plans.memory_use import memory_use_of
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.worker.worker_reports import WorkerFinished


def data_wait_shares(finished: Mapping[Worker, WorkerFinished]) -> dict[str, float]:
    """The share of its time that each worker waited for data."""
    reports = sorted(finished.items())
    return {str(worker): round(each.data_wait_us / each.trained_us, 5) for worker, each in reports if each.trained_us}


def memory_by_worker(held: Mapping[str, Held]) -> dict[str, Any]:
    """The memory of all workers, as the entries of a run's summary."""
    return {
        "peak_memory_bytes": {name: one.peak_bytes for name, one in held.items()},
        "activation_bytes": {name: one.activation_bytes for name, one in held.items()},
        "planned_activation_bytes": {name: one.planned_bytes for name, one in held.items()},
        "static_bytes": {name: one.static_bytes for name, one in held.items()},
        "planned_static_bytes": {name: one.planned_static_bytes for name, one in held.items()},
    }


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
