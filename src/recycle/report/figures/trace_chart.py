"""The number of live nodes over the time of a trace, as a chart for a terminal and as a PNG."""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import groupby, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from recycle.core.events.trace import Trace, live_counts
from recycle.core.units import format_duration
from recycle.report.render import palette
from recycle.report.render.palette import PAINTS
from recycle.report.render.terminal_chart import AXIS, LABEL, NOTE, PLAIN, Cell, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, CAME = "B", "W"  # looks of the palette: orange for nodes that leave, green for nodes that come
_MOST_ROWS = 8
_LABEL_COLUMNS = 12  # enough for "1 h 30 min" and spaces around it
_PARTS = " ▁▂▃▄▅▆▇█"
_ASCII_PARTS = " .....:::#"
_MS, _S, _MIN, _H, _D = 1000, 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6
_STEPS = (
    *(number * _MS for number in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    *(number * unit for unit in (_S, _MIN) for number in (1, 2, 5, 10, 15, 30)),
    *(number * _H for number in (1, 2, 3, 4, 6, 12)),
    *(number * 10**power * _D for power in range(5) for number in (1, 2, 5)),
)


def ticks(end_us: int, most: int) -> list[int]:
    """At most `most` round times from 0 to the end, and always 0."""
    step = next((step for step in _STEPS if end_us < step * most), end_us)
    return list(range(0, end_us + 1, step))


def levels(trace: Trace) -> tuple[int, int]:
    """The lowest and highest number of nodes on the axis: from 0, unless most nodes are always live."""
    counts = [count for _, count in live_counts(trace)]
    lowest, highest = min(counts), max(counts)
    spare = max(1, (highest - lowest) // 4)
    return (lowest - spare if lowest - spare > highest // 2 else 0), max(1, highest)


def draw_strip(trace: Trace, width: int, is_ascii: bool = False) -> list[Line]:
    """Return the chart in lines of at most `width` columns; a column shows the fewest live nodes in it."""
    low, high = levels(trace)
    per_row = math.ceil((high - low) / _MOST_ROWS)
    num_rows = math.ceil((high - low) / per_row)
    margin = max(len(f"{low + num_rows * per_row:,}"), len("left")) + 1
    num_columns = width - margin - 1
    fewest = _fewest(trace, num_columns)
    parts = _ASCII_PARTS if is_ascii else _PARTS
    lines: list[Line] = [(Cell("live", LABEL),)]
    for row in reversed(range(num_rows)):
        floor = low + row * per_row
        text = "".join(_part(count - floor, per_row, parts) for count in fewest)
        lines.append((Cell(f"{floor + per_row:>{margin - 1},} ", AXIS), Cell("▕", AXIS), Cell(text.rstrip(), PLAIN)))
    lines += _axis_lines(trace.end_us, f"{low:>{margin - 1},} ", num_columns)
    lines += [_count_line(trace, joins, margin, num_columns) for joins in (False, True)]
    note = f"a column is {format_duration(trace.end_us // num_columns)} and shows the fewest live nodes in it"
    starts = f"; the lowest line is {low:,} nodes, not 0" if low else ""
    return [*lines, *((Cell(text, NOTE),) for text in wrap(note + starts, width))]


def _fewest(trace: Trace, num_columns: int) -> list[int]:
    """The fewest live nodes in each column, at its start or within it."""
    times, counts = zip(*live_counts(trace), strict=True)
    edges = [-(-trace.end_us * column // num_columns) for column in range(num_columns)] + [trace.end_us + 1]
    spans = ((bisect_right(times, first_us) - 1, bisect_left(times, next_us)) for first_us, next_us in pairwise(edges))
    return [min(counts[first : max(first + 1, last)]) for first, last in spans]


def _part(num_above: int, per_row: int, parts: str) -> str:
    share = min(max(num_above / per_row, 0), 1)
    # Rounded up, so that a cell with live nodes is never empty.
    return parts[math.ceil(share * 8)] if share < 1 else parts[-1]


def _axis_lines(end_us: int, label: str, num_columns: int) -> list[Line]:
    numbers, ruler = [" "] * (num_columns + 1), ["─"] * num_columns
    for time in ticks(end_us, max(1, num_columns // _LABEL_COLUMNS)):
        column, text = _column(time, end_us, num_columns), format_duration(time) if time else "0"
        column_of_text = min(column, num_columns - len(text))
        numbers[column_of_text : column_of_text + len(text)] = text
        ruler[column] = "┬"
    margin = " " * (len(label) + 1)
    return [
        (Cell(label, AXIS), Cell("▕", AXIS), Cell("".join(ruler), AXIS)),
        (Cell(margin, PLAIN), Cell("".join(numbers).rstrip(), AXIS)),
    ]


def _count_line(trace: Trace, joins: bool, margin: int, num_columns: int) -> Line:
    """The number of nodes that left (or came) in each column: a digit, or + for ten and more."""
    counts = Counter(_column(change.at_us, trace.end_us, num_columns) for change in trace.later if change.joins == joins)
    text = "".join("·" if not counts[at] else str(counts[at]) if counts[at] < 10 else "+" for at in range(num_columns))
    look = CAME if joins else LEFT
    runs = groupby(text, key=lambda letter: AXIS if letter == "·" else look)
    return Cell(f"{'came' if joins else 'left':<{margin}} ", LABEL), *(Cell("".join(run), style) for style, run in runs)


def _column(at_us: int, end_us: int, num_columns: int) -> int:
    return min(num_columns - 1, at_us * num_columns // end_us)


def draw_trace_png(trace: Trace, title: str) -> bytes:
    """Return the bytes of a PNG file: a step for each change, an orange mark where nodes left, a green one where they came."""
    # Imported here, because matplotlib takes half a second to import, and the chart of a terminal does not need it.
    from recycle.report.render.matplotlib_figure import new_figure, png_bytes

    figure = new_figure(10, 3.6)
    axes = figure.add_subplot()
    _draw_steps(axes, trace)
    _draw_marks(axes, trace)
    _format_axes(axes, trace, title)
    return png_bytes(figure, dpi=200)


def _draw_steps(axes: "Axes", trace: Trace) -> None:
    counts_by_time = list(live_counts(trace))
    times, counts = zip(*counts_by_time, (trace.end_us, counts_by_time[-1][1]), strict=True)
    paint = PAINTS["F"]
    axes.fill_between(times, counts, levels(trace)[0], step="post", color=paint.pale, linewidth=0)
    axes.step(times, counts, where="post", color=paint.fill, linewidth=1.4)


def _draw_marks(axes: "Axes", trace: Trace) -> None:
    """Mark departures at the upper edge and returns at the lower edge."""
    for joins, look, meaning, marker, height in ((False, LEFT, "left", "v", 0.96), (True, CAME, "came", "^", 0.04)):
        times = sorted({change.at_us for change in trace.later if change.joins == joins})
        if times:
            num = sum(change.joins == joins for change in trace.later)
            style: dict[str, Any] = {"marker": marker, "markersize": 5, "linestyle": "none", "color": PAINTS[look].fill}
            axes.plot(times, [height] * len(times), transform=axes.get_xaxis_transform(), label=f"{num:,} {meaning}", **style)


def _format_axes(axes: "Axes", trace: Trace, title: str) -> None:
    low, high = levels(trace)
    times = ticks(trace.end_us, 10)
    axes.set_xticks(times, [format_duration(time) if time else "0" for time in times])
    axes.set_xlim(0, trace.end_us)
    axes.set_ylim(low, high + max(1, (high - low) / 8))
    axes.locator_params(axis="y", integer=True)
    axes.set_ylabel("live nodes" if not low else f"live nodes (from {low:,})", color=palette.INK)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=palette.INK)
    axes.grid(color=palette.GRID, linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.FAINT_INK)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)
