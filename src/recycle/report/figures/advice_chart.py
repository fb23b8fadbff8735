"""The picture of an advice: the best of every system with its interval, and how it changes with the failure rate."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from recycle.report.figures.campaign_chart import line_of
from recycle.report.render import palette
from recycle.report.render.matplotlib_figure import new_figure, png_bytes, simplify_axes

_MARKERS = ("o", "s", "^", "D", "v")


class AdviceBar(NamedTuple):
    """A system with or without spares: its label, its throughput, half of its interval, and its own fault-free throughput."""

    system: str
    label: str
    value: float
    half_width: float
    fault_free: float


class AdviceCurve(NamedTuple):
    """A choice: its system, its label, and its throughput by the factor of the failure rate."""

    system: str
    label: str
    points: Mapping[float, float]


def draw_advice(title: str, unit: str, bars: Sequence[AdviceBar], curves: Sequence[AdviceCurve]) -> bytes:
    """Return a PNG: bars of every system on the left, curves over the failure rate on the right."""
    figure = new_figure(12, max(4.0, 1.4 + 0.3 * len(bars)))
    left, right = figure.subplots(1, 2, width_ratios=[6, 5])
    _draw_bars(left, unit, bars)
    _draw_curves(right, unit, curves)
    figure.suptitle(title, fontsize=11, fontweight="bold", color=palette.INK)
    return png_bytes(figure)


def _draw_bars(axes: Axes, unit: str, bars: Sequence[AdviceBar]) -> None:
    names = [bar.system for bar in bars]
    for at, bar in enumerate(bars):
        colour, _ = line_of(bar.system, names)
        axes.barh(at, bar.fault_free, height=0.7, color="none", edgecolor=colour, linewidth=0.8)
        axes.barh(at, bar.value, height=0.7, color=colour, xerr=bar.half_width or None, ecolor=palette.INK, capsize=2)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=palette.INK)
    axes.set_title("best of each system; outline: without failures", fontsize=9, color=palette.INK)
    simplify_axes(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=palette.GRID, linewidth=0.6)


def _draw_curves(axes: Axes, unit: str, curves: Sequence[AdviceCurve]) -> None:
    names = [curve.system for curve in curves]
    for number, curve in enumerate(curves):
        # Choices of one system have its colour, and markers of their own.
        colour, dashes = line_of(curve.system, names)
        marker = _MARKERS[names[:number].count(curve.system) % len(_MARKERS)]
        factors = sorted(curve.points)
        values = [curve.points[factor] for factor in factors]
        axes.plot(factors, values, color=colour, linestyle=dashes, marker=marker, markersize=4, linewidth=1.3, label=curve.label)
    axes.set_xscale("log", base=2)
    shown = sorted({factor for curve in curves for factor in curve.points})
    axes.set_xticks(shown, [f"{factor:g}" for factor in shown])
    axes.axvline(1, color=palette.GRID, linewidth=1)
    axes.set_xlabel("failure rate, as a multiple of the asked one", color=palette.INK)
    axes.set_ylabel(unit, color=palette.INK)
    axes.set_title("what a higher or lower failure rate does", fontsize=9, color=palette.INK)
    axes.legend(fontsize=7, frameon=False)
    simplify_axes(axes)
