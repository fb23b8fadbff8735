"""A plan, or an executed iteration, as a PNG, drawn with matplotlib."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from recycle.report.render import palette
from recycle.report.render.layout import BESIDE, BUBBLE, FEWER, MARK_PX, MORE, WINDOW, Band, Picture
from recycle.report.render.matplotlib_figure import new_figure, png_bytes
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.timeline import Timeline

_POINTS = 72 / 100  # a layout pixel is 1/100 inch, whatever the resolution
_FONT = 10 * _POINTS
_MARKS = {MORE: palette.MORE, FEWER: palette.FEWER}
Box = tuple[tuple[float, float], tuple[float, float], tuple[float, float], tuple[float, float]]


def draw_png(timeline: Timeline) -> bytes:
    """Return the picture as the bytes of a PNG file."""
    picture = Picture(timeline)
    figure = new_figure(picture.width_px / 100, picture.height_px / 100, is_constrained=False)
    draw_picture(figure.add_axes((0, 0, 1, 1)), picture)
    return png_bytes(figure, dpi=200 if picture.height_px < 2000 else 100)


def draw_picture(axes: Axes, picture: Picture) -> None:
    """Draw into axes whose size in 1/100 inch is the size of the picture in pixels."""
    axes.set_xlim(0, picture.width_px)
    axes.set_ylim(picture.height_px, 0)
    axes.set_axis_off()
    axes.text(12, 22, picture.title, fontsize=13 * _POINTS, fontweight="bold", color=palette.INK, va="baseline")
    axes.text(12, 39, picture.subtitle, fontsize=_FONT, color=palette.FAINT_INK, va="baseline")
    _draw_axis(axes, picture)
    _draw_lanes(axes, picture)
    _draw_legend(axes, picture)


def _draw_axis(axes: Axes, picture: Picture) -> None:
    (unit, ticks), top = picture.axis, picture.top_px
    axes.text(picture.left_px - 10, top - 11, unit, fontsize=_FONT, color=palette.FAINT_INK, ha="right")
    lines = []
    for time, text in ticks:
        x = picture.x_px(time)
        lines.append([(x, top - 6), (x, top + picture.lanes_px + 4)])
        axes.text(x, top - 11, text, fontsize=_FONT, color=palette.FAINT_INK, ha="center")
    axes.add_collection(LineCollection(lines, colors=palette.GRID, linewidths=0.6, zorder=0))


def _draw_lanes(axes: Axes, picture: Picture) -> None:
    height = picture.slot_px
    boxes: dict[tuple[str, bool, bool], list[Box]] = {}
    marks: dict[str, list[Box]] = {}
    bubbles: list[Box] = []
    bars: list[list[tuple[float, float]]] = []
    for band in picture.bands():
        _draw_label(axes, picture, band)
        if band.lane.is_dead:
            _draw_dead(axes, picture, band, height)
            continue
        first, last = (picture.x_px(time) for time in band.lane.window)
        bubbles.append(_box(first, last, band.top_px, height))
        bars += [[(x, band.top_px), (x, band.top_px + height)] for x in (first, last)]
        for blocks, is_beside in ((band.blocks, False), (band.beside, True)):
            for block in blocks:
                box = _box(picture.x_px(block.start_us), picture.x_px(block.end_us), band.top_px, height)
                boxes.setdefault((block.look, block.is_rerouted, is_beside), []).append(box)
                if not is_beside and (mark := picture.mark(block)):
                    top = band.top_px + height - MARK_PX
                    marks.setdefault(mark, []).append(_box(box[0][0], box[1][0], top, MARK_PX))
        _draw_texts(axes, picture, band, height)
    axes.add_collection(PolyCollection(bubbles, facecolors=palette.BUBBLE, edgecolors="none", zorder=1))
    for (look, is_rerouted, is_beside), group in boxes.items():
        if picture.is_merged:
            axes.add_artist(_one_path(axes, group, look, is_rerouted, is_beside))
        else:
            axes.add_collection(_collection(group, look, is_rerouted, is_beside))
    for mark, group in marks.items():
        axes.add_collection(PolyCollection(group, facecolors=_MARKS[mark], edgecolors="none", zorder=2.5))
    axes.add_collection(LineCollection(bars, colors=palette.WINDOW, linewidths=1.4 if height > 8 else 0.6, zorder=4))


def _box(first: float, last: float, top: float, height: float) -> Box:
    return (first, top), (last, top), (last, top + height), (first, top + height)


def _collection(boxes: list[Box], look: str, is_rerouted: bool, is_beside: bool) -> PolyCollection:
    made = PolyCollection(boxes, linewidth=0.6, edgecolor=palette.PAPER, **_fill_style(look, is_rerouted, is_beside))
    if is_rerouted:
        made.set_hatch("////")
        made.set_hatch_linewidth(0.7)
        made.set_edgecolor(PAINTS[look].fill)
    return made


def _fill_style(look: str, is_rerouted: bool, is_beside: bool) -> dict[str, Any]:
    fill = PAINTS[look].pale if is_rerouted else PAINTS[look].fill
    return {"facecolor": fill, "zorder": 1.5 if is_beside else 2, "alpha": 0.28 if is_beside else None}


def _one_path(axes: Axes, boxes: list[Box], look: str, is_rerouted: bool, is_beside: bool) -> PathPatch:
    """Return all boxes as one path: five times as fast as a collection; not antialiased, which would show seams."""
    points = [point for box in boxes for point in (*box, box[0])]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    style = _fill_style(look, is_rerouted, is_beside)
    return PathPatch(Path(points, codes), linewidth=0, antialiased=False, transform=axes.transData, **style)


def _draw_label(axes: Axes, picture: Picture, band: Band) -> None:
    worker, x = band.lane.worker, picture.left_px - 10
    if picture.has_lane_labels:
        axes.text(x, band.top_px + picture.lane_px / 2, str(worker), fontsize=_FONT, color=palette.INK, ha="right", va="center")
    elif picture.has_pipeline_label(worker):
        text = f"pipeline {worker.pipeline}"
        axes.text(x, band.top_px, text, fontsize=0.8 * _FONT, color=palette.INK, ha="right", va="top")


def _draw_dead(axes: Axes, picture: Picture, band: Band, height: float) -> None:
    first, last = picture.left_px, picture.left_px + picture.plot_px
    middle = band.top_px + height / 2
    axes.plot([first, last], [middle, middle], color=palette.FAINT_INK, linewidth=0.7, linestyle=(0, (4, 4)), zorder=2)
    if picture.has_lane_labels:
        plate = {"facecolor": palette.PAPER, "edgecolor": "none", "pad": 2}
        style: dict[str, Any] = {"color": palette.FAINT_INK, "ha": "center", "va": "center_baseline", "bbox": plate}
        axes.text((first + last) / 2, middle, f"{band.lane.worker} dead", fontsize=_FONT, **style)


def _draw_texts(axes: Axes, picture: Picture, band: Band, height: float) -> None:
    for block in band.blocks:
        if label := picture.label(block):
            x = (picture.x_px(block.start_us) + picture.x_px(block.end_us)) / 2
            # A plate in the pale colour keeps the label readable on the stripes.
            plate = {"facecolor": PAINTS[block.look].pale, "edgecolor": "none", "pad": 0.6} if block.is_rerouted else None
            colour = "#000000" if block.is_rerouted else PAINTS[block.look].ink
            style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "clip_on": True, "zorder": 3, "bbox": plate}
            axes.text(x, band.top_px + height / 2, label, fontsize=_FONT, color=colour, **style)


def _draw_legend(axes: Axes, picture: Picture) -> None:
    for entry in picture.legend():
        x, y = entry.x_px, entry.y_px
        box = _box(x, x + 18, y - 10, 13)
        if entry.look == WINDOW:
            axes.add_collection(LineCollection([[(x + 9, y - 11), (x + 9, y + 4)]], colors=palette.WINDOW, linewidths=1.4))
        elif entry.look == BUBBLE:
            axes.add_collection(PolyCollection([box], facecolors=palette.BUBBLE, edgecolors="none"))
        elif entry.look in _MARKS:
            axes.add_collection(_collection([box], "F", False, is_beside=False))
            mark = _box(x, x + 18, y + 3 - MARK_PX, MARK_PX)
            axes.add_collection(PolyCollection([mark], facecolors=_MARKS[entry.look], edgecolors="none", zorder=2.5))
        elif entry.look == BESIDE:
            axes.add_collection(_collection([box], "F", False, is_beside=True))
        else:
            axes.add_collection(_collection([box], entry.look, entry.is_rerouted, is_beside=False))
        axes.text(x + 24, y, entry.meaning, fontsize=_FONT, color=palette.INK, va="baseline")
