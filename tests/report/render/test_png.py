"""The PNG, read back as pixels."""

import sys
from io import BytesIO

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from recycle.core.plans.plan import Plan
from recycle.report.render import palette
from recycle.report.render.layout import Picture
from recycle.report.render.palette import PAINTS
from recycle.report.render.png import draw_png
from recycle.report.timeline.plan_timeline import plan_timeline
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan


class Pixels:
    """A drawn plan, asked for the colour at a time on a worker's lane."""

    def __init__(self, plan: Plan) -> None:
        self.picture = Picture(plan_timeline(plan))
        self.image = imread(BytesIO(draw_png(plan_timeline(plan))), format="png")
        self.scale = self.image.shape[1] / self.picture.width_px
        self.tops = {str(band.lane.worker): band.top_px for band in self.picture.bands()}

    def at(self, worker: str, time_us: float, share_of_height: float = 0.15) -> tuple[float, ...]:
        x = self.picture.left_px + self.picture.plot_px * (time_us - self.picture.extent[0]) / self._length
        y = self.tops[worker] + share_of_height * self.picture.slot_px
        return tuple(float(value) for value in self.image[int(y * self.scale), int(x * self.scale)][:3])

    @property
    def _length(self) -> int:
        return self.picture.extent[1] - self.picture.extent[0]


def is_colour(colour: str) -> object:
    return pytest.approx(to_rgb(colour), abs=0.02)


def test_slots_bubbles_and_dead_lanes_have_their_colours() -> None:
    pixels = Pixels(make_1f1b_plan())
    assert pixels.at("W0_0", 0.5) == is_colour(PAINTS["F"].fill)
    assert pixels.at("W2_0", 26.5) == is_colour(PAINTS["B"].fill)
    assert pixels.at("W1_3", 5.5) == is_colour(PAINTS["B"].fill)
    assert pixels.at("W0_0", 7.5) == is_colour(palette.BUBBLE)
    assert pixels.at("W1_3", 23.0) == is_colour(palette.BUBBLE)


def test_dead_workers_have_no_slots_and_rerouted_ones_are_pale_with_stripes() -> None:
    pixels = Pixels(make_rerouted_plan())
    assert pixels.at("W1_1", 3.3) == is_colour(palette.PAPER)
    seen = {pixels.at("W0_1", 3 + step / 200, 0.1) for step in range(10, 190)}
    assert any(colour == is_colour(PAINTS["F"].pale) for colour in seen)
    assert any(colour == pytest.approx(to_rgb(PAINTS["F"].fill), abs=0.12) for colour in seen)


def test_the_iteration_after_is_drawn_pale_behind_the_end_of_the_window() -> None:
    pixels = Pixels(make_rerouted_plan())
    mixed = tuple(0.28 * f + 0.72 for f in to_rgb(PAINTS["F"].fill))
    assert pixels.at("W0_0", 12.5) == pytest.approx(mixed, abs=0.03)
    assert pixels.at("W0_0", 11.0) == is_colour(palette.BUBBLE)


def test_big_plans_are_merged_and_keep_their_outline() -> None:
    plan = make_1f1b_plan(32, 8, 50, costly_profile(8))
    pixels = Pixels(plan)
    assert pixels.picture.is_merged
    assert pixels.at("W5_0", 3_000, 0.5) == is_colour(PAINTS["F"].fill)
    assert pixels.at("W5_0", 100_000, 0.5) == is_colour(palette.BUBBLE)
    assert pixels.at("W31_7", plan.period_us - 60_000, 0.5) == is_colour(palette.BUBBLE)


def test_drawing_leaves_no_global_figure_behind() -> None:
    draw_png(plan_timeline(make_rerouted_plan()))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
