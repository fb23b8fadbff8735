"""A reference check of plans, written from the prose of the design, one slot and one event at a time.

It shares no code with `recycle.core.plans.rules`: it follows each micro-batch down the stages and back, simulates each worker's
memory on a time line, and compares every slot of a worker with every other. It is slow, and meant to be.
"""

from collections import Counter
from itertools import combinations

from recycle.core.cluster import Worker
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan, Slot, microbatch_of


def broken_rules(plan: Plan) -> set[str]:
    """The names of the rules that the plan breaks, as `rules.check` calls them."""
    slots = list(plan.all_slots())
    broken = set()
    broken |= _workers(plan)
    broken |= _own_row(plan)
    broken |= _completeness(plan, slots)
    for chain in range(plan.problem.shape.num_chains):
        microbatch = microbatch_of(plan.problem.shape, chain)
        broken |= _journey(plan, [slot for slot in slots if slot.op.microbatch == microbatch])
    if any(slot.start_us < 0 for slot in slots):
        broken.add("time")
    if not plan.problem.techniques.decoupled and any(slot.op.kind in (Kind.I, Kind.W) for slot in slots):
        broken.add("techniques")
    if not plan.problem.techniques.adaptive and any(slot.worker.pipeline != slot.op.microbatch.pipeline for slot in slots):
        broken.add("techniques")
    if not broken and plan.period_us != _period(plan, slots):
        broken.add("period")
    if plan.quality.bound_us > plan.period_us:
        broken.add("bound")
    return broken


def _workers(plan: Plan) -> set[str]:
    dead = plan.problem.cluster.failed
    alive = {worker for worker in plan.problem.shape.workers() if worker not in dead}
    return set() if Counter(row.worker for row in plan.rows) == Counter(alive) else {"workers"}


def _own_row(plan: Plan) -> set[str]:
    broken = set()
    for row in plan.rows:
        slots = list(plan.slots(row))
        overlaps = any(a.start_us < b.end_us and b.start_us < a.end_us for a, b in combinations(slots, 2))
        if overlaps or slots != sorted(slots, key=lambda slot: slot.start_us):
            broken.add("one op at a time")
        if _too_full(plan, row.worker, slots):
            broken.add("memory")
    return broken


def _too_full(plan: Plan, worker: Worker, slots: list[Slot]) -> bool:
    """Play what a worker holds on a time line: F takes at its start, I, W and B give back at their end."""
    memory, costs = plan.problem.memory, plan.problem.profile.stages[worker.stage]
    if memory.unit == "unlimited":
        return False
    by_bytes = memory.unit == "bytes"
    whole, rest = (costs.activation_bytes, costs.weight_held_bytes) if by_bytes else (1, 1)
    room = memory.limits[worker.stage] - (costs.static_bytes if by_bytes else 0)
    given_back = {Kind.I: whole - rest, Kind.W: rest, Kind.B: whole}
    events = [(slot.start_us, 1, whole) for slot in slots if slot.op.kind is Kind.F]
    events += [(slot.end_us, 0, -given_back[slot.op.kind]) for slot in slots if slot.op.kind in given_back]
    held = 0
    for _, _, change in sorted(events):
        held += change
        if held > room:
            return True
    return False


def _completeness(plan: Plan, slots: list[Slot]) -> set[str]:
    broken = set()
    for stage in range(plan.problem.shape.num_stages):
        for chain in range(plan.problem.shape.num_chains):
            microbatch = microbatch_of(plan.problem.shape, chain)
            mine = [slot for slot in slots if slot.op.stage == stage and slot.op.microbatch == microbatch]
            if sorted(slot.op.kind for slot in mine) not in (["B", "F"], ["F", "I", "W"]):
                broken.add("every op once")
            elif len({slot.worker for slot in mine}) > 1:
                broken.add("one worker")
    return broken


def _journey(plan: Plan, slots: list[Slot]) -> set[str]:
    """Follow one micro-batch: down the stages forward, back up with its gradient, weights beside it."""
    by_op: dict[tuple[int, Kind], Slot] = {(slot.op.stage, slot.op.kind): slot for slot in slots}
    profile, num_stages = plan.problem.profile, plan.problem.shape.num_stages
    travel = [profile.stage_link.time_us(stage.output_bytes) for stage in profile.stages]
    late = False
    arrives = 0
    for stage in range(num_stages):
        if forward := by_op.get((stage, Kind.F)):
            late |= forward.start_us < arrives and stage > 0
            arrives = forward.end_us + travel[stage]
        else:
            arrives = 0
    arrives = 0
    for stage in reversed(range(num_stages)):
        forward, weight = by_op.get((stage, Kind.F)), by_op.get((stage, Kind.W))
        backwards = [slot for kind in (Kind.I, Kind.B) if (slot := by_op.get((stage, kind)))]
        for backward in backwards:
            late |= backward.start_us < arrives and stage < num_stages - 1
            late |= forward is not None and backward.start_us < forward.end_us
            late |= weight is not None and backward.op.kind is Kind.I and weight.start_us < backward.end_us
        arrives = max((slot.end_us for slot in backwards), default=0) + (travel[stage - 1] if stage and backwards else 0)
    return {"order"} if late else set()


def _period(plan: Plan, slots: list[Slot]) -> int:
    problem = plan.problem
    starts: dict[int, int] = {}
    reduced: dict[int, int] = {}
    stepped: dict[int, int] = {}
    for stage, costs in enumerate(problem.profile.stages):
        mine = [slot for slot in slots if slot.op.stage == stage]
        starts[stage] = min(slot.start_us for slot in mine)
        num_live = sum(Worker(p, stage) not in problem.cluster.failed for p in range(problem.shape.num_pipelines))
        reduced[stage] = max(slot.end_us for slot in mine) + problem.profile.reduce_us(stage, num_live)
        stepped[stage] = reduced[stage] + costs.optimizer_us
    if problem.techniques.staggered:
        return max(stepped[stage] - starts[stage] for stage in starts)
    slowest_step = max(costs.optimizer_us for costs in problem.profile.stages)
    return max(reduced.values()) + slowest_step - min(starts.values())


def peak_held(plan: Plan, worker: Worker, unit: str) -> int:
    """The least memory that the worker's row needs, static bytes included."""
    row = next(row for row in plan.rows if row.worker == worker)
    costs = plan.problem.profile.stages[worker.stage]
    by_bytes = unit == "bytes"
    whole, rest = (costs.activation_bytes, costs.weight_held_bytes) if by_bytes else (1, 1)
    held: dict[Op, int] = {}
    peak = 0
    for slot in plan.slots(row):
        forward = Op(slot.op.stage, Kind.F, slot.op.microbatch)
        held[forward] = {Kind.F: whole, Kind.I: rest, Kind.W: 0, Kind.B: 0}[slot.op.kind]
        # An I frees when it ends, so the peak is seen at forwards only.
        peak = max(peak, sum(held.values())) if slot.op.kind is Kind.F else peak
    return peak + (costs.static_bytes if by_bytes else 0)
