"""The page of a run, read back as pixels; and ops in vain in every picture."""

import json
from collections.abc import Iterable, Sequence
from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from msgspec.structs import replace

from recycle.core.cluster import Worker
from recycle.core.events.record import Event, Held, OpRan, Spell, Stepped
from recycle.core.plans.plan import Plan
from recycle.report.export.perfetto import draw_run_trace
from recycle.report.figures.run_page import draw_page, lay_out
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.run_summary import Summary
from recycle.report.render.palette import PAINTS
from recycle.report.render.svg import draw_svg
from recycle.report.timeline.plan_timeline import plan_timeline
from recycle.report.timeline.run_timeline import run_timeline
from recycle.report.timeline.timeline import Timeline
from tests.builders import make_plan, make_problem
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan
from tests.run_records import Training, training_record

LINE, MARK = "#0072b2", "#d55e00"


def rerouted() -> Plan:
    return make_rerouted_plan(profile=costly_profile(2))


def timelines(known: Summary, iteration: int) -> tuple[Timeline, Timeline]:
    ran = known.run.ops.events([iteration - 1, iteration, iteration + 1])
    windows = known.executed.windows(iteration)
    return run_timeline(known.plan.problem, ran, iteration, ("as executed",), windows), plan_timeline(known.plan)


def page(plan: Plan, events: Iterable[Event], gaps: Sequence[str] = ()) -> bytes:
    known = Summary(read_run_record(events), plan, gaps=gaps)
    return draw_page(known, *timelines(known, known.executed.middle))


def share_of(picture: bytes, colour: str, part: tuple[float, float, float, float]) -> float:
    """The share of pixels of a colour in a part of the picture, given as left, right, top and bottom, shares of its size."""
    image = imread(BytesIO(picture), format="png")[..., :3]
    height, width = image.shape[:2]
    left, right, top, bottom = part
    cut = image[int(top * height) : int(bottom * height), int(left * width) : int(right * width)]
    return float((np.abs(cut - to_rgb(colour)) < 0.02).all(axis=2).mean())


# The head and the three panels of a page with two Gantt charts of four lanes each.
HEAD = (0.0, 1.0, 0.0, 0.07)
LOSS, SPEED, MEMORY = (0.05, 0.32, 0.07, 0.29), (0.37, 0.64, 0.07, 0.29), (0.69, 0.97, 0.07, 0.29)


def test_loss_speed_and_memory_are_drawn_where_the_record_holds_them() -> None:
    complete = page(rerouted(), training_record(rerouted(), Training(12)))
    ops_only = page(rerouted(), [event for event in training_record(rerouted(), Training(12)) if isinstance(event, OpRan)])
    assert share_of(complete, LINE, LOSS) > 0.001
    assert share_of(ops_only, LINE, LOSS) == 0
    assert share_of(complete, LINE, SPEED) > 0.001
    assert share_of(ops_only, LINE, SPEED) > 0.001  # iteration times, which follow from the ops
    assert share_of(complete, LINE, MEMORY) > 0.1
    assert share_of(ops_only, LINE, MEMORY) == 0


def test_steps_that_were_clipped_or_taken_back_are_marked_and_warnings_and_gaps_too() -> None:
    undisturbed = page(rerouted(), training_record(rerouted(), Training(12)))
    eventful = Training(12, clipped=(3, 5), skipped=(7,), taken_back=(5,), saved=(5,), warned=(9,))
    complete = page(rerouted(), training_record(rerouted(), eventful), gaps=["its last line is cut off"])
    for panel in (HEAD, LOSS, SPEED):
        assert share_of(undisturbed, MARK, panel) == 0
        assert share_of(complete, MARK, panel) > 0


