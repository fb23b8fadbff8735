"""Plans that are cut at random, for tests of everything that runs plans: legal, and as bad as chance makes them."""

from array import array
from dataclasses import dataclass, replace
from random import Random

import recycle
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.cuts import make_cuts
from recycle.core.plans.plan import Plan, Quality, Row
from recycle.core.plans.plan_source import PlanAssignment
from recycle.core.plans.rules import lag_us, needs, period_us
from recycle.core.problem import Problem
from recycle.planner.live_planner import Planner


def cut_at_random(plan: Plan, num_layers: int, shared: int, random: Random) -> Plan:
    """The plan with the same order of ops and random cuts; every op starts as early as it can."""
    problem = replace(plan.problem, profile=plan.problem.profile.with_equal_layers(num_layers), shared_layers=shared)
    held = problem.held_layers
    assert held is not None
    bounds, num_stages = held.sums.bounds, problem.shape.num_stages
    chains = []
    for _ in range(problem.shape.num_chains):
        at = [0]
        for stage in range(1, num_stages):  # every stage computes a layer at least
            at.append(random.randint(max(at[-1] + 1, bounds[stage] - shared), min(bounds[stage] + shared, bounds[stage + 1] - 1)))
        chains.append([cut - bounds[stage] for stage, cut in enumerate(at[1:], 1)])
    return retimed(replace(plan, problem=problem, cuts=make_cuts(zip(*chains, strict=True))))


def retimed(plan: Plan) -> Plan:
    """The plan with every op as early as its row and its needs allow."""
    ends: dict[tuple[int, str, object], int] = {}
    starts: dict[Worker, list[int]] = {row.worker: [] for row in plan.rows}
    rest = {row.worker: list(plan.slots(row)) for row in plan.rows}
    num_stages = plan.problem.shape.num_stages
    while any(rest.values()):
        for worker, slots in rest.items():
            while slots and all((op.stage, op.kind.value, op.microbatch) in ends for op in needs(slots[0].op, num_stages)):
                slot, free = slots.pop(0), max(ends[worker.stage, "row", worker], 0) if starts[worker] else 0
                ready = [
                    ends[op.stage, op.kind.value, op.microbatch] + lag_us(op, slot.op, plan.problem)
                    for op in needs(slot.op, num_stages)
                ]
                start = max(free, *ready, 0)
                end = start + slot.end_us - slot.start_us
                starts[worker].append(start)
                kinds = (Kind.I, Kind.W) if slot.op.kind is Kind.B else (slot.op.kind,)
                for kind in kinds:
                    ends[slot.op.stage, kind.value, slot.op.microbatch] = end
                ends[worker.stage, "row", worker] = end
    rows = tuple(Row(row.worker, row.kinds, row.chains, array("q", starts[row.worker])) for row in plan.rows)
    made = replace(plan, rows=rows, quality=Quality(0, "feasible", "at random", 0.0))
    made = replace(made, period_us=period_us(made))
    assert recycle.check(made) == []
    return made


@dataclass(frozen=True)
class RandomCuts:
    """A source of plans that are cut at random, others for every set of dead workers."""

    problem: Problem
    num_layers: int
    shared: int

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        made = Planner(self.problem).answer(failed)
        seed = " ".join(map(str, sorted(failed)))
        return replace(made, plan=cut_at_random(made.plan, self.num_layers, self.shared, Random(seed)))
