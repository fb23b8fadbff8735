"""warm_ups: how many ops at the head of each row may run before the verdict on the last step is known.

A warm-up holds forward passes only, so that no gradient is touched, and only forward passes that need nothing but other forward
passes of a warm-up. So every worker can play all of its warm-up whatever the verdict will be. If the verdict is that the step was
wrong, all workers begin the iteration again, and no worker waits for a message that is never sent.
"""

import math

from recycle.core.cluster import Worker
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, chain_of, microbatch_of
from recycle.core.plans.routes import Routes
from recycle.core.plans.rules import needs

_NEVER = math.inf


def warm_ups(plan: Plan, routes: Routes) -> dict[Worker, int]:
    """How many ops at the head of each row are its warm-up."""
    lengths = {row.worker: len(row.kinds) - len(row.kinds.lstrip(Kind.F.value)) for row in plan.rows}
    indices = {row.worker: {chain: index for index, chain in enumerate(row.chains[: lengths[row.worker]])} for row in plan.rows}
    while shorter := _shortened(plan, routes, lengths, indices):
        lengths |= shorter
    return lengths


def _shortened(
    plan: Plan, routes: Routes, lengths: dict[Worker, int], indices: dict[Worker, dict[int, int]]
) -> dict[Worker, int]:
    """Rows whose warm-up must end earlier, because an op in it needs one that is in no warm-up."""
    shape, found = plan.problem.shape, {}
    for row in plan.rows:
        for index, chain in enumerate(row.chains[: lengths[row.worker]]):
            op = Op(row.worker.stage, Kind.F, microbatch_of(shape, chain))
            makers = ((routes.worker(before.stage, chain), before) for before in needs(op, shape.num_stages))
            if any(indices[maker].get(chain_of(shape, before.microbatch), _NEVER) >= lengths[maker] for maker, before in makers):
                found[row.worker] = index
                break
    return found
