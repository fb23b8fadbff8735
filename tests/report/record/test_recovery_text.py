"""Runs in which workers joined and left: the texts of recoveries, and the iterations around them."""

import json
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import pytest
from matplotlib.image import imread
from msgspec.structs import replace

from recycle.core.errors import ForeignPlan, UserError
from recycle.core.events.record import Changed, Event, OpRan, Recovered, Spell
from recycle.core.plans.plan import Plan
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.figures.recovery_chart import MOST_ROWS, height_px
from recycle.report.figures.run_page import draw_page
from recycle.report.record.metrics import measure
from recycle.report.record.recovery_text import (
    PART_LETTERS,
    PART_LOOKS,
    describe_parts,
    describe_rest,
    format_ms,
    recovery_lines,
    who,
)
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.run_summary import Summary
from recycle.report.timeline.plan_timeline import plan_timeline
from recycle.report.timeline.run_timeline import run_timeline
from tests.recovery_records import EPOCHS, JOINED, LEFT, REDO_US, SAMPLES, degraded_plan, recovery_record, whole_plan

MOVING = replace(LEFT, moves=("W0_1>W1_2",))


def summary(plan: Plan, events: Iterable[Event] | None = None) -> Summary:
    return Summary(read_run_record(recovery_record() if events is None else events), plan)


def test_a_recovery_is_described_with_all_its_parts() -> None:
    assert describe_parts(LEFT) == "detect 3 ms, abort 41 ms, plan 0 ms, regroup 92 ms, transfer 0 ms, redo 310 ms = 446 ms"
    assert describe_rest(MOVING) == "its connection closed; 14 ops run again; moved W0_1 to W1_2"
    assert (who(LEFT), who(JOINED)) == ("W1_2 left", "W1_2 joined")


def test_of_many_workers_only_their_number_is_named() -> None:
    many = replace(LEFT, workers=tuple(f"W{number}_0" for number in range(9)), moves=("W0_1>W1_1",) * 7)
    assert who(many) == "9 workers left"
    assert describe_rest(many).endswith("; 7 workers moved")


def test_a_time_is_in_milliseconds_until_they_are_too_many() -> None:
    assert [format_ms(time_us) for time_us in (0, 400, 41_000, 9_999_000, 12_340_000)] == [
        "0 ms",
        "0 ms",
        "41 ms",
        "9999 ms",
        "12.3 s",
    ]


def test_recoveries_are_a_table_whose_lines_end_with_the_cause() -> None:
    assert recovery_lines([MOVING, JOINED]) == [
        "who          step    lost  detect  abort  plan  regroup  transfer    redo  cause",
        f"W1_2 left       6  446 ms    3 ms  41 ms     -    92 ms         -  310 ms  {describe_rest(MOVING)}",
        "W1_2 joined    12   50 ms       -      -     -        -     50 ms       -  it asked to join",
    ]


def test_every_part_has_a_look_and_a_letter_of_its_own() -> None:
    assert list(PART_LOOKS) == list(PART_LETTERS) == list(LEFT.parts_us)
    assert len(set(PART_LOOKS.values())) == len(set(PART_LETTERS.values())) == 6


def test_iterations_are_compared_with_the_plan_that_they_were_executed_by() -> None:
    before, between = summary(whole_plan()), summary(degraded_plan())
    assert before.executed.whole == (*range(*EPOCHS[0]), *range(*EPOCHS[2]))
    assert before.executed.of_other_plans == between.executed.whole == tuple(range(*EPOCHS[1]))
    for known in (before, between):
        assert known.over_promise == pytest.approx(1)
        assert known.executed.slowdown() == 1
        assert known.bubble == pytest.approx(known.planned_bubble, abs=1e-12)


def test_the_time_of_an_iteration_is_that_of_those_by_the_plan() -> None:
    assert summary(whole_plan()).times.median_us == whole_plan().period_us
    assert summary(degraded_plan()).times.median_us == degraded_plan().period_us
    assert degraded_plan().period_us > 1.2 * whole_plan().period_us


