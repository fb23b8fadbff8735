"""What one worker computes by a plan: its layers, each with the share of the micro-batches, and its share of all work."""

from typing import Any

from recycle.core.cluster import Worker
from recycle.core.plans.carried_layers import carried_layers
from recycle.core.plans.plan import Plan


def worker_load(plan: Plan, worker: Worker) -> dict[str, Any]:
    """Return the layers of a worker, counted from 0, and its load: layers on average, and as a share of all layers.

    `layers` is empty if the worker is dead by the plan, or the plan does not know its layers.
    """
    carried = carried_layers(plan)
    layers = carried.get(worker, {})
    num_layers = len({layer for each in carried.values() for layer in each})
    load = sum(layers.values())
    return {
        "layers": [[layer, round(share, 4)] for layer, share in layers.items()],
        "load": round(load, 4),
        "share": round(load / num_layers, 4) if num_layers else 0.0,
        "num_layers": num_layers,
    }
