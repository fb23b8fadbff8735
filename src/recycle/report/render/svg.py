"""A plan, or an executed iteration, as an SVG whose slots have tooltips, written without a library."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from recycle.core.units import format_us
from recycle.report.render import palette
from recycle.report.render.layout import BESIDE, FEWER, FONT_PX, LETTER_PX, MARK_PX, MORE, WINDOW, Band, Picture
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.timeline import Block, Timeline

_STYLE = f"""\
text {{ fill: {palette.INK} }} .faint {{ fill: {palette.FAINT_INK} }}
.mid {{ text-anchor: middle }} .end {{ text-anchor: end }} .label {{ pointer-events: none }}
.bubble {{ fill: {palette.BUBBLE} }} .beside {{ opacity: 0.28 }} .slot {{ stroke: {palette.PAPER}; stroke-width: 0.8 }}
.grid {{ stroke: {palette.GRID} }} .window {{ stroke: {palette.WINDOW}; stroke-width: 2 }} .thin {{ stroke-width: 1 }}
.dead {{ stroke: {palette.FAINT_INK}; stroke-dasharray: 4 4 }}"""


def draw_svg(timeline: Timeline) -> str:
    """Return the whole picture as SVG text."""
    picture = Picture(timeline)
    marks = f"\n.{MORE} {{ fill: {palette.MORE} }} .{FEWER} {{ fill: {palette.FEWER} }}\n" if timeline.has_cuts else ""
    start = *head(round(picture.width_px), round(picture.height_px), marks), *titles(picture.title, picture.subtitle)
    return "\n".join([*start, *_axis(picture), *_lanes(picture), *_legend(picture), "</svg>", ""])


def rect(look: str, x: float, y: float, width: float, height: float) -> str:
    """Return a box; `look` is its CSS class."""
    return f'<rect class="{look}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"/>'


def text_at(look: str, x: float, y: float, text: str) -> str:
    """Return a line of text; its CSS class decides whether `x` is its start, middle or end."""
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def with_tip(box: str, tip: str) -> str:
    """Return the box with a tooltip."""
    return f"{box[:-2]}><title>{escape(tip)}</title></rect>"


def head(width: int, height: int, more_style: str = "") -> Iterator[str]:
    """Yield the start of a picture: its size, the CSS classes and stripes of the palette, the background."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT_PX:g}">'
    )
    yield f"<style>\n{_STYLE}{more_style}"
    for look, paint in PAINTS.items():
        yield f".{look} {{ fill: {paint.fill} }} .on-{look} {{ fill: {paint.ink} }} .plate-{look} {{ fill: {paint.pale} }}"
        yield f".{look}-rerouted {{ fill: url(#stripes-{look}); stroke: {paint.fill} }}"
    yield "</style><defs>"
    for look, paint in PAINTS.items():
        yield (
            f'<pattern id="stripes-{look}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="5" height="5" fill="{paint.pale}"/><rect width="1.3" height="5" fill="{paint.fill}"/></pattern>'
        )
    yield f'</defs><rect width="100%" height="100%" fill="{palette.PAPER}"/>'


def titles(title: str, subtitle: str) -> Iterator[str]:
    """Yield the title, also as the accessible name of the picture, and the line below it."""
    yield f"<title>{escape(title)}</title>"
    yield f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>'
    yield text_at("faint", 12, 39, subtitle)


def _axis(picture: Picture) -> Iterator[str]:
    (unit, ticks), top = picture.axis, picture.top_px
    yield text_at("faint end", picture.left_px - 10, top - 11, unit)
    for time, text in ticks:
        x = picture.x_px(time)
        yield f'<path class="grid" d="M{x:.1f} {top - 6:.0f}V{top + picture.lanes_px + 4:.1f}"/>'
        yield text_at("faint mid", x, top - 11, text)


def _lanes(picture: Picture) -> Iterator[str]:
    height = picture.slot_px
    for band in picture.bands():
        yield from _lane_label(picture, band)
        if band.lane.is_dead:
            yield from _dead(picture, band)
            continue
        first, last = (picture.x_px(time) for time in band.lane.window)
        yield rect("bubble", first, band.top_px, last - first, height)
        if band.beside:
            yield f'<g class="beside">{"".join(_runs(picture, band.beside, band.top_px))}</g>'
        yield from _runs(picture, band.blocks, band.top_px) if picture.is_merged else _slots(picture, band)
        # In low lanes, a bar of two pixels would hide the slots.
        look = "window" if height > 8 else "window thin"
        yield f'<path class="{look}" d="M{first:.1f} {band.top_px:.1f}v{height:.1f}M{last:.1f} {band.top_px:.1f}v{height:.1f}"/>'


