"""The trace, read back as JSON."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from recycle.core.plans.plan import Plan
from recycle.report.export.perfetto import draw_trace
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan

PLANS = {
    "1f1b": make_1f1b_plan(),
    "split": make_split_plan(),
    "rerouted": make_rerouted_plan(),
    "costly": make_rerouted_plan(profile=costly_profile(2)),
    "costly synchronous": make_1f1b_plan(profile=costly_profile(4)),
}


def events(plan: Plan, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(draw_trace(plan))["traceEvents"] if event["ph"] == phase]


def thread_names(plan: Plan) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events(plan, "M") if event["name"] == "thread_name"}


def test_pipelines_are_processes_and_workers_threads() -> None:
    plan = make_rerouted_plan()
    processes = {event["pid"]: event["args"]["name"] for event in events(plan, "M") if event["name"] == "process_name"}
    assert list(processes.values()) == ["pipeline 0", "pipeline 1"]
    assert list(thread_names(plan).values()) == ["W0_0", "W0_1", "W1_0", "W1_1 dead"]
    assert not set(processes) & set(thread_names(plan)), "a thread with its process's id would be shown as the main thread"
    assert 0 not in processes


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_slices_on_a_thread_do_not_overlap(plan: Plan) -> None:
    by_thread = defaultdict(list)
    for event in events(plan, "X"):
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == plan.problem.shape.num_workers
    for spans in by_thread.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_slices_match_the_slots_of_the_plan(plan: Plan) -> None:
    names = thread_names(plan)
    ops = [event for event in events(plan, "X") if event["cat"] in "FBIW" and event["args"]["iteration"] == 0]
    found = {(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in ops}
    assert len(ops) == plan.num_ops
    assert found == {
        (str(slot.worker), slot.op.text(slot.worker.pipeline), slot.start_us, slot.end_us - slot.start_us)
        for slot in plan.all_slots()
    }


def test_a_slice_says_whose_micro_batch_it_is() -> None:
    (event,) = [event for event in events(make_rerouted_plan(), "X") if event["name"] == "1F1@1" and event["ts"] < 12]
    assert event["cat"] == "F"
    assert event["args"] == {"home pipeline": 1, "micro-batch": 1, "rerouted": True, "iteration": 0}


def test_staggered_plans_have_two_iterations_that_overlap_in_time() -> None:
    plan = make_split_plan()
    ops = events(plan, "X")
    assert len(ops) == 2 * plan.num_ops
    second = min(event["ts"] for event in ops if event["args"]["iteration"] == 1)
    first_ends = max(event["ts"] + event["dur"] for event in ops if event["args"]["iteration"] == 0)
    assert second == plan.period_us == first_ends == 21
    shifted = {(e["tid"], e["name"], e["ts"] - 21 * e["args"]["iteration"]) for e in ops}
    assert len(shifted) == plan.num_ops


def test_synchronous_plans_have_one_iteration() -> None:
    assert len(events(make_1f1b_plan(), "X")) == 144


def test_reduce_and_optimizer_follow_the_last_gradient_of_a_stage() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    finish = [e for e in events(plan, "X") if e["cat"] in ("reduce", "optimizer") and e["args"]["iteration"] == 0]
    names = thread_names(plan)
    assert sorted((names[e["tid"]], e["cat"]) for e in finish) == [
        ("W0_0", "optimizer"),
        ("W0_0", "reduce"),
        ("W0_1", "optimizer"),  # alone at its stage: it has no peer to reduce with
        ("W1_0", "optimizer"),
        ("W1_0", "reduce"),
    ]


def test_arrows_join_slices_of_different_pipelines() -> None:
    """Two micro-batches go out to W0_1 as activations and come back as gradients, in each of two iterations."""
    plan = make_rerouted_plan()
    starts, ends = events(plan, "s"), events(plan, "f")
    assert len(starts) == len(ends) == 8
    slices = events(plan, "X")
    for start, end in zip(starts, ends, strict=True):
        assert start["id"] == end["id"]
        before, after = (_around(slices, point) for point in (start, end))
        assert before["pid"] != after["pid"]
        assert before["ts"] + before["dur"] <= after["ts"]
    assert len({event["id"] for event in starts}) == 8


def test_fault_free_plans_have_no_arrows() -> None:
    assert events(make_1f1b_plan(), "s") == []


def _around(slices: list[dict[str, Any]], point: dict[str, Any]) -> dict[str, Any]:
    (found,) = [s for s in slices if s["tid"] == point["tid"] and s["ts"] < point["ts"] < s["ts"] + s["dur"]]
    return found
