"""The terminal chart, line by line."""

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.report.render.palette import PAINTS
from recycle.report.render.terminal_chart import BUBBLE, DEAD, MOST_WORKERS, NOTE, Line, draw_chart, select_workers
from recycle.report.timeline.plan_timeline import plan_timeline
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan


def text_of(line: Line) -> str:
    return "".join(cell.text for cell in line)


def lane(plan: Plan, worker: str, width: int) -> Line:
    return next(line for line in draw_chart(plan_timeline(plan), width) if line and line[0].text.split()[:1] == [worker])


def test_slots_are_drawn_to_scale_with_kind_and_micro_batch() -> None:
    """Three columns a unit at width 90: F is three columns wide, the fused B six, each idle unit three dots."""
    assert text_of(lane(make_1f1b_plan(), "W1_0", 90)) == (
        "W1_0 ▕F0 F1 F2 F3 ··················B0    F4 B1    F5 B2    ···B3    ···B4    ···B5    ▏"
    )
    assert text_of(lane(make_1f1b_plan(), "W2_3", 90)) == (
        "W2_3 ▕·········F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5    ··················▏"
    )


def test_a_cell_has_the_style_of_its_kind() -> None:
    styles = [(cell.text, cell.style) for cell in lane(make_1f1b_plan(), "W0_0", 90)]
    assert styles[2:5] == [("F0 F1 F2 F3 ", "F"), ("·" * 18, BUBBLE), ("B0    ", "B")]


def test_rerouted_ops_are_lower_case_and_name_their_home() -> None:
    line = lane(make_rerouted_plan(), "W0_1", 80)
    assert text_of(line) == "W0_1      ▕F0   I0   f0@1 i0@1 F1   I1   f1@1 i1@1 W0   w0@1 W1   w1@1 ▏"
    rerouted = "".join(cell.text for cell in line if cell.style.endswith(" rerouted"))
    assert rerouted.split() == ["f0@1", "i0@1", "f1@1", "i1@1", "w0@1", "w1@1"]


def test_without_room_for_the_home_rerouted_ops_are_still_lower_case() -> None:
    assert text_of(lane(make_rerouted_plan(staggered=False), "W0_1", 50)) == ("W0_1 ▕···F0 I0 f0 i0 F1 I1 f1 i1 W0 w0 W1 w1 ▏")


def test_windows_of_stages_are_shifted_and_equally_long_when_staggered() -> None:
    bars = []
    for stage in range(4):
        text = text_of(lane(make_split_plan(), f"W0_{stage}", 100))
        bars.append((text.index("▕"), text.index("▏") - text.index("▕") - 1))
    assert bars == [(5, 63), (8, 63), (11, 63), (14, 63)]


def test_dead_workers_have_a_line_of_their_own() -> None:
    line = lane(make_rerouted_plan(), "W1_1", 80)
    assert {cell.style for cell in line} == {DEAD, "plain"}
    assert text_of(line).strip("W1_ -") == "dead"


def test_pipelines_are_set_apart() -> None:
    lines = [text_of(line)[:4] for line in draw_chart(plan_timeline(make_1f1b_plan(2, 2, 2)), 80)]
    start = lines.index("W0_0")
    assert lines[start : start + 5] == ["W0_0", "W0_1", "", "W1_0", "W1_1"]


def test_the_axis_marks_times_above_the_columns_they_stand_for() -> None:
    lines = [text_of(line) for line in draw_chart(plan_timeline(make_1f1b_plan()), 90)]
    numbers = next(line for line in lines if line.startswith("  µs"))
    body = next(line for line in lines if line.startswith("W0_0"))
    origin = body.index("F0")
    assert [numbers.index(f" {tick}") + 1 for tick in ("0", "5", "10", "25")] == [origin + 3 * t for t in (0, 5, 10, 25)]