def _lane_label(picture: Picture, band: Band) -> Iterator[str]:
    worker, x = band.lane.worker, picture.left_px - 10
    if picture.has_lane_labels:
        yield text_at("end", x, band.top_px + picture.lane_px / 2 + FONT_PX / 3, str(worker))
    elif picture.has_pipeline_label(worker):
        yield text_at("end", x, band.top_px + FONT_PX - 2, f"pipeline {worker.pipeline}")


def _dead(picture: Picture, band: Band) -> Iterator[str]:
    first, last = picture.left_px, picture.left_px + picture.plot_px
    middle = band.top_px + picture.slot_px / 2
    if not picture.has_lane_labels:
        yield f'<path class="dead" d="M{first:.1f} {middle:.1f}H{last:.1f}"><title>{band.lane.worker} dead</title></path>'
        return
    center = (first + last) / 2
    yield f'<path class="dead" d="M{first:.1f} {middle:.1f}H{center - 42:.1f}M{center + 42:.1f} {middle:.1f}H{last:.1f}"/>'
    yield text_at("mid faint", center, middle + FONT_PX / 3, f"{band.lane.worker} dead")


def _slots(picture: Picture, band: Band) -> Iterator[str]:
    for block in band.blocks:
        x, end = picture.x_px(block.start_us), picture.x_px(block.end_us)
        name = block.op or PAINTS[block.look].meaning
        tip = f"{name} on {band.lane.worker}, {format_us(block.start_us)} to {format_us(block.end_us)}"
        look = f"slot {block.look}-rerouted" if block.is_rerouted else f"slot {block.look}"
        if block.more_layers:
            tip += f", {abs(block.more_layers)} {'more' if block.more_layers > 0 else 'fewer'} layers than the stage's own"
        yield with_tip(rect(look, x, band.top_px, end - x, picture.slot_px), tip)
        if mark := picture.mark(block):
            yield rect(mark, x, band.top_px + picture.slot_px - MARK_PX, end - x, MARK_PX)
        if label := picture.label(block):
            yield from _label(block, (x + end) / 2, band.top_px + picture.slot_px / 2, label)


def _label(block: Block, x: float, middle: float, label: str) -> Iterator[str]:
    if block.is_rerouted:
        # A plate in the pale colour keeps the label readable on the stripes.
        width = LETTER_PX * len(label)
        yield rect(f"plate-{block.look} label", x - width / 2, middle - 6.5, width, 13)
    yield text_at("mid label" if block.is_rerouted else f"mid label on-{block.look}", x, middle + FONT_PX / 3, label)


def _runs(picture: Picture, blocks: tuple[Block, ...], top_px: float) -> Iterator[str]:
    """Yield one path for each look, with a few bytes for each block."""
    paths: dict[str, list[str]] = {}
    for block in blocks:
        x, end = picture.x_px(block.start_us), picture.x_px(block.end_us)
        striped = f"plate-{block.look}" if picture.is_merged else f"{block.look}-rerouted"
        look = striped if block.is_rerouted else block.look
        paths.setdefault(look, []).append(f"M{x:.1f} 0h{end - x:.1f}v1H{x:.1f}")
    for look, parts in paths.items():
        place = f"translate(0 {top_px:.1f}) scale(1 {picture.slot_px:.1f})"
        yield f'<path class="{look}" style="stroke: none" transform="{place}" d="{"".join(parts)}"/>'


def _legend(picture: Picture) -> Iterator[str]:
    for entry in picture.legend():
        x, y = entry.x_px, entry.y_px
        if entry.look == WINDOW:
            yield f'<path class="window" d="M{x + 9:.0f} {y - 11:.0f}v15"/>'
        elif entry.look in (MORE, FEWER):
            yield rect("F", x, y - 10, 18, 13)
            yield rect(entry.look, x, y + 3 - MARK_PX, 18, MARK_PX)
        else:
            look = "F beside" if entry.look == BESIDE else f"{entry.look}-rerouted" if entry.is_rerouted else entry.look
            yield rect(look, x, y - 10, 18, 13)
        yield text_at("", x + 24, y, entry.meaning)