def test_no_time_of_an_iteration_has_a_recovery_in_it() -> None:
    times = summary(whole_plan()).executed.times_us
    assert set(times.values()) == {whole_plan().period_us}
    assert EPOCHS[2][0] not in times


def test_ops_that_a_failure_discarded_are_in_vain_and_no_step_was_taken_back() -> None:
    known = summary(whole_plan())
    discarded = [op for op in known.run.ops.events(range(14)) if op.is_in_vain]
    assert len(discarded) == known.run.recoveries[0].redone_ops > 0
    assert {op.iteration for op in discarded} == {5}
    assert known.executed.taken_back == ()
    assert known.executed.num_in_vain == 0


def test_a_job_that_goes_back_to_a_checkpoint_counts_every_iteration_once() -> None:
    """Iterations 3 and 4 were complete when the job returned to step 4, and are repeated."""
    events = recovery_record()
    back = next(event for event in events if isinstance(event, Recovered))
    again = [
        replace(event, iteration=event.iteration - 2) if isinstance(event, OpRan) and event.start_us >= back.end_us else event
        for event in events
    ]
    again = [replace(event, iteration=3) if event == back else event for event in again]
    known = summary(degraded_plan(), again)
    assert known.executed.whole == (3, 4, 5, 6)
    assert {op.iteration for op in known.run.ops.events(range(14)) if op.is_in_vain} == {3, 4, 5}


def test_an_iteration_of_another_epoch_cannot_be_drawn_by_this_plan() -> None:
    with pytest.raises(UserError, match="iteration 6 was executed by the plan of another epoch"):
        summary(whole_plan()).executed.windows(6)


def test_a_plan_of_no_iteration_is_refused_in_a_sentence() -> None:
    events = recovery_record()
    only = [event for event in events if not isinstance(event, OpRan) or event.iteration in range(5, 9)]
    with pytest.raises(ForeignPlan, match="no iteration of this record was executed by this plan: workers joined or left"):
        summary(whole_plan(), only)


def test_without_a_recovery_another_plan_is_refused_as_ever() -> None:
    undisturbed = [event for event in recovery_record() if not isinstance(event, Recovered)]
    with pytest.raises(ForeignPlan, match="give the plan of this run"):
        summary(whole_plan(), undisturbed)


def test_facts_list_recoveries_with_their_parts() -> None:
    facts = summary(whole_plan()).to_json()
    left, joined = facts["recoveries"]
    assert {name: left[name] for name in ("worker", "cause", "step", "lost_us", "detect_us", "abort_us", "redo_us", "moves")} == {
        "worker": "W1_1",
        "cause": "its connection closed",
        "step": 6,
        "lost_us": 156_000,
        "detect_us": 3000,
        "abort_us": 41_000,
        "redo_us": REDO_US,
        "moves": [],
    }
    assert (joined["joins"], joined["lost_us"], joined["step"]) == (True, 45_000, 10)
    assert facts["lost_us"]["total"] == 201_000
    assert facts["lost_us"]["regroup"] == 122_000
    assert facts["iterations"] == {"first": 0, "last": 13, "whole": 10, "other_plans": 4}


def test_the_pauses_of_a_real_run_are_counted_as_those_of_a_simulated_one() -> None:
    record = recovery_record()
    run = measure(record)
    assert run.pauses_us == {"regroup": 122_000, "start": 50_000, "abort": 41_000, "transfer": 15_000, "detect": 3000}
    assert (run.redo_us, run.redone_samples) == (REDO_US, SAMPLES)
    assert (run.num_failures, run.num_joins) == (1, 1)
    spells = [event for event in record if isinstance(event, Spell)]
    assert run.total_us == max(spell.end_us for spell in spells), "every microsecond lies in one spell"