def test_the_legend_explains_what_is_drawn_and_nothing_else() -> None:
    legend = " ".join(text_of(line) for line in draw_chart(plan_timeline(make_rerouted_plan()), 80)[-3:])
    for meaning in (
        "F forward",
        "I input gradient",
        "W weight gradient",
        "lower case: re-routed",
        "bubble",
        "next iteration starts",
    ):
        assert meaning in legend
    assert "whole backward" not in legend
    assert "optimizer" not in legend


def test_reduce_and_optimizer_are_drawn_where_they_take_time() -> None:
    line = lane(make_rerouted_plan(profile=costly_profile(2)), "W1_0", 120)
    assert [cell.text.strip() for cell in line if cell.style in ("reduce", "optimizer")] == ["R", "O"]


def test_too_narrow_columns_show_kinds_in_their_shares() -> None:
    """60 micro-batches in about 90 columns: an op has half a column, but F : B : idle stays 60 : 120 : 9."""
    plan = make_1f1b_plan(1, 4, 60)
    text = text_of(lane(plan, "W0_0", 100))[5:]
    columns = len(text) - 2
    for letter, units in (("F", 60), ("B", 120), ("·", 9)):
        assert text.count(letter) / columns == pytest.approx(units / plan.period_us, abs=0.03)
    assert "a column is" in text_of(draw_chart(plan_timeline(plan), 100)[-1])


@pytest.mark.parametrize("width", [40, 61, 80, 133, 250])
@pytest.mark.parametrize(
    "plan",
    [make_1f1b_plan(), make_split_plan(), make_rerouted_plan(profile=costly_profile(2)), make_1f1b_plan(12, 8, 20)],
    ids=["1f1b", "split", "costly", "big"],
)
def test_no_lane_is_wider_than_asked(plan: Plan, width: int) -> None:
    lines = draw_chart(plan_timeline(plan), width)
    assert max(len(text_of(line)) for line in lines if line and line[0].text.startswith("W")) <= width


def test_every_slot_is_drawn_once() -> None:
    plan = make_1f1b_plan(profile=costly_profile(4))
    for row in plan.rows:
        labels = "".join(cell.text for cell in lane(plan, str(row.worker), 200) if cell.style in PAINTS).split()
        assert [label for label in labels if label not in "RO"] == [
            slot.op.kind + str(slot.op.microbatch.index) for slot in plan.slots(row)
        ]


def test_big_plans_show_a_selection_and_say_so() -> None:
    plan = make_1f1b_plan(12, 8, 4)
    lines = draw_chart(plan_timeline(plan), 100)
    shown = [text_of(line).split()[0] for line in lines if line and line[0].text.startswith("W")]
    assert len(shown) == MOST_WORKERS
    assert (shown[0], shown[-1]) == ("W0_0", "W11_7")
    notes = [cell.text for line in lines for cell in line if cell.style == NOTE]
    assert "56 of 96 workers are not shown; --rows all shows them" in notes
    everyone = [line for line in draw_chart(plan_timeline(plan), 100, all_rows=True) if line and line[0].text.startswith("W")]
    assert len(everyone) == 96


def test_the_selection_holds_the_dead_and_their_peers() -> None:
    dead = {Worker(3, 5), Worker(60, 2)}
    chosen = select_workers(Cluster(Shape(64, 8, 4), frozenset(dead)), 40)
    assert len(chosen) == len(set(chosen)) == 40
    assert dead <= set(chosen)
    assert {Worker(0, 0), Worker(63, 7)} <= set(chosen)
    assert {Worker(p, stage) for p in (0, 1, 2) for stage in (2, 5)} <= set(chosen)
    assert chosen == sorted(chosen)


def test_with_many_failures_the_selection_still_shows_live_peers() -> None:
    dead = frozenset(Worker(p, 1) for p in range(60))
    chosen = select_workers(Cluster(Shape(64, 8, 4), dead), 40)
    assert {Worker(p, 1) for p in range(60, 64)} <= set(chosen)
    assert sum(worker in dead for worker in chosen) < 20
