"""carried_by_stage: how many layers each stage computes for a micro-batch by a plan with shared layers, for displays."""

from recycle.core.plans.plan import Plan


def carried_by_stage(plan: Plan) -> tuple[float, ...]:
    """The mean number of layers that each stage computes for a micro-batch; empty if the plan has no shared layers."""
    if not plan.problem.shared_layers:
        return ()
    num_chains = plan.problem.shape.num_chains
    # A boundary's offset is what the stage before it computes more, and the stage after it less.
    offsets = [0.0, *(sum(boundary) / num_chains for boundary in plan.cuts or ((),) * (plan.problem.shape.num_stages - 1)), 0.0]
    return tuple(round(own + offsets[stage + 1] - offsets[stage], 2) for stage, own in enumerate(plan.problem.layer_counts))
