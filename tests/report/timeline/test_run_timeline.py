"""Executed iterations, drawn from the events of a record."""

import json
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import OpRan
from recycle.core.plans.plan import Plan
from recycle.core.problem import Memory, Problem
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.record.executed_iterations import Executed
from recycle.report.record.run_columns import read_run_record
from recycle.report.render.png import draw_png
from recycle.report.render.svg import draw_svg
from recycle.report.render.terminal_chart import draw_chart
from recycle.report.timeline.plan_timeline import PlanBlocks, plan_timeline
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline
from tests.builders import make_problem
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan

PLANS = {
    "1f1b": make_1f1b_plan(),
    "split": make_split_plan(),
    "rerouted": make_rerouted_plan(),
    "costly": make_rerouted_plan(profile=costly_profile(2)),
    "costly synchronous": make_1f1b_plan(profile=costly_profile(4)),
}


def events_of(plan: Plan, num_iterations: int) -> Iterator[OpRan]:
    """The record of a run that follows the plan exactly."""
    source = PlanBlocks(plan)
    for iteration in range(num_iterations):
        shift = iteration * plan.period_us
        for slot in plan.all_slots():
            yield OpRan(iteration, str(slot.worker), str(slot.op), slot.start_us + shift, slot.end_us + shift)
        for row in plan.rows:
            for block in source.finish(row.worker.stage):
                yield OpRan(iteration, str(row.worker), block.look, block.start_us + shift, block.end_us + shift)


def timeline_of(plan: Plan, num_iterations: int, iteration: int) -> Timeline:
    events = list(events_of(plan, num_iterations))
    windows = Executed(plan, read_run_record(events).ops).windows(iteration)
    return run_timeline(plan.problem, events, iteration, ("as executed",), windows)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("num_iterations", "iteration"), [(3, 1), (1, 0)], ids=["among others", "alone"])
def test_an_iteration_executed_by_the_plan_looks_like_the_plan(plan: Plan, num_iterations: int, iteration: int) -> None:
    executed, planned = timeline_of(plan, num_iterations, iteration), plan_timeline(plan)
    shift = iteration * plan.period_us
    assert [(first - shift, last - shift) for first, last in executed.windows] == list(planned.windows)
    for worker in plan.problem.shape.workers():
        own, expected = executed.lane(worker), planned.lane(worker)
        assert [block.shifted(-shift) for block in own.blocks] == list(expected.blocks)
        assert own.is_dead == expected.is_dead
    assert (executed.looks, executed.has_rerouted, executed.num_ops, executed.shortest_us) == (
        planned.looks,
        planned.has_rerouted,
        planned.num_ops,
        planned.shortest_us,
    )
    assert executed.about == planned.about


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_beside_an_iteration_lie_those_before_and_after_it(plan: Plan) -> None:
    executed, planned = timeline_of(plan, 3, 1), plan_timeline(plan)
    for worker in plan.problem.shape.workers():
        beside = [block.shifted(-plan.period_us) for block in executed.neighbours(executed.lane(worker))]
        assert sorted(beside, key=lambda block: block.start_us) == sorted(
            planned.neighbours(planned.lane(worker)), key=lambda block: block.start_us
        )


def late_run() -> tuple[Problem, list[OpRan]]:
    """One pipeline of two stages; in iteration 1 the second stage takes 5 instead of 1 for its forward."""
    texts = ["0 W0_0 0F0@0 0 1", "0 W0_1 1F0@0 1 2", "0 W0_1 1B0@0 2 4", "0 W0_0 0B0@0 4 6"]
    texts += ["1 W0_0 0F0@0 6 7", "1 W0_1 1F0@0 7 12", "1 W0_1 1B0@0 12 14", "1 W0_0 0B0@0 14 16"]
    texts += ["2 W0_0 0F0@0 16 17", "2 W0_1 1F0@0 17 18", "2 W0_1 1B0@0 18 20", "2 W0_0 0B0@0 20 22"]
    words = [text.split() for text in texts]
    return make_problem(1, 2, 1), [OpRan(int(i), w, op, int(start), int(end)) for i, w, op, start, end in words]


def test_durations_are_those_that_were_recorded() -> None:
    timeline = run_timeline(*late_run(), 1, (), ((6, 16), (7, 17)))
    assert [(block.start_us, block.end_us, block.look) for block in timeline.lane(Worker(0, 1)).blocks] == [
        (7, 12, "F"),
        (12, 14, "B"),
    ]
    text = "".join(cell.text for line in draw_chart(timeline, 60) for cell in line if cell.text)
    assert "F0" + " " * 18 + "B0" in text


def test_a_known_window_is_drawn_as_it_is_given() -> None:
    problem, events = late_run()
    timeline = run_timeline(problem, [event for event in events if event.worker == "W0_1"], 1, (), ((6, 16), (7, 17)))
    assert timeline.extent == (6, 17)
    assert timeline.lane(Worker(0, 0)).blocks == ()


def test_svg_and_png_draw_an_executed_iteration() -> None:
    timeline = timeline_of(make_rerouted_plan(profile=costly_profile(2)), 3, 1)
    root = ElementTree.fromstring(draw_svg(timeline))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "as executed" in texts
    assert "W1_1 dead" in texts
    assert draw_png(timeline).startswith(b"\x89PNG\r\n")


def test_an_iteration_that_the_record_does_not_hold_is_refused_in_a_sentence() -> None:
    plan = make_1f1b_plan()
    with pytest.raises(UserError, match="the record holds no op of iteration 7"):
        run_timeline(plan.problem, events_of(plan, 2), 7, (), ((0, 27),) * 4)


def test_a_trace_holds_every_event_and_arrows_only_within_an_iteration() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    trace = json.loads(draw_run_trace(plan.problem, events_of(plan, 3)))["traceEvents"]
    slices = [event for event in trace if event["ph"] == "X" and event["cat"] != "dead"]
    assert len(slices) == len(list(events_of(plan, 3)))
    assert len([event for event in trace if event["ph"] == "s"]) == 3 * 4
    (dead,) = [event for event in trace if event["ph"] == "X" and event["cat"] == "dead"]
    assert dead["ts"] + dead["dur"] == max(event["ts"] + event["dur"] for event in slices)


def memory_of(problem: Problem, events: Iterator[OpRan], worker: str) -> list[dict[str, int]]:
    trace = json.loads(draw_run_trace(problem, events))["traceEvents"]
    return [event["args"] for event in trace if event["ph"] == "C" and event["name"] == f"memory of {worker}"]


def test_a_trace_counts_what_each_worker_holds() -> None:
    """W0_0 of the classic schedule runs F0 F1 B0 F2 B1 B2; an activation of the costly profile has 10 bytes."""
    plan = make_1f1b_plan(1, 2, 3, costly_profile(2))
    counts = memory_of(plan.problem, events_of(plan, 1), "W0_0")
    assert [held["micro-batches"] for held in counts] == [1, 2, 1, 2, 1, 0]
    in_bytes = replace(plan.problem, memory=Memory.bytes([100, 100]))
    assert [held["bytes"] for held in memory_of(in_bytes, events_of(plan, 1), "W0_0")] == [10, 20, 10, 20, 10, 0]
