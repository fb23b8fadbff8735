"""Chrome trace events, for ui.perfetto.dev and chrome://tracing: a process a pipeline, a thread a worker.

A staggered plan is written twice, one period apart, so that one sees a stage start its next iteration while others still end
this one; a run is written as far as its record goes, with what each worker holds in memory. Arrows follow what leaves
its pipeline: to a worker that took over, and back from it. Ops in vain have a colour and a category of their own. Recoveries
have a process of their own, with a slice for each part; a worker that left is dead until one joins.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from recycle.core.cluster import Worker
from recycle.core.events.record import PARTS, OpRan, Recovered
from recycle.core.op import Kind, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import needs
from recycle.core.problem import Problem
from recycle.report.record.recoveries import describe_rest, who
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.plan_timeline import PlanBlocks, plan_timeline
from recycle.report.timeline.run_timeline import read_blocks
from recycle.report.timeline.timeline import Block, Span

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
    "in vain": "terrible",
    "recovery": "bad",
}


class Slice(NamedTuple):
    """A block with its worker and its iteration."""

    worker: Worker
    iteration: int
    block: Block


def draw_trace(plan: Plan) -> str:
    """Return the trace of a plan as JSON, one event a line."""
    return _dumped(trace_events(plan))


def draw_run_trace(problem: Problem, events: Iterable[OpRan], recoveries: Sequence[Recovered] = ()) -> str:
    """Return the trace of a run as JSON, one event a line; memory is counted in the unit of the problem's limit."""
    return _dumped(run_trace_events(problem, events, recoveries))


def trace_events(plan: Plan) -> Iterator[Event]:
    """Yield names, slots, reductions, optimizer steps, dead workers and arrows."""
    windows = plan_timeline(plan).windows
    num_iterations = 2 if plan.problem.techniques.staggered else 1
    yield from _events(plan.problem, list(_plan_slices(plan, num_iterations)))
    for worker in sorted(plan.problem.cluster.failed):
        first, _ = windows[worker.stage]
        yield _dead(plan.problem, worker, (first, first + num_iterations * plan.period_us))


def run_trace_events(problem: Problem, events: Iterable[OpRan], recoveries: Sequence[Recovered] = ()) -> Iterator[Event]:
    """Yield the same of a run, what each worker holds, and recoveries; ops in vain are slices only: nothing came of them."""
    ran = list(events)
    slices, in_vain = (
        [Slice(worker, iteration, block) for (worker, iteration), block in read_blocks(part)]
        for part in ([event for event in ran if not event.is_in_vain], [event for event in ran if event.is_in_vain])
    )
    span = min(s.block.start_us for s in slices), max(s.block.end_us for s in slices)
    yield from _events(problem, slices)
    yield from _absences(problem, recoveries, span)
    for piece in in_vain:
        made = _slice_event(problem, piece)
        yield {**made, "name": f"{made['name']} in vain", "cat": "in vain", "cname": _COLOURS["in vain"]}
    yield from _memory(problem, slices)
    if recoveries:
        yield from _recoveries(problem, recoveries)


def _dumped(events: Iterable[Event]) -> str:
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in events)
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'


def _plan_slices(plan: Plan, num_iterations: int) -> Iterator[Slice]:
    source = PlanBlocks(plan)
    for iteration in range(num_iterations):
        for row in plan.rows:
            for block in source.blocks(row.worker, with_ops=True):
                yield Slice(row.worker, iteration, block.shifted(iteration * plan.period_us))