def test_executed_and_planned_have_one_scale_at_the_speed_of_the_ops() -> None:
    """Every op takes twice the planned time, and then all workers wait: the planned iteration ends earlier, and starts alike."""
    plan = make_plan(make_problem(1, 2, 1, costs=(10, 10, 10)), {"W0_0": "0:0F0 40:0B0", "W0_1": "10:1F0 20:1B0"})
    ran = [
        replace(op, iteration=number, start_us=op.start_us + 150 * number, end_us=op.end_us + 150 * number)
        for number in range(3)
        for op in (
            OpRan(0, "W0_0", "0F0@0", 0, 20),
            OpRan(0, "W0_1", "1F0@0", 20, 40),
            OpRan(0, "W0_1", "1B0@0", 40, 80),
            OpRan(0, "W0_0", "0B0@0", 80, 120),
        )
    ]
    known = Summary(read_run_record(ran), plan)
    upper, lower = lay_out(*timelines(known, 1), known.executed.slowdown())
    assert upper.width_px == lower.width_px
    for went_us, planned_us in ((0, 0), (20, 10), (80, 40), (120, 60)):  # F and B of W0_0, from the start of either extent
        assert upper.x_px(150 + went_us) == pytest.approx(lower.x_px(planned_us))
    assert upper.x_px(upper.timeline.windows[0][1]) > lower.x_px(lower.timeline.windows[0][1])


def test_a_page_draws_plans_that_are_longer_than_the_run() -> None:
    """With jitter and eagerly, some iterations are shorter than the plan; neither picture may leave the page."""
    plan = rerouted()
    known = Summary(read_run_record(training_record(plan, Training(12, jitter=0.3))), plan)
    for iteration in known.executed.whole[1:-1]:
        for picture in lay_out(*timelines(known, iteration), known.executed.slowdown()):
            assert picture.x_px(picture.timeline.extent[1]) <= picture.left_px + picture.plot_px + 1


def test_the_same_record_gives_the_same_bytes() -> None:
    record = training_record(rerouted(), Training(5))
    assert page(rerouted(), record) == page(rerouted(), record)


@pytest.mark.parametrize("num_steps", [1, 2, 60])
@pytest.mark.parametrize("plan", [rerouted(), make_1f1b_plan(1, 2, 3, costly_profile(2))], ids=["rerouted", "synchronous"])
def test_any_length_of_a_run_can_be_drawn(plan: Plan, num_steps: int) -> None:
    image = imread(BytesIO(page(plan, training_record(plan, Training(num_steps)))), format="png")
    assert image.shape[1] > 1500


def test_a_run_whose_losses_were_never_finite_and_whose_plan_knows_no_bytes_can_be_drawn() -> None:
    plan = rerouted()
    record = [
        replace(event, loss=None)
        if isinstance(event, Stepped)
        else replace(event, planned_bytes=0, activation_bytes=0)
        if isinstance(event, Held)
        else replace(event, samples=0)
        if isinstance(event, Spell)
        else event
        for event in training_record(plan, Training(3))
    ]
    assert page(plan, record).startswith(b"\x89PNG\r\n")


def test_of_many_workers_the_fullest_of_each_stage_has_its_bars() -> None:
    plan = make_1f1b_plan(6, 4, 6)
    record = training_record(plan, Training(3, jitter=0.0))
    assert share_of(page(plan, record), PAINTS["I"].fill, (0.69, 0.97, 0.03, 0.2)) > 0.01  # the bars of the planned memory


def test_ops_in_vain_are_in_no_gantt_chart() -> None:
    plan = rerouted()
    known = Summary(read_run_record(training_record(plan, Training(5, jitter=0.0, taken_back=(1,)))), plan)
    timeline, _ = timelines(known, 2)
    assert [str(block.op) for block in timeline.lane(Worker(0, 0)).blocks if block.op].count("0F0@0") == 1
    assert timeline.windows == known.executed.windows(2)
    assert draw_svg(timeline).count("0F0@0 on W0_0") == 1


def test_ops_in_vain_have_their_own_category_in_a_trace() -> None:
    plan = rerouted()
    record = training_record(plan, Training(5, jitter=0.0, taken_back=(1,)))
    undisturbed = training_record(plan, Training(5, jitter=0.0))
    with_vain, without = (
        json.loads(draw_run_trace(plan.problem, [event for event in events if isinstance(event, OpRan)]))["traceEvents"]
        for events in (record, undisturbed)
    )
    in_vain = [event for event in with_vain if event.get("cat") == "in vain"]
    assert sorted(event["name"] for event in in_vain) == ["0F0 in vain", "0F0 in vain"]
    assert {event["args"]["iteration"] for event in in_vain} == {2}
    for phase in ("s", "C"):  # arrows and what workers hold are as if nothing had been in vain
        assert sum(event["ph"] == phase for event in with_vain) == sum(event["ph"] == phase for event in without) > 0
