"""The page of a run as a PNG: loss, speed and memory; recoveries; one iteration as executed and, below it, as planned."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recycle.core.units import format_bytes, format_us
from recycle.report.figures.recovery_chart import draw_recoveries, height_px
from recycle.report.record.run_summary import Summary, fullest_by_stage
from recycle.report.render import palette
from recycle.report.render.layout import Picture
from recycle.report.render.matplotlib_figure import new_figure, png_bytes, simplify_axes
from recycle.report.render.png import draw_picture
from recycle.report.timeline.timeline import Timeline

MOST_BARS = 16
_DASHED: dict[str, Any] = {"color": palette.FAINT_INK, "linewidth": 0.8, "linestyle": (0, (3, 3))}
_LINE, _SECOND_LINE, _MARK, _CAME = "#0072b2", "#e69f00", "#d55e00", "#009e73"
_FEWEST_TO_SMOOTH = 40
_HEAD_PX, _PANEL_PX, _BELOW_PX, _GAP_PX = 62.0, 210.0, 50.0, 16.0
_SIDE_PX, _BETWEEN_PX = 62.0, 74.0
_LEAST_PLOT_PX, _MOST_PLOT_PX = 1240.0, 1300.0
_TIMES = ((2 * 3_600_000_000, 3_600_000_000, "hours"), (5 * 60_000_000, 60_000_000, "minutes"), (0, 1_000_000, "seconds"))


def draw_page(summary: Summary, executed: Timeline, planned: Timeline) -> bytes:
    """Return the page as a PNG file, with the timelines of one executed iteration and of the plan."""
    pictures = lay_out(executed, planned, summary.executed.slowdown())
    width = pictures[0].width_px
    table = height_px(len(summary.run.recoveries))
    height = _HEAD_PX + _PANEL_PX + _BELOW_PX + table + sum(picture.height_px + _GAP_PX for picture in pictures)
    figure = new_figure(width / 100, height / 100, is_constrained=False)
    _draw_head(figure, summary, height)
    _draw_panels(figure, summary, width, height)
    top = _HEAD_PX + _PANEL_PX + _BELOW_PX
    if table:
        draw_recoveries(figure.add_axes((0, 1 - (top + table) / height, 1, table / height)), summary.run.recoveries, width)
        top += table
    for picture in pictures:
        top += _GAP_PX + picture.height_px
        draw_picture(figure.add_axes((0, 1 - top / height, 1, picture.height_px / height)), picture)
    return png_bytes(figure, dpi=180 if height < 3000 else 100)


def lay_out(executed: Timeline, planned: Timeline, slowdown: float) -> tuple[Picture, Picture]:
    """Lay out both timelines in one scale, the planned one at the measured speed of the ops, so that differences are visible."""
    (ran_us, planned_us) = (timeline.extent[1] - timeline.extent[0] for timeline in (executed, planned))
    length_us = max(ran_us, planned_us * slowdown)
    wanted = max(Picture(executed).plot_px, Picture(planned).plot_px)
    plot_px = min(_MOST_PLOT_PX, max(_LEAST_PLOT_PX, wanted))
    return Picture(executed, plot_px, round(length_us)), Picture(planned, plot_px, round(length_us / slowdown))


def _draw_head(figure: Figure, summary: Summary, height: float) -> None:
    run, times = summary.run, summary.times
    title = f"{run.source} · {run.name}" if run.name else run.source
    clauses = [f"{len(summary.run.steps)} steps"] if summary.run.steps else [f"{len(summary.executed.whole)} iterations"]
    clauses += [f"{summary.samples_per_s:.4g} samples/s"] if summary.samples_per_s else []
    clauses += [
        f"{format_us(times.median_us)} an iteration",
        f"{summary.over_promise:.2f} times what the plan promises at the speed at which ops ran",
        f"bubbles {summary.bubble:.0%}, planned {summary.planned_bubble:.0%}",
    ]
    if summary.executed.of_other_plans:
        num, num_other = len(summary.executed.whole), len(summary.executed.of_other_plans)
        clauses.append(f"{num} iterations by this plan, {num_other} by plans of other epochs")
    figure.text(0.01, 1 - 24 / height, title, fontsize=12, fontweight="bold", color=palette.INK, va="baseline")
    figure.text(0.01, 1 - 43 / height, " · ".join(clauses), fontsize=8.5, color=palette.FAINT_INK, va="baseline")
    figure.text(0.01, 1 - 58 / height, summary.gaps_text, fontsize=8.5, color=_MARK, va="baseline")


def _draw_panels(figure: Figure, summary: Summary, width: float, height: float) -> None:
    each = (width - 2 * _SIDE_PX - 2 * _BETWEEN_PX) / 3
    bottom = 1 - (_HEAD_PX + _PANEL_PX) / height
    for number, draw in enumerate((_draw_loss, _draw_speed, _draw_memory)):
        left = _SIDE_PX + number * (each + _BETWEEN_PX)
        axes = figure.add_axes((left / width, bottom, each / width, (_PANEL_PX - 26) / height))
        simplify_axes(axes, label_size=7, line_width=0.5)
        draw(axes, summary)


def _title(axes: Axes, text: str, below: str) -> None:
    axes.set_title(text, fontsize=9, color=palette.INK, loc="left", fontweight="bold")
    axes.set_xlabel(below, color=palette.FAINT_INK, fontsize=7.5)


def _absent(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=8.5, color=palette.FAINT_INK)


def _draw_line(axes: Axes, x: list[float], y: list[float]) -> None:
    """Draw every value; many values are pale, behind their moving average."""
    is_long = len(x) >= _FEWEST_TO_SMOOTH
    axes.plot(x, y, color=_LINE, linewidth=0.8 if is_long else 1.4, alpha=0.35 if is_long else 1.0)
    if not is_long:
        axes.plot(x, y, color=_LINE, linestyle="none", marker="o", markersize=2.5)
        return
    reach = max(2, len(x) // 40)
    kernel = np.ones(2 * reach + 1)
    smooth = np.convolve(y, kernel, "same") / np.convolve(np.ones(len(y)), kernel, "same")
    axes.plot(x, smooth, color=_LINE, linewidth=1.6)


def _mark(axes: Axes, x: list[float], level: float, marker: str, label: str, colour: str = _MARK) -> None:
    """Draw marks at a share of the height of the axes."""
    style: dict[str, Any] = {"linestyle": "none", "marker": marker, "markersize": 4, "color": colour, "label": label}
    axes.plot(x, [level] * len(x), transform=axes.get_xaxis_transform(), **style)


def _draw_loss(axes: Axes, summary: Summary) -> None:
    known = [(float(iteration), loss) for iteration, loss in summary.losses if loss is not None]
    if not known:
        return _absent(axes, "the record holds no loss")
    _title(axes, "loss", "iteration")
    _draw_line(axes, [iteration for iteration, _ in known], [loss for _, loss in known])
    clipped, skipped, taken_back = summary.clipped, summary.skipped, summary.executed.taken_back
    marks = (("clipped", clipped, "v", 0.97), ("skipped", skipped, "x", 0.91), ("taken back", taken_back, "<", 0.85))
    for name, iterations, marker, level in marks:
        if iterations:
            _mark(axes, list(map(float, iterations)), level, marker, f"{name} ({len(iterations)})")
    if clipped or skipped or taken_back:
        axes.legend(fontsize=7, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.84), labelcolor=palette.INK)
    return None


def _draw_speed(axes: Axes, summary: Summary) -> None:
    spells = [spell for spell in summary.run.train_spells if spell.samples]
    if not spells:
        return _draw_times(axes, summary)
    end_us = max(spell.end_us for spell in summary.run.spells)
    unit_us, unit = next((size, name) for least, size, name in _TIMES if end_us >= least)
    _title(axes, "samples a second", unit)
    middles = [(spell.start_us + spell.end_us) / 2 / unit_us for spell in spells]
    _draw_line(axes, middles, [spell.samples * 1e6 / spell.length_us for spell in spells])
    begin_us = min(spell.start_us for spell in spells)  # a short run would be drawn as a long start
    _mark_time(axes, summary, begin_us, unit_us)
    axes.set_xlim(begin_us / unit_us, end_us / unit_us)
    axes.set_ylim(bottom=0)
    return None


def _mark_time(axes: Axes, summary: Summary, begin_us: int, unit_us: int) -> None:
    """Show when the run did not train after its start, when it was saved, when it warned, and when workers came and went."""
    waits = [spell for spell in summary.run.spells if spell.state != "train" and spell.end_us > begin_us]
    for number, spell in enumerate(waits):
        first, last = spell.start_us / unit_us, spell.end_us / unit_us
        axes.axvspan(first, last, color=palette.BUBBLE, linewidth=0, label="_" * bool(number) + "not training")
    for number, at_us in enumerate(sorted({one.at_us for one in summary.run.saved})):
        label = "_" * bool(number) + f"checkpoint ({len(summary.run.saved)})"
        axes.axvline(at_us / unit_us, label=label, **_DASHED)
    if warned := [one.at_us / unit_us for one in summary.run.warned]:
        _mark(axes, warned, 0.97, "v", f"warning ({len(warned)})")
    for joins, marker, verb, colour in ((False, "X", "left", _MARK), (True, "^", "joined", _CAME)):
        if changed := [one.at_us / unit_us for one in summary.run.changes if one.joins == joins and one.at_us >= begin_us]:
            _mark(axes, changed, 0.03, marker, f"{verb} ({len(changed)})", colour)
    if axes.get_legend_handles_labels()[1]:
        legend = {"frameon": False, "ncols": 3, "columnspacing": 1.2, "labelcolor": palette.INK}
        axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 0.04), **legend)


def _draw_times(axes: Axes, summary: Summary) -> None:
    """Draw the iteration times, for a record without samples."""
    times = summary.executed.times_us
    _title(axes, "milliseconds an iteration", "iteration")
    _draw_line(axes, [float(iteration) for iteration in times], [time / 1000 for time in times.values()])
    axes.axhline(summary.executed.promised_us / 1000, label="promised at the speed of the ops", **_DASHED)
    axes.legend(fontsize=7, frameon=False, loc="lower right", labelcolor=palette.INK)
    axes.set_ylim(bottom=0)


def _draw_memory(axes: Axes, summary: Summary) -> None:
    if not summary.run.held:
        return _absent(axes, "the record holds no memory")
    is_long = len(summary.run.held) > MOST_BARS
    held = fullest_by_stage(summary.run.held) if is_long else summary.run.held
    largest = max(max(one.activation_bytes, one.planned_bytes) for one in held)
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
    size, unit = next((size, unit) for size, unit in units if largest >= size or size == 1)
    peak = format_bytes(max(one.peak_bytes for one in summary.run.held))
    selection = "fullest worker of each stage; " if is_long else ""
    _title(axes, f"peak activations, {unit}", f"{selection}a process held at most {peak}")
    places = np.arange(len(held))
    axes.bar(places - 0.2, [one.activation_bytes / size for one in held], 0.38, label="measured", color=_LINE)
    planned = [one.planned_bytes / size for one in held]
    axes.bar(places + 0.2, planned, 0.38, label="planned", color=_SECOND_LINE, hatch="////", edgecolor=palette.PAPER, linewidth=0)
    axes.set_xticks(places, [one.worker for one in held], rotation=45 if len(held) > 8 else 0)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.99), labelcolor=palette.INK)
    return None
