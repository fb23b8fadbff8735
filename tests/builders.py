"""Plans for tests, made by hand or by a plain loop, without the rules that they are to test."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan, Quality, make_row
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile

Timed = dict[Worker, list[tuple[int, Op]]]


def dead(*names: str) -> frozenset[Worker]:
    """The workers of these names."""
    return frozenset(map(Worker.parse, names))


def make_problem(
    pipelines: int,
    stages: int,
    microbatches: int,
    *,
    failed: Iterable[str] = (),
    costs: tuple[int, int, int] = (1, 1, 1),
    comm_us: int = 0,
    memory: Memory | None = None,
    techniques: str = "adaptive,decoupled,staggered",
) -> Problem:
    """A problem of equal stages."""
    cluster = Cluster.of(Shape(pipelines, stages, microbatches), map(Worker.parse, failed))
    profile = Profile.uniform(stages, *costs, comm_us=comm_us)
    return Problem(cluster, profile, memory or Memory.unlimited(), Techniques.parse(techniques))


def make_plan(problem: Problem, rows: Mapping[str, str], period_us: int | None = None, bound_us: int = 1) -> Plan:
    """A plan from rows written `0:0F0 10:0F1 38:0I0@1`; its period is what its slots take unless one is given."""
    timed: Timed = {}
    for name, text in rows.items():
        worker = Worker.parse(name)
        slots = (token.split(":") for token in text.split())
        timed[worker] = [(int(start), Op.parse(op, worker.pipeline)) for start, op in slots]
    return plan_of(problem, timed, period_us, bound_us)


def plan_of(problem: Problem, timed: Timed, period_us: int | None = None, bound_us: int = 1) -> Plan:
    rows = tuple(make_row(problem.shape, worker, slots) for worker, slots in timed.items())
    period = span_us(problem, timed) if period_us is None else period_us
    return Plan(problem, rows, period, Quality(bound_us, "feasible", "by hand", 0.0))


def timed_of(plan: Plan) -> Timed:
    """The slots of a plan, to be changed and put together again by `plan_of`."""
    return {row.worker: [(slot.start_us, slot.op) for slot in plan.slots(row)] for row in plan.rows}


def without(plan: Plan, text: str) -> Plan:
    """The same plan, still claiming its period, without one op."""
    op = Op.parse(text)
    timed = {worker: [pair for pair in slots if pair[1] != op] for worker, slots in timed_of(plan).items()}
    return plan_of(plan.problem, timed, plan.period_us)


def moved(plan: Plan, text: str, start_us: int) -> Plan:
    """The same plan, still claiming its period, with another start for one op."""
    op = Op.parse(text)
    timed = {
        worker: [(start_us if pair[1] == op else pair[0], pair[1]) for pair in slots] for worker, slots in timed_of(plan).items()
    }
    return plan_of(plan.problem, timed, plan.period_us)


def with_techniques(plan: Plan, techniques: str) -> Plan:
    return replace(plan, problem=replace(plan.problem, techniques=Techniques.parse(techniques)))


def with_memory(plan: Plan, memory: Memory) -> Plan:
    return replace(plan, problem=replace(plan.problem, memory=memory))


def span_us(problem: Problem, timed: Timed) -> int:
    """The period in words: a stage's own time to its step (staggered), or everybody's time to everybody's step."""
    windows: dict[int, tuple[int, int]] = {}
    for worker, slots in timed.items():
        for start, op in slots:
            first, last = windows.get(worker.stage, (start, start))
            end = start + problem.profile.stages[worker.stage].duration_us(op.kind)
            windows[worker.stage] = min(first, start), max(last, end)
    live = {stage: problem.cluster.num_live(stage) for stage in windows}
    reduced = {stage: last + problem.profile.reduce_us(stage, live[stage]) for stage, (_, last) in windows.items()}
    step = {stage: problem.profile.stages[stage].optimizer_us for stage in windows}
    if problem.techniques.staggered:
        return max(reduced[stage] + step[stage] - first for stage, (first, _) in windows.items())
    return max(reduced.values()) + max(step.values()) - min(first for first, _ in windows.values())


def one_f_one_b(problem: Problem, *, split: bool = False) -> Plan:
    """The 1F1B schedule of a cluster without failures, every op as early as its order allows."""
    shape = problem.shape
    orders = {
        worker: [
            Op(worker.stage, kind, MicroBatch(worker.pipeline, index)) for kind, index in _one_f_one_b_order(shape, worker, split)
        ]
        for worker in shape.workers()
    }
    return plan_of(problem, as_early_as_possible(problem, orders))


def _one_f_one_b_order(shape: Shape, worker: Worker, split: bool) -> list[tuple[Kind, int]]:
    backward = (Kind.I, Kind.W) if split else (Kind.B,)
    num_ahead = min(shape.num_stages - 1 - worker.stage, shape.num_microbatches)
    order = [(Kind.F, index) for index in range(num_ahead)]
    for index in range(shape.num_microbatches):
        if index + num_ahead < shape.num_microbatches:
            order.append((Kind.F, index + num_ahead))
        order += [(kind, index) for kind in backward]
    return order


def as_early_as_possible(problem: Problem, orders: Mapping[Worker, list[Op]]) -> Timed:
    """Give every op of the rows the earliest start that its row's order and the ops before it allow."""
    ends: dict[Op, int] = {}
    timed: Timed = {worker: [] for worker in orders}
    while any(len(timed[worker]) < len(order) for worker, order in orders.items()):
        progress = False
        for worker, order in orders.items():
            while len(timed[worker]) < len(order):
                op = order[len(timed[worker])]
                ready = ready_us(problem, op, ends)
                if ready is None:
                    break
                free = ends[timed[worker][-1][1]] if timed[worker] else 0
                start = max(ready, free)
                ends[op] = start + problem.profile.stages[op.stage].duration_us(op.kind)
                timed[worker].append((start, op))
                progress = True
        assert progress, "the orders wait for each other"
    return timed


def ready_us(problem: Problem, op: Op, ends: Mapping[Op, int]) -> int | None:
    """When everything that `op` waits for is there; None if something has not run yet."""
    stage, last_stage = op.stage, problem.shape.num_stages - 1

    def end(at: int, kinds: str) -> int | None:
        found = [ends[Op(at, Kind(kind), op.microbatch)] for kind in kinds if Op(at, Kind(kind), op.microbatch) in ends]
        return found[0] if found else None

    times: list[int | None] = [0]
    if op.kind is Kind.F and stage > 0:
        before = end(stage - 1, "F")
        times.append(None if before is None else before + problem.profile.comm_us(stage - 1))
    if op.kind in (Kind.I, Kind.B):
        times.append(end(stage, "F"))
        if stage < last_stage:
            after = end(stage + 1, "IB")
            times.append(None if after is None else after + problem.profile.comm_us(stage))
    if op.kind is Kind.W:
        times.append(end(stage, "I"))
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None
