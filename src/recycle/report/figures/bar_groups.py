"""Bar charts in panels: systems compared at a few settings, readable in print and without colour."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from recycle.report.figures.campaign_chart import line_of
from recycle.report.render import palette
from recycle.report.render.matplotlib_figure import new_figure, png_bytes, simplify_axes

_MOST_COLUMNS = 4
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "**", "--")


class Panel(NamedTuple):
    """One bar chart: for every series a value for every group, or None."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


def draw_bars(panels: Sequence[Panel], title: str, axis: str, groups: str = "") -> bytes:
    """Return a PNG of the panels, which share their series; `axis` and `groups` are the labels of the axes."""
    num_columns = min(_MOST_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = new_figure(max(5.0, 3.4 * num_columns), 1.2 + 3 * num_rows)
    places = figure.subplots(num_rows, num_columns, squeeze=False)
    for number, panel in enumerate(panels):
        axes = places[number // num_columns][number % num_columns]
        _draw_panel(axes, panel)
        axes.set_xlabel(groups, color=palette.FAINT_INK, fontsize=8)
        if number % num_columns == 0:
            axes.set_ylabel(axis, color=palette.INK)
            handles, labels = axes.get_legend_handles_labels()
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=11, fontweight="bold", color=palette.INK)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    return png_bytes(figure)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for number, (name, values) in enumerate(panel.series.items()):
        at = [group + (number - (len(panel.series) - 1) / 2) * width for group in range(len(panel.groups))]
        bars = axes.bar(at, [value or 0.0 for value in values], width, label=name, color=line_of(name, list(panel.series))[0])
        for bar, value in zip(bars, values, strict=True):
            bar.set_hatch(_HATCHES[number % len(_HATCHES)])
            bar.set_edgecolor(palette.PAPER)
            if value is None:
                axes.text(bar.get_x() + width / 2, 0, " none", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_title(panel.title, fontsize=9, color=palette.INK)
    simplify_axes(axes)
