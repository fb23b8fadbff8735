"""Groups of bars, one panel beside the other: systems compared at a few settings, readable in print and without colour."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recycle.report.figures.throughput_over_time import line_of
from recycle.report.render import palette

_MOST_COLUMNS = 4
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "**", "--")


class Panel(NamedTuple):
    """For every series a value for every group; None where there is none."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


def draw_bars(panels: Sequence[Panel], title: str, axis: str, groups: str = "") -> bytes:
    """Return a PNG with one panel for each of `panels`, which share their series; `axis` and `groups` say what is drawn."""
    num_columns = min(_MOST_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(max(5.0, 3.4 * num_columns), 1.2 + 3 * num_rows), facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
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
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})
    return stream.getvalue()


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
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=palette.FAINT_INK, labelsize=8)
    axes.grid(axis="y", color=palette.GRID, linewidth=0.6)
    axes.set_axisbelow(True)
