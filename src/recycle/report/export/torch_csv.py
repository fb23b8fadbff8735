"""One pipeline of a fault-free plan in the CSV form of torch.distributed.pipelining, for its `_load_csv` with "compute_only".

A row is a stage, a cell an action such as `2F0`: F forward, B whole backward, I and W its two halves. The form has no times: a
column is a step, and in an empty cell the stage waits for another one.
"""

from recycle.core.errors import UserError
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import needs


def draw_torch_csv(plan: Plan, pipeline: int = 0) -> str:
    """Return the rows of `pipeline`, one line a stage, all equally long."""
    _refuse_inexpressible(plan, pipeline)
    steps = _steps(plan, pipeline)
    length = 1 + max(steps.values(), default=-1)
    cells = [[""] * length for _ in range(plan.problem.shape.num_stages)]
    for op, step in steps.items():
        cells[op.stage][step] = op.text(pipeline)
    return "".join(",".join(row) + "\n" for row in cells)


def _refuse_inexpressible(plan: Plan, pipeline: int) -> None:
    num_pipelines = plan.problem.shape.num_pipelines
    if not 0 <= pipeline < num_pipelines:
        raise UserError(f"there is no pipeline {pipeline} to export: choose one from 0 to {num_pipelines - 1}")
    if plan.cuts:
        raise UserError(
            "the CSV form of torch.distributed.pipelining cannot say that a stage computes other layers for some micro-batches, "
            "and this plan cuts some elsewhere; export a plan with --shared-layers 0"
        )
    rerouted = next((slot for slot in plan.all_slots() if slot.is_rerouted), None)
    if rerouted is None and not plan.problem.cluster.failed:
        return
    example = f": {rerouted.worker} runs {rerouted.op}" if rerouted else ""
    raise UserError(
        "the CSV form of torch.distributed.pipelining cannot say that a worker of another pipeline runs a micro-batch, "
        f"and this plan needs that{example}; export a plan without failures"
    )


def _steps(plan: Plan, pipeline: int) -> dict[Op, int]:
    """Return the earliest step of each op after the op before it on its worker and all ops that it needs."""
    slots = [slot for row in plan.rows if row.worker.pipeline == pipeline for slot in plan.slots(row)]
    steps: dict[Op, int] = {}
    last = [-1] * plan.problem.shape.num_stages
    for slot in sorted(slots, key=lambda slot: (slot.start_us, slot.op.stage)):
        before = [last[slot.op.stage]]
        for need in needs(slot.op, plan.problem.shape.num_stages):
            fused = Op(need.stage, Kind.B, need.microbatch)
            before.append(steps.get(need, steps.get(fused, -1)))
        steps[slot.op] = last[slot.op.stage] = 1 + max(before)
    return steps
