"""The recovery table of the run page: workers, step, lost time, and its parts as bars and numbers."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from recycle.core.events.record import PARTS, Recovered
from recycle.report.record.recovery_text import PART_LOOKS, describe_rest, format_ms, who
from recycle.report.render import palette
from recycle.report.render.palette import PAINTS

MOST_ROWS = 12
_POINTS = 72 / 100  # a layout pixel is 1/100 inch, whatever the resolution
_FONT = 10 * _POINTS
_TITLE_PX, _HEAD_PX, _ROW_PX, _BAR_PX = 24.0, 22.0, 18.0, 11.0
_WHO_PX, _STEP_PX, _BARS_PX, _NUMBERS_PX, _NUMBER_PX = 12.0, 190.0, (210.0, 480.0), 545.0, 68.0
_LONGEST_CAUSE = 62


def height_px(num_recoveries: int) -> float:
    """The height of the table; 0 without recoveries."""
    if not num_recoveries:
        return 0.0
    num_rows = min(num_recoveries, MOST_ROWS) + (num_recoveries > MOST_ROWS)
    return _TITLE_PX + _HEAD_PX + num_rows * _ROW_PX + 8


def draw_recoveries(axes: Axes, recoveries: Sequence[Recovered], width_px: float) -> None:
    """Draw the longest recoveries into axes whose size in 1/100 inch is the size of the table in pixels."""
    axes.set_xlim(0, width_px)
    axes.set_ylim(height_px(len(recoveries)), 0)
    axes.set_axis_off()
    title = f"recoveries · {len(recoveries):,}, which cost {format_ms(sum(one.lost_us for one in recoveries))}"
    axes.text(_WHO_PX, 14, title, fontsize=9, fontweight="bold", color=palette.INK)
    _draw_head(axes, _TITLE_PX + 14)
    longest = sorted(recoveries, key=lambda one: -one.lost_us)[:MOST_ROWS]
    shown = sorted(longest, key=lambda one: one.at_us)
    top = _TITLE_PX + _HEAD_PX
    for number, one in enumerate(shown):
        _draw_row(axes, one, top + number * _ROW_PX, max(1, longest[0].lost_us))
    if more := len(recoveries) - len(shown):
        below = top + len(shown) * _ROW_PX + 13
        _text(axes, _WHO_PX, below, f"and {more:,} shorter ones", "left", palette.FAINT_INK)


def _text(axes: Axes, x: float, y: float, text: str, side: str, colour: str = palette.INK) -> None:
    # Otherwise a dollar sign would start a formula.
    axes.text(x, y, text, fontsize=_FONT, color=colour, ha=side, va="baseline", parse_math=False)


def _draw_head(axes: Axes, base: float) -> None:
    _text(axes, _WHO_PX, base, "who", "left", palette.FAINT_INK)
    _text(axes, _STEP_PX, base, "step", "right", palette.FAINT_INK)
    for number, name in enumerate(("lost", *PARTS)):
        x = _NUMBERS_PX + number * _NUMBER_PX
        _text(axes, x, base, name, "right", palette.FAINT_INK)
        if name in PART_LOOKS:
            axes.add_patch(Rectangle((x - 9, base + 3), 9, 3, facecolor=PAINTS[PART_LOOKS[name]].fill, linewidth=0))
    _text(axes, _NUMBERS_PX + len(PARTS) * _NUMBER_PX + 20, base, "cause", "left", palette.FAINT_INK)


def _draw_row(axes: Axes, one: Recovered, top: float, longest_us: int) -> None:
    base = top + 13
    _text(axes, _WHO_PX, base, who(one), "left")
    _text(axes, _STEP_PX, base, str(one.iteration + 1), "right")
    left, right = _BARS_PX
    x = left
    for part, time_us in one.parts_us.items():
        wide = (right - left) * time_us / longest_us
        fill = PAINTS[PART_LOOKS[part]].fill
        axes.add_patch(Rectangle((x, top + 4), wide, _BAR_PX, facecolor=fill, edgecolor=palette.PAPER, linewidth=0.4))
        x += wide
    for number, time_us in enumerate((one.lost_us, *one.parts_us.values())):
        text, colour = (format_ms(time_us), palette.INK) if time_us else ("–", palette.FAINT_INK)
        _text(axes, _NUMBERS_PX + number * _NUMBER_PX, base, text, "right", colour)
    cause = describe_rest(one)
    cause = cause if len(cause) <= _LONGEST_CAUSE else f"{cause[: _LONGEST_CAUSE - 1]}…"
    _text(axes, _NUMBERS_PX + len(PARTS) * _NUMBER_PX + 20, base, cause, "left")
