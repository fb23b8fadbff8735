"""Chrome trace events, for ui.perfetto.dev and chrome://tracing: a process for each pipeline, a thread for each worker.

A staggered plan is written twice, one period apart, to show a stage that starts its next iteration while others still end this
one; a run is written with the memory of each worker. Arrows connect ops of one micro-batch in different pipelines. Ops in vain
have a colour and a category of their own. Recoveries have a process of their own, with a slice for each part.
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
from recycle.report.record.recovery_text import describe_rest, who
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.plan_timeline import plan_timeline
from recycle.report.timeline.run_timeline import read_blocks
from recycle.report.timeline.timeline import Block, Span

Event = dict[str, Any]

# Reserved colour names of the viewer that are closest to the palette. Perfetto colours by the name of a slice instead.
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
    return _dumped(_plan_events(plan))


def draw_run_trace(problem: Problem, events: Iterable[OpRan], recoveries: Sequence[Recovered] = ()) -> str:
    """Return the trace of a run as JSON, one event a line; memory is counted in the unit of the problem's limit."""
    return _dumped(_run_events(problem, events, recoveries))


def _plan_events(plan: Plan) -> Iterator[Event]:
    timeline = plan_timeline(plan)
    windows, num_iterations = timeline.windows, 2 if plan.problem.techniques.staggered else 1
    slices = [
        Slice(row.worker, iteration, block.shifted(iteration * plan.period_us))
        for iteration in range(num_iterations)
        for row in plan.rows
        for block in timeline.source.blocks(row.worker, with_ops=True)
    ]
    yield from _events(plan.problem, slices)
    for worker in sorted(plan.problem.cluster.failed):
        first, _ = windows[worker.stage]
        yield _dead(plan.problem, worker, (first, first + num_iterations * plan.period_us))