def _events(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    yield from _names(problem)
    for piece in slices:
        yield _slice_event(problem, piece)
    yield from _arrows(problem, slices)


def _place(problem: Problem, worker: Worker) -> Event:
    """Ids start at 1, because viewers give 0 a meaning, and no thread has its process's id, which would mark it as main."""
    shape = problem.shape
    return {"pid": worker.pipeline + 1, "tid": shape.num_pipelines + 1 + worker.pipeline * shape.num_stages + worker.stage}


def _names(problem: Problem) -> Iterator[Event]:
    for worker in problem.shape.workers():
        place = _place(problem, worker)
        if worker.stage == 0:
            yield {"ph": "M", "name": "process_name", **place, "args": {"name": f"pipeline {worker.pipeline}"}}
            yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": worker.pipeline}}
        name = str(worker) if problem.cluster.is_live(worker) else f"{worker} dead"
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": worker.stage}}


def _recoveries(problem: Problem, recoveries: Sequence[Recovered]) -> Iterator[Event]:
    """A slice for each part of each recovery but the last, `redo`: that is drawn as ops in vain."""
    after = problem.shape.num_pipelines + problem.shape.num_workers
    place = {"pid": after + 1, "tid": after + 2}
    for kind in ("process_name", "thread_name"):
        yield {"ph": "M", "name": kind, **place, "args": {"name": "recoveries"}}
    for one in recoveries:
        args = {"who": who(one), "cause": describe_rest(one), "epoch": one.epoch, "iteration": one.iteration}
        start_us = one.at_us
        for part in PARTS[:-1]:
            if time_us := one.parts_us[part]:
                yield _complete(part, "recovery", place, (start_us, start_us + time_us), args)
                start_us += time_us


def _absences(problem: Problem, recoveries: Sequence[Recovered], span: Span) -> Iterator[Event]:
    """A slice for each time in which nobody had a seat: from a death, or the start, until somebody comes, or to the end."""
    since_us = dict.fromkeys(sorted(problem.cluster.failed), span[0])
    for one in recoveries:
        for seat in sorted(map(Worker.parse, one.filled)):
            if seat in since_us:
                yield _dead(problem, seat, (since_us.pop(seat), one.end_us))
        for seat in sorted(map(Worker.parse, one.emptied)):
            # Whoever moves away has worked until then.
            since_us.setdefault(seat, one.at_us if str(seat) in one.workers else one.end_us)
    for seat, start_us in since_us.items():
        yield _dead(problem, seat, (start_us, max(start_us, span[1])))


def _dead(problem: Problem, worker: Worker, span: Span) -> Event:
    """A slice of its own, because viewers hide a thread that has none."""
    return _complete("dead", "dead", _place(problem, worker), span, {})


def _complete(name: str, look: str, place: Event, span: Span, args: Event) -> Event:
    """A complete event: a slice with its start and its length."""
    times = {"ts": span[0], "dur": span[1] - span[0]}
    return {"ph": "X", "name": name, "cat": look, **place, **times, "cname": _COLOURS[look], "args": args}


def _slice_event(problem: Problem, piece: Slice) -> Event:
    worker, iteration, block = piece
    place, span = _place(problem, worker), (block.start_us, block.end_us)
    if block.op is None:
        return _complete(PAINTS[block.look].meaning, block.look, place, span, {"iteration": iteration})
    args = {
        "home pipeline": block.op.microbatch.pipeline,
        "micro-batch": block.op.microbatch.index,
        "rerouted": block.is_rerouted,
        "iteration": iteration,
    }
    return _complete(block.op.text(worker.pipeline), block.look, place, span, args)


def _arrows(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    """A flow for each crossing; its ends lie in the middle of the slices they join, so that it is clear which they are."""
    for number, (before, after) in enumerate(_crossings(problem, slices)):
        common = {"name": "re-routed", "cat": "re-routed", "id": number}
        for phase, piece in (({"ph": "s"}, before), ({"ph": "f", "bp": "e"}, after)):
            middle = (piece.block.start_us + piece.block.end_us) / 2
            yield {**phase, **common, **_place(problem, piece.worker), "ts": middle}


def _crossings(problem: Problem, slices: list[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Yield what makes a result and what waits for it, where a worker of another pipeline does that."""
    made = {(piece.iteration, piece.block.op): piece for piece in slices if piece.block.op}
    for (iteration, op), after in made.items():
        assert op is not None
        for need in needs(op, problem.shape.num_stages):
            before = made.get((iteration, need)) or made.get((iteration, Op(need.stage, Kind.B, need.microbatch)))
            if before and before.worker.pipeline != after.worker.pipeline:
                yield before, after


def _memory(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    """A counter for each worker: F takes when it starts, the others give back when they end."""
    unit = "bytes" if problem.memory.unit == "bytes" else "micro-batches"
    held: dict[Worker, int] = {}
    for worker, _, block in slices:
        if block.op is None:
            continue
        static = problem.profile.stages[worker.stage].static_bytes if unit == "bytes" else 0
        held[worker] = held.get(worker, static) + problem.memory_delta(worker.stage, block.op.kind)
        time = block.start_us if block.op.kind is Kind.F else block.end_us
        place = {"pid": worker.pipeline + 1, "ts": time}
        yield {"ph": "C", "name": f"memory of {worker}", **place, "args": {unit: held[worker]}}
