"""The picture of a campaign, read back as pixels."""

from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from recycle.core.events.record import Changed, Event, Spell
from recycle.report.figures.campaign_chart import LINES, draw_campaign, line_of
from recycle.sim.systems.registry import SYSTEMS

HOUR = 3_600_000_000
# 10 samples a second for an hour, then a worker leaves and it is half of that.
FALLS: list[Event] = [
    Changed(HOUR, "W0_0", False, 3),
    Spell(0, HOUR, "train", samples=36_000, num_live=4),
    Spell(HOUR, 2 * HOUR, "train", samples=18_000, num_live=3),
]
STEADY: list[Event] = [FALLS[0], Spell(0, 2 * HOUR, "train", samples=72_000)]


def has_colour(picture: bytes, colour: str) -> np.ndarray:
    """Where a picture has this colour."""
    image = imread(BytesIO(picture), format="png")[..., :3]
    found: np.ndarray = (abs(image - to_rgb(colour)) < 0.02).all(axis=2)
    return found


def test_a_line_falls_when_the_throughput_does() -> None:
    pixels = has_colour(draw_campaign({"recycle": FALLS}, "a title", 10.0), LINES[0][0])
    # The line of the upper panel, without its sample in the legend at the right.
    columns = np.flatnonzero(pixels.any(axis=0))
    line = columns[columns < columns[0] + 0.7 * (columns[-1] - columns[0])]
    heights = [np.flatnonzero(pixels[:, column]).mean() for column in line]
    assert heights[len(heights) // 4] < heights[-len(heights) // 8]  # rows are counted from the top


def test_every_system_has_a_line_of_its_own() -> None:
    assert len(LINES) >= len(SYSTEMS)
    assert len({colour for colour, _ in LINES}) == len({str(dashes) for _, dashes in LINES}) == len(LINES)
    picture = draw_campaign(dict.fromkeys(SYSTEMS, FALLS), "all of them", 10.0)
    for colour, _ in (line_of(system, ()) for system in SYSTEMS):
        assert has_colour(picture, colour).any(), colour


def test_failures_are_marked() -> None:
    joins: list[Event] = [Changed(HOUR, "W0_0", True, 5), *FALLS[1:]]
    marked, unmarked = (has_colour(draw_campaign({"ideal": record}, "", 10.0), "#D55E00") for record in (FALLS, joins))
    assert marked.any()
    assert not unmarked.any()


def test_the_same_records_give_the_same_bytes_and_others_do_not() -> None:
    first = draw_campaign({"recycle": FALLS, "ideal": STEADY}, "a title", 10.0)
    assert draw_campaign({"recycle": FALLS, "ideal": STEADY}, "a title", 10.0) == first
    assert draw_campaign({"recycle": STEADY, "ideal": STEADY}, "a title", 10.0) != first
    assert draw_campaign({"recycle": FALLS, "ideal": STEADY}, "another", 10.0) != first


@pytest.mark.parametrize(
    "record",
    [
        pytest.param([Spell(0, HOUR, "train", samples=36_000, num_live=4)], id="nothing happens"),
        pytest.param([Spell(0, HOUR, "down", "out of memory")], id="nothing is done"),
        pytest.param([Changed(1, "a", False, 0), Spell(0, 2, "train", samples=1)], id="two microseconds"),
        pytest.param(
            [Changed(HOUR, "a", False, 1), Changed(HOUR, "b", False, 0), Spell(0, HOUR * 24 * 365, "down", "nobody")],
            id="a year",
        ),
    ],
)
def test_any_run_can_be_drawn(record: list[Event]) -> None:
    height, width = imread(BytesIO(draw_campaign({"recycle": record}, "a run", 10.0)), format="png").shape[:2]
    assert (width, height) == (1500, 840)
