"""`exchange_places`: peers that exchange their places, so that messages go around slow links.

Peers of a stage hold the same state. If two of them exchange their places, each has other neighbours, nothing is copied, and the
plan stays the same.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from recycle.control.drift.relative_links import WorkerPair
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanAssignment


def exchange_places(
    assignment: PlanAssignment, delays_us: Mapping[WorkerPair, float], speed_of: Callable[[Worker], float]
) -> PlanAssignment:
    """Return the assignment with places exchanged, one exchange after the other as long as each saves time on slow links.

    `delays_us` is how much longer a message takes between workers at their present places. Workers change places only with peers
    of the same speed: the plan is made for speeds.
    """
    traffic, places = _traffic(assignment.plan), dict(assignment.places)
    rows = {now: row for row, now in places.items()}
    slow = {pair: delay_us for pair, delay_us in delays_us.items() if pair.first in rows and pair.second in rows}
    peers: dict[tuple[int, float], list[Worker]] = defaultdict(list)
    for now, row in rows.items():
        peers[row.stage, speed_of(now)].append(now)

    def delay_us() -> float:
        return sum(traffic[WorkerPair(rows[pair.first], rows[pair.second])] * each_us for pair, each_us in slow.items())

    def after(one: Worker, other: Worker) -> float:
        rows[one], rows[other] = rows[other], rows[one]
        delayed_us = delay_us()
        rows[one], rows[other] = rows[other], rows[one]
        return delayed_us

    ends = sorted({end for pair in slow for end in pair})
    while ends and (now_us := delay_us()) > 0:
        tries = [(end, peer) for end in ends for peer in sorted(peers[rows[end].stage, speed_of(end)]) if peer != end]
        best = min(tries, key=lambda pair: after(*pair), default=None)
        if best is None or after(*best) >= now_us:
            break
        rows[best[0]], rows[best[1]] = rows[best[1]], rows[best[0]]
    return replace(assignment, places={row: now for now, row in rows.items()})


def _traffic(plan: Plan) -> Counter[WorkerPair]:
    """How many micro-batches pass from each row of a plan to each row of the next stage; their gradients go the same way back."""
    num_stages = plan.problem.shape.num_stages
    by_stage: list[dict[int, Worker]] = [{} for _ in range(num_stages)]
    for row in plan.rows:
        runs = by_stage[row.worker.stage]
        for kind, chain in zip(row.kinds, row.chains, strict=True):
            if kind == Kind.F:
                runs[chain] = row.worker
    return Counter(WorkerPair(first, after[chain]) for before, after in pairwise(by_stage) for chain, first in before.items())
