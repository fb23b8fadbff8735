"""The SVG, read back as XML."""

from xml.etree import ElementTree

import pytest

from recycle.core.plans.plan import Plan
from recycle.report.render.layout import MOST_SLOTS, Picture
from recycle.report.render.palette import PAINTS
from recycle.report.render.svg import draw_svg
from recycle.report.timeline.plan_timeline import plan_timeline
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan

SPACE = "{http://www.w3.org/2000/svg}"


def parse(plan: Plan) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg(plan_timeline(plan)))


def slots(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SPACE}rect") if rect.get("class", "").startswith("slot ")]


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SPACE}text")]


def test_every_slot_is_a_box_as_wide_as_it_is_long() -> None:
    plan = make_1f1b_plan()
    boxes = slots(parse(plan))
    assert len(boxes) == plan.num_ops == 144
    unit = Picture(plan_timeline(plan)).plot_px / 27
    for look, units in (("F", 1), ("B", 2)):
        widths = [float(box.get("width", 0)) for box in boxes if box.get("class") == f"slot {look}"]
        assert widths == pytest.approx([units * unit] * 72, abs=0.01)


def test_boxes_stand_where_their_slots_start_and_say_what_they_are() -> None:
    plan = make_rerouted_plan()
    picture = Picture(plan_timeline(plan))
    boxes = {(box.findtext(f"{SPACE}title") or "").split(",")[0]: box for box in slots(parse(plan))}
    for slot in plan.all_slots():
        assert float(boxes[f"{slot.op} on {slot.worker}"].get("x", 0)) == pytest.approx(picture.x_px(slot.start_us), abs=0.01)
    lanes = {box.get("y") for name, box in boxes.items() if name.endswith("W0_1")}
    assert len(lanes) == 1


def test_rerouted_slots_are_striped_and_name_their_home() -> None:
    root = parse(make_rerouted_plan())
    striped = [box for box in slots(root) if box.get("class", "").endswith("-rerouted")]
    assert len(striped) == 6
    assert {"F0@1", "I0@1", "W0@1", "F1@1", "I1@1", "W1@1"} <= set(texts(root))
    patterns = {pattern.get("id") for pattern in root.iter(f"{SPACE}pattern")}
    assert patterns == {f"stripes-{look}" for look in PAINTS}


def test_the_title_says_the_period_and_the_bound() -> None:
    found = " ".join(texts(parse(make_rerouted_plan())))
    assert "period 12 µs · proven bound 12 µs (optimal)" in found


def test_dead_workers_are_labelled() -> None:
    assert "W1_1 dead" in texts(parse(make_rerouted_plan()))


def test_idle_time_lies_open_inside_the_window_of_each_live_worker() -> None:
    plan = make_split_plan()
    root = parse(plan)
    unit = Picture(plan_timeline(plan)).plot_px / 24
    bubbles = [rect for rect in root.iter(f"{SPACE}rect") if rect.get("class") == "bubble"][: len(plan.rows)]
    starts = [round((float(rect.get("x", 0)) - Picture.left_px) / unit) for rect in bubbles]
    assert starts == [0, 1, 2, 3] * 2
    assert {round(float(rect.get("width", 0)) / unit) for rect in bubbles} == {21}


def test_staggered_plans_show_the_iterations_beside_each_window() -> None:
    staggered, synchronous = parse(make_rerouted_plan()), parse(make_rerouted_plan(staggered=False))
    assert len([group for group in staggered.iter(f"{SPACE}g") if group.get("class") == "beside"]) == 3
    assert not list(synchronous.iter(f"{SPACE}g"))


def test_narrow_slots_have_no_label_but_keep_their_tip() -> None:
    plan = make_1f1b_plan(1, 2, 200)
    root = parse(plan)
    assert len(slots(root)) == 800
    assert not [text for text in texts(root) if text.startswith("F1")]
    assert all(box.findtext(f"{SPACE}title") for box in slots(root))


def test_the_legend_names_what_is_drawn() -> None:
    found = texts(parse(make_rerouted_plan(profile=costly_profile(2))))
    for meaning in ("F forward", "R reduce gradients", "O optimizer step", "re-routed from another pipeline", "bubble"):
        assert meaning in found
    assert "B whole backward" not in found


def test_everything_lies_inside_the_picture() -> None:
    for plan in (make_1f1b_plan(), make_rerouted_plan(profile=costly_profile(2)), make_split_plan()):
        root = parse(plan)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for rect in root.iter(f"{SPACE}rect"):
            if rect.get("class"):
                assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
                assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_a_huge_plan_stays_a_small_file_with_a_path_for_each_look() -> None:
    plan = make_1f1b_plan(128, 8, 100, costly_profile(8))
    assert plan.num_ops == 204_800 > MOST_SLOTS
    text = draw_svg(plan_timeline(plan))
    assert len(text.encode()) < 5_000_000
    root = ElementTree.fromstring(text)
    assert not slots(root)
    paths = [path.get("class") for path in root.iter(f"{SPACE}path")]
    assert paths.count("F") == paths.count("B") == 1024
