"""Which layers are computed where by a plan: by each worker, and on average by each stage, for displays."""

from recycle.core.cluster import Worker
from recycle.core.layer_sums import LayerSums
from recycle.core.op import Kind
from recycle.core.plans.plan import Plan


def carried_layers(plan: Plan) -> dict[Worker, dict[int, float]]:
    """Return for each live worker, and each layer of the model, the share of the micro-batches for which the worker computes it.

    The micro-batches are those of all pipelines in one iteration. The sum over a worker's layers is its load, in layers. It is
    empty if the plan's profile does not know the layers of its stages.
    """
    problem = plan.problem
    if not problem.profile.layers:
        return {}
    bounds, costs, num_chains = LayerSums(problem.profile).bounds, plan.costs, problem.shape.num_chains
    found: dict[Worker, dict[int, float]] = {}
    for row in plan.rows:
        stage, counts = row.worker.stage, dict[int, int]()
        for kind, chain in zip(row.kinds, row.chains, strict=True):
            if kind == Kind.F.value:
                before, after = costs.offsets(stage, chain)
                for layer in range(bounds[stage] + before, bounds[stage + 1] + after):
                    counts[layer] = counts.get(layer, 0) + 1
        found[row.worker] = {layer: count / num_chains for layer, count in sorted(counts.items())}
    return found


def carried_by_stage(plan: Plan) -> tuple[float, ...]:
    """The mean number of layers that each stage computes for a micro-batch; empty if the plan has no shared layers."""
    if not plan.problem.shared_layers:
        return ()
    num_chains = plan.problem.shape.num_chains
    # A boundary's offset is what the stage before it computes more, and the stage after it less.
    offsets = [0.0, *(sum(boundary) / num_chains for boundary in plan.cuts or ((),) * (plan.problem.shape.num_stages - 1)), 0.0]
    return tuple(round(own + offsets[stage + 1] - offsets[stage], 2) for stage, own in enumerate(plan.problem.layer_counts))
