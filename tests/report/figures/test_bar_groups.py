"""Groups of bars, read back as pixels."""

from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from recycle.report.figures.bar_groups import Panel, draw_bars
from recycle.report.figures.campaign_chart import LINES

FIRST = LINES[0][0]  # the first series has no hatch, so that its bars are plain


def heights(picture: bytes) -> list[int]:
    """How tall the bars of the first series are in pixels, from left to right."""
    image = imread(BytesIO(picture), format="png")[..., :3]
    pixels = (abs(image - to_rgb(FIRST)) < 0.02).all(axis=2)
    pixels[int(0.9 * len(pixels)) :] = False  # the legend
    columns = pixels.sum(axis=0)
    edges = np.flatnonzero(np.diff((columns > 0).astype(int)))
    return [int(columns[first + 1 : last + 1].max()) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def test_a_bar_is_as_tall_as_its_value() -> None:
    one, two, four = heights(draw_bars([Panel("panel", ["a", "b", "c"], {"ours": [1.0, 2.0, 4.0]})], "title", "axis"))
    # Every bar has the same edge, which the differences do not see.
    assert one > 50
    assert two - one == pytest.approx(one, rel=0.05)
    assert four - two == pytest.approx(2 * (two - one), abs=3)


def test_bars_of_several_series_stand_beside_each_other() -> None:
    series = {"ours": [2.0, 1.0], "theirs": [1.0, 1.0], "others": [1.5, 1.5]}
    tall, low = heights(draw_bars([Panel("panel", ["a", "b"], series)], "title", "axis"))
    assert tall == pytest.approx(2 * low, rel=0.03)


def test_panels_stand_beside_each_other() -> None:
    panels = [Panel(name, ["a"], {"ours": [1.0], "theirs": [2.0]}) for name in ("one", "two", "three")]
    found = heights(draw_bars(panels, "title", "axis"))
    assert len(found) == 3
    assert max(found) - min(found) <= 2


def test_a_value_that_is_missing_has_a_word_and_no_bar() -> None:
    missing = draw_bars([Panel("panel", ["a", "b"], {"ours": [None, 1.0], "theirs": [1.0, 1.0]})], "title", "axis")
    zero = draw_bars([Panel("panel", ["a", "b"], {"ours": [0.0, 1.0], "theirs": [1.0, 1.0]})], "title", "axis")
    assert len(heights(missing)) == len(heights(zero)) == 1
    assert missing != zero


def test_more_series_than_colours_can_be_drawn() -> None:
    series = {f"system {number}": [float(number), None] for number in range(len(LINES) + 3)}
    assert draw_bars([Panel("panel", ["a", "b"], series)], "title", "axis").startswith(b"\x89PNG\r\n\x1a\n")


def test_the_same_panels_give_the_same_bytes_and_others_do_not() -> None:
    panels = [Panel("panel", ["a"], {"ours": [1.0]})]
    assert draw_bars(panels, "title", "axis") == draw_bars(panels, "title", "axis")
    assert draw_bars(panels, "title", "axis") != draw_bars([Panel("panel", ["a"], {"ours": [2.0]})], "title", "axis")