def page(known: Summary) -> Any:
    ran = known.run.ops.events(range(1, 4))
    drawn = run_timeline(known.plan.problem, ran, 2, ("as executed",), known.executed.windows(2))
    return imread(BytesIO(draw_page(known, drawn, plan_timeline(known.plan))), format="png")[..., :3]


def num_pixels(image: Any, colour: tuple[int, int, int]) -> int:
    return int((abs(image * 255 - colour) < 2).all(axis=2).sum())


def test_the_page_has_a_table_of_recoveries_and_marks_who_came_and_went() -> None:
    complete = page(summary(whole_plan()))
    undisturbed = [event for event in recovery_record() if not isinstance(event, Recovered | Changed)]
    without = page(summary(whole_plan(), [event for event in undisturbed if not isinstance(event, OpRan) or event.iteration < 5]))
    assert complete.shape[0] - without.shape[0] == pytest.approx(height_px(2) * 1.8, abs=3)  # 180 dots an inch
    head = slice(0, int(complete.shape[0] * 0.4))
    assert (
        num_pixels(complete[head], (0, 158, 115)) > num_pixels(without[head], (0, 158, 115)) == 0
    )  # joined, and the transfer's bar
    assert num_pixels(complete[head], (213, 94, 0)) > num_pixels(without[head], (213, 94, 0)) == 0  # left, and the abort's bar


def test_of_many_recoveries_the_page_shows_the_longest() -> None:
    assert height_px(0) == 0
    assert height_px(MOST_ROWS + 5) == height_px(MOST_ROWS + 500) > height_px(MOST_ROWS)
    many = [replace(LEFT, workers=("W1_1",), iteration=14, at_us=1000 * n, end_us=0) for n in range(40)]
    assert page(summary(whole_plan(), [*recovery_record(), *many])).shape[0] > page(summary(whole_plan())).shape[0]


def trace(plan: Plan) -> list[dict[str, Any]]:
    run = read_run_record(recovery_record())
    made = json.loads(draw_run_trace(plan.problem, run.ops.events(range(14)), run.recoveries))["traceEvents"]
    assert isinstance(made, list)
    return made


def test_a_trace_has_a_track_of_recoveries_part_by_part() -> None:
    slices = [event for event in trace(whole_plan()) if event.get("cat") == "recovery"]
    assert [(event["name"], event["dur"]) for event in slices] == [
        ("detect", 3000),
        ("abort", 41_000),
        ("regroup", 92_000),
        ("regroup", 30_000),
        ("transfer", 15_000),
    ]
    assert slices[0]["args"]["who"] == "W1_1 left"
    left, joined = read_run_record(recovery_record()).recoveries
    assert slices[2]["ts"] + slices[2]["dur"] == left.end_us
    assert slices[4]["ts"] + slices[4]["dur"] == joined.end_us


def test_in_a_trace_a_worker_is_dead_from_its_death_until_it_joins() -> None:
    left, joined = read_run_record(recovery_record()).recoveries
    (dead,) = [event for event in trace(whole_plan()) if event.get("cat") == "dead"]
    assert (dead["ts"], dead["ts"] + dead["dur"]) == (left.at_us, joined.end_us)
    in_vain = [event for event in trace(whole_plan()) if event.get("cat") == "in vain"]
    assert len(in_vain) == left.redone_ops


def test_in_a_trace_a_worker_that_moved_leaves_an_empty_place() -> None:
    """W0_1 moves to the place of W1_1, which died: that place has a worker, but the place W0_1 is empty from then on."""
    run = read_run_record(recovery_record())
    moved = replace(run.recoveries[0], moves=("W0_1>W1_1",))
    made = json.loads(draw_run_trace(whole_plan().problem, run.ops.events(range(5)), [moved]))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    (dead,) = [event for event in made if event.get("cat") == "dead"]
    assert (names[dead["tid"]], dead["ts"]) == ("W0_1", moved.end_us)
