"""The plan as Chrome trace events, for ui.perfetto.dev and chrome://tracing: a process a pipeline, a thread a worker.

Staggered plans are written twice, one period apart, so that one sees a stage start its next iteration while others still end
this one. Arrows follow what leaves its pipeline: to a worker that took over, and back from it.
"""

import json
from collections.abc import Iterator
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.op import Kind, Op
from recycle.core.plan import Plan, Slot
from recycle.core.rules import needs
from recycle.report.palette import PAINTS
from recycle.report.timeline import Timeline

Event = dict[str, Any]

# Reserved names of the trace viewer that come closest to the palette. Perfetto colours by name, digits aside: one hue a kind.
_COLOURS = {
    "F": "rail_response",
    "B": "rail_animation",
    "I": "rail_idle",
    "W": "rail_load",
    "reduce": "detailed_memory_dump",
    "optimizer": "generic_work",
    "dead": "grey",
}


def draw_trace(plan: Plan) -> str:
    """Return the trace as JSON, one event a line."""
    events = ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in trace_events(plan))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n'


def trace_events(plan: Plan) -> Iterator[Event]:
    """Yield names, slots, reductions, optimizer steps, dead workers and arrows."""
    timeline = Timeline(plan)
    num_iterations = 2 if plan.problem.techniques.staggered else 1
    yield from _names(plan)
    yield from _dead(plan, timeline, num_iterations)
    crossings = list(_crossings(plan))
    for iteration in range(num_iterations):
        shift = iteration * plan.period_us
        for slot in plan.all_slots():
            yield _slot_event(plan, slot, iteration, shift)
        yield from _finish_events(plan, timeline, iteration, shift)
        yield from _arrows(plan, crossings, first_id=iteration * len(crossings), shift_us=shift)


def _place(plan: Plan, worker: Worker) -> Event:
    """Ids start at 1, because viewers give 0 a meaning, and no thread has its process's id, which would mark it as main."""
    shape = plan.problem.shape
    return {"pid": worker.pipeline + 1, "tid": shape.num_pipelines + 1 + worker.pipeline * shape.num_stages + worker.stage}


def _names(plan: Plan) -> Iterator[Event]:
    for worker in plan.problem.shape.workers():
        place = _place(plan, worker)
        if worker.stage == 0:
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"pipeline {worker.pipeline}"}}
            yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": worker.pipeline}}
        name = str(worker) if plan.problem.cluster.is_live(worker) else f"{worker} dead"
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": worker.stage}}


def _complete(name: str, look: str, place: Event, start_us: int, duration_us: int, args: Event) -> Event:
    """A complete event: a slice with its start and its length."""
    times = {"ts": start_us, "dur": duration_us}
    return {"ph": "X", "name": name, "cat": look, **place, **times, "cname": _COLOURS[look], "args": args}


def _slot_event(plan: Plan, slot: Slot, iteration: int, shift_us: int) -> Event:
    microbatch = slot.op.microbatch
    args = {
        "home pipeline": microbatch.pipeline,
        "micro-batch": microbatch.index,
        "rerouted": slot.is_rerouted,
        "iteration": iteration,
    }
    name, place = slot.op.text(slot.worker.pipeline), _place(plan, slot.worker)
    return _complete(name, slot.op.kind.value, place, slot.start_us + shift_us, slot.end_us - slot.start_us, args)


def _finish_events(plan: Plan, timeline: Timeline, iteration: int, shift_us: int) -> Iterator[Event]:
    for row in plan.rows:
        for block in timeline.finish(row.worker.stage):
            start, duration = block.start_us + shift_us, block.end_us - block.start_us
            name, place = PAINTS[block.look].meaning, _place(plan, row.worker)
            yield _complete(name, block.look, place, start, duration, {"iteration": iteration})


def _dead(plan: Plan, timeline: Timeline, num_iterations: int) -> Iterator[Event]:
    """One slice for each dead worker, because viewers hide a thread that has none."""
    for worker in sorted(plan.problem.cluster.failed):
        first, _ = timeline.windows[worker.stage]
        yield _complete("dead", "dead", _place(plan, worker), first, num_iterations * plan.period_us, {})


def _arrows(plan: Plan, crossings: list[tuple[Slot, Slot]], first_id: int, shift_us: int) -> Iterator[Event]:
    """A flow for each crossing; its ends lie in the middle of the slices they join, so that it is clear which they are."""
    for number, (before, after) in enumerate(crossings, start=first_id):
        common = {"name": "re-routed", "cat": "re-routed", "id": number}
        for phase, slot in (({"ph": "s"}, before), ({"ph": "f", "bp": "e"}, after)):
            yield {**phase, **common, **_place(plan, slot.worker), "ts": (slot.start_us + slot.end_us) / 2 + shift_us}


def _crossings(plan: Plan) -> Iterator[tuple[Slot, Slot]]:
    """Yield what makes a result and what waits for it, where a worker of another pipeline does that."""
    slots = {slot.op: slot for slot in plan.all_slots()}
    for after in slots.values():
        for need in needs(after.op, plan.problem.shape.num_stages):
            fused = Op(need.stage, Kind.B, need.microbatch)
            before = slots.get(need) or slots.get(fused)
            if before and before.worker.pipeline != after.worker.pipeline:
                yield before, after