def _run_events(problem: Problem, events: Iterable[OpRan], recoveries: Sequence[Recovered]) -> Iterator[Event]:
    """Yield the events of a run; ops in vain have slices, but neither arrows nor memory."""
    ran = list(events)
    pieces = [Slice(worker, iteration, block) for (worker, iteration), block in read_blocks(ran)]
    slices, in_vain = (
        [piece for piece, op in zip(pieces, ran, strict=True) if op.is_in_vain == wanted] for wanted in (False, True)
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


def _events(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    yield from _names(problem)
    for piece in slices:
        yield _slice_event(problem, piece)
    yield from _arrows(problem, slices)


def _track(problem: Problem, worker: Worker) -> Event:
    """Ids start at 1, because viewers treat 0 specially; no thread has the id of its process, which would mark it as main."""
    shape = problem.shape
    return {"pid": worker.pipeline + 1, "tid": shape.num_pipelines + 1 + worker.pipeline * shape.num_stages + worker.stage}


def _names(problem: Problem) -> Iterator[Event]:
    for worker in problem.shape.workers():
        track = _track(problem, worker)
        if worker.stage == 0:
            yield {"ph": "M", "name": "process_name", **track, "args": {"name": f"pipeline {worker.pipeline}"}}
            yield {"ph": "M", "name": "process_sort_index", **track, "args": {"sort_index": worker.pipeline}}
        name = str(worker) if problem.cluster.is_live(worker) else f"{worker} dead"
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": worker.stage}}


def _recoveries(problem: Problem, recoveries: Sequence[Recovered]) -> Iterator[Event]:
    """Yield a slice for each part of each recovery except `redo`, which is drawn as ops in vain."""
    after = problem.shape.num_pipelines + problem.shape.num_workers
    track = {"pid": after + 1, "tid": after + 2}
    for kind in ("process_name", "thread_name"):
        yield {"ph": "M", "name": kind, **track, "args": {"name": "recoveries"}}
    for one in recoveries:
        args = {"who": who(one), "cause": describe_rest(one), "epoch": one.epoch, "iteration": one.iteration}
        start_us = one.at_us
        for part in PARTS[:-1]:
            if time_us := one.parts_us[part]:
                yield _complete(part, "recovery", track, (start_us, start_us + time_us), args)
                start_us += time_us


def _absences(problem: Problem, recoveries: Sequence[Recovered], span: Span) -> Iterator[Event]:
    """Yield a slice for each time in which a place was empty: from a death or the start, until a worker joins or the end."""
    since_us = dict.fromkeys(sorted(problem.cluster.failed), span[0])
    for one in recoveries:
        for place in sorted(map(Worker.parse, one.filled)):
            if place in since_us:
                yield _dead(problem, place, (since_us.pop(place), one.end_us))
        for place in sorted(map(Worker.parse, one.emptied)):
            # A worker that moved away computed until the end of the recovery; a dead one until its death.
            since_us.setdefault(place, one.at_us if str(place) in one.workers else one.end_us)
    for place, start_us in since_us.items():
        yield _dead(problem, place, (start_us, max(start_us, span[1])))


def _dead(problem: Problem, worker: Worker, span: Span) -> Event:
    """Return a slice for a dead worker, because viewers hide a thread without slices."""
    return _complete("dead", "dead", _track(problem, worker), span, {})


def _complete(name: str, look: str, track: Event, span: Span, args: Event) -> Event:
    """Return a complete event: a slice with its start and its length."""
    times = {"ts": span[0], "dur": span[1] - span[0]}
    return {"ph": "X", "name": name, "cat": look, **track, **times, "cname": _COLOURS[look], "args": args}


def _slice_event(problem: Problem, piece: Slice) -> Event:
    worker, iteration, block = piece
    track, span = _track(problem, worker), (block.start_us, block.end_us)
    if block.op is None:
        return _complete(PAINTS[block.look].meaning, block.look, track, span, {"iteration": iteration})
    args = {
        "home pipeline": block.op.microbatch.pipeline,
        "micro-batch": block.op.microbatch.index,
        "rerouted": block.is_rerouted,
        "iteration": iteration,
    }
    return _complete(block.op.text(worker.pipeline), block.look, track, span, args)


def _arrows(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    """Yield a flow for each crossing; its ends are in the middle of the slices that it connects."""
    for number, (before, after) in enumerate(_crossings(problem, slices)):
        common = {"name": "re-routed", "cat": "re-routed", "id": number}
        for phase, piece in (({"ph": "s"}, before), ({"ph": "f", "bp": "e"}, after)):
            middle = (piece.block.start_us + piece.block.end_us) / 2
            yield {**phase, **common, **_track(problem, piece.worker), "ts": middle}


def _crossings(problem: Problem, slices: list[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Yield each pair of dependent slices in different pipelines."""
    by_op = {(piece.iteration, piece.block.op): piece for piece in slices if piece.block.op}
    for (iteration, op), after in by_op.items():
        assert op is not None
        for need in needs(op, problem.shape.num_stages):
            before = by_op.get((iteration, need)) or by_op.get((iteration, Op(need.stage, Kind.B, need.microbatch)))
            if before and before.worker.pipeline != after.worker.pipeline:
                yield before, after


def _memory(problem: Problem, slices: list[Slice]) -> Iterator[Event]:
    """Yield a memory counter for each worker: F allocates at its start, the other kinds free at their end."""
    unit = "bytes" if problem.memory.unit == "bytes" else "micro-batches"
    held: dict[Worker, int] = {}
    for worker, _, block in slices:
        if block.op is None:
            continue
        static = problem.static_bytes(worker.stage) if unit == "bytes" else 0
        held[worker] = held.get(worker, static) + problem.memory_delta(worker.stage, block.op.kind)
        time = block.start_us if block.op.kind is Kind.F else block.end_us
        where = {"pid": worker.pipeline + 1, "ts": time}
        yield {"ph": "C", "name": f"memory of {worker}", **where, "args": {unit: held[worker]}}
