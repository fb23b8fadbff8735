"""Small plans made by hand, so that pictures and files can be tested without a planner."""

from array import array
from collections.abc import Iterable

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan, Quality, Row, make_row
from recycle.core.plans.rules import lag_us, needs, period_us
from recycle.core.problem import Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile

CLASSIC = Techniques(adaptive=False, decoupled=False, staggered=False)


def make_1f1b_plan(
    num_pipelines: int = 3,
    num_stages: int = 4,
    num_microbatches: int = 6,
    profile: Profile | None = None,
    techniques: Techniques = CLASSIC,
) -> Plan:
    """Classic 1F1B, every pipeline alike: stage s runs S - s forwards ahead, then one backward and one forward in turn."""
    orders = {}
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        steps = [(Kind.F, index) for index in range(ahead)]
        for index in range(num_microbatches):
            steps.append((Kind.B, index))
            if index + ahead < num_microbatches:
                steps.append((Kind.F, index + ahead))
        orders[Worker(0, stage)] = [Op(stage, kind, MicroBatch(0, index)) for kind, index in steps]
    used = profile or Profile.uniform(num_stages, 1, 1, 1)
    single = plan_from_orders(
        Problem(Cluster(Shape(1, num_stages, num_microbatches)), used, techniques=techniques), orders, "1F1B"
    )
    problem = Problem(Cluster(Shape(num_pipelines, num_stages, num_microbatches)), used, techniques=techniques)
    return finished(problem, [_copied(row, p, num_microbatches) for p in range(num_pipelines) for row in single.rows], "1F1B")


def _copied(row: Row, pipeline: int, num_microbatches: int) -> Row:
    chains = array("q", (chain + pipeline * num_microbatches for chain in row.chains))
    return Row(Worker(pipeline, row.worker.stage), row.kinds, chains, row.starts_us)


def plan_from_orders(problem: Problem, orders: dict[Worker, list[Op]], method: str = "by hand") -> Plan:
    """Start every op as early as its row's order and the rules allow."""
    ends: dict[Op, int] = {}
    rows: dict[Worker, list[tuple[int, Op]]] = {worker: [] for worker in orders}
    while any(len(rows[worker]) < len(order) for worker, order in orders.items()):
        placed = False
        for worker, order in orders.items():
            while len(rows[worker]) < len(order):
                op = order[len(rows[worker])]
                ready = _ready_us(problem, op, ends)
                if ready is None:
                    break
                free = ends[rows[worker][-1][1]] if rows[worker] else 0
                start = max(ready, free)
                rows[worker].append((start, op))
                ends[op] = start + problem.duration_us(op.stage, op.kind)
                placed = True
        assert placed, "the orders wait for each other"
    return finished(problem, [make_row(problem.shape, worker, rows[worker]) for worker in sorted(rows)], method)


def finished(problem: Problem, rows: Iterable[Row], method: str) -> Plan:
    """Make the plan of these rows, with the period that their slots take."""
    made = tuple(rows)
    draft = Plan(problem, made, 1, Quality(1, "feasible", method, 0.0))
    period = period_us(draft)
    return Plan(problem, made, period, Quality(period, "optimal", method, 0.0))


def _ready_us(problem: Problem, op: Op, ends: dict[Op, int]) -> int | None:
    ready = 0
    for before in needs(op, problem.shape.num_stages):
        fused = Op(before.stage, Kind.B, before.microbatch)
        done = ends.get(before, ends.get(fused) if before.kind is Kind.I else None)
        if done is None:
            return None
        ready = max(ready, done + lag_us(before, op, problem))
    return ready


def make_rerouted_plan(staggered: bool = True, profile: Profile | None = None) -> Plan:
    """D=2, S=2, M=2 with W1_1 dead: W0_1 runs its own two micro-batches and pipeline 1's."""
    problem = Problem(
        Cluster(Shape(2, 2, 2), frozenset({Worker(1, 1)})),
        profile or Profile.uniform(2, 1, 1, 1),
        techniques=Techniques(staggered=staggered),
    )
    texts = {
        "W0_0": "0F0 0F1 0I0 0I1 0W0 0W1",
        "W0_1": "1F0 1I0 1F0@1 1I0@1 1F1 1I1 1F1@1 1I1@1 1W0 1W0@1 1W1 1W1@1",
        "W1_0": "0F0 0F1 0I0 0I1 0W0 0W1",
    }
    orders = {
        Worker.parse(name): [Op.parse(op, Worker.parse(name).pipeline) for op in text.split()] for name, text in texts.items()
    }
    return plan_from_orders(problem, orders)


def make_split_plan(num_pipelines: int = 2) -> Plan:
    """Fault-free with split backwards, S=4, M=6, unit costs: each stage defers its first `stage` weight gradients."""
    problem = Problem(Cluster(Shape(num_pipelines, 4, 6)), Profile.uniform(4, 1, 1, 1))
    orders = {}
    for worker in problem.shape.workers():
        ahead = 4 - worker.stage
        steps = [("F", index) for index in range(ahead)]
        weights = iter(range(6))
        for index in range(6):
            steps.append(("I", index))
            if index >= worker.stage:
                steps.append(("W", next(weights)))
            if index + ahead < 6:
                steps.append(("F", index + ahead))
        steps += [("W", index) for index in weights]
        orders[worker] = [Op(worker.stage, Kind(kind), MicroBatch(worker.pipeline, index)) for kind, index in steps]
    return plan_from_orders(problem, orders, "by hand")


def costly_profile(num_stages: int) -> Profile:
    """Unequal costs in milliseconds, with communication, a gradient reduction and an optimizer step."""
    stage = StageProfile(
        6200,
        12200,
        6300,
        fused_us=17000,
        optimizer_us=4000,
        gradient_bytes=30_000_000,
        output_bytes=1_000_000,
        activation_bytes=10,
    )
    return Profile((stage,) * num_stages, stage_link=Link(20, 50_000.0), peer_link=Link(20, 20_000.0))
