"""The warm-up of an iteration: what can be played before it is known whether the step before it was right.

It is the head of every row: forward passes alone, so that no gradient is touched, and only such as need nothing but other forward
passes of the warm-up. So every worker can play all of its warm-up whatever the verdict will be, and if the verdict is that the
step was wrong, all begin the iteration again; nobody waits for a message that nobody sends.

The verdict costs no time beyond its own way: the first backward pass of an iteration needs a forward pass at every stage, which
each follow that stage's step, so that by then all stages have said what they have to say.
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
    places = {row.worker: {chain: place for place, chain in enumerate(row.chains[: lengths[row.worker]])} for row in plan.rows}
    while cut := _cut(plan, routes, lengths, places):
        lengths |= cut
    return lengths


def _cut(plan: Plan, routes: Routes, lengths: dict[Worker, int], places: dict[Worker, dict[int, int]]) -> dict[Worker, int]:
    """Rows whose warm-up must end earlier, because an op in it needs one that is in no warm-up."""
    shape, found = plan.problem.shape, {}
    for row in plan.rows:
        for place, chain in enumerate(row.chains[: lengths[row.worker]]):
            op = Op(row.worker.stage, Kind.F, microbatch_of(shape, chain))
            makers = ((routes.worker(before.stage, chain), before) for before in needs(op, shape.num_stages))
            if any(places[maker].get(chain_of(shape, before.microbatch), _NEVER) >= lengths[maker] for maker, before in makers):
                found[row.worker] = place
                break
    return found
