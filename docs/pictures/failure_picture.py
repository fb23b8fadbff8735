"""Draws docs/pictures/failure.svg: above, the ops of every worker around a failure; below, the parts of the recovery pause."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from failure_timeline import Failure, WorkerActivity

from recycle.core.cluster import Worker
from recycle.core.events.record import PARTS, Recovered
from recycle.core.units import format_us
from recycle.report.record.recovery_text import format_ms
from recycle.report.render import palette
from recycle.report.render.palette import PAINTS
from recycle.report.render.svg import head, rect, text_at, titles, with_tip
from recycle.report.timeline.timeline import Block, axis_ticks

WIDTH_PX, LEFT_PX, RIGHT_PX = 900.0, 56.0, 16.0
PLOT_PX = WIDTH_PX - LEFT_PX - RIGHT_PX
_TOP_PX, _LANE_PX, _SLOT_PX, _GAP_PX = 112.0, 20.0, 18.0, 8.0
_ZOOM_PX, _BAR_PX, _FAN_PX, _NOTE_PX, _LEGEND_PX = 46.0, 22.0, 30.0, 64.0, 48.0
_LETTER_PX, _SMALL_PX = 6.2, 5.6  # upper bounds of the mean letter width in fonts of 11 and of 9 pixels
_KILL, _STOP = "#b03000", "#fcece0"
_TONES = ("#eebd9b", "#f5d6c0")  # of the parts of the pause, alternating: colours of the palette would look like ops
_STYLE = f"""
.small {{ font-size: 9px }} .bold {{ font-weight: bold }} .vain {{ opacity: 0.42 }} .stop {{ fill: {_STOP} }}
.kill {{ stroke: {_KILL}; stroke-width: 2; fill: none }} .killed {{ fill: {_KILL}; font-weight: bold }}
.span {{ stroke: {palette.INK}; fill: none }} .lead {{ stroke: {palette.FAINT_INK}; fill: none; stroke-width: 0.8 }}
.taker {{ fill: none; stroke: {palette.INK}; stroke-width: 1.4 }}
.tone-0 {{ fill: {_TONES[0]} }} .tone-1 {{ fill: {_TONES[1]} }}
.unknown {{ fill: {palette.PAPER}; stroke: {palette.FAINT_INK}; stroke-dasharray: 2 2 }}"""
_PAUSE_PARTS = PARTS[:-1]  # the parts of a recovery between the failure and the new epoch


def draw_failure(failure: Failure) -> str:
    """Return the whole picture as SVG text."""
    return "\n".join([*_Drawing(failure).lines(), "</svg>", ""])


class _Drawing:
    """The layout of one failure: titles, spans, axis, lanes, the pause enlarged, notes, legend."""

    def __init__(self, failure: Failure) -> None:
        self.failure, self.recovered = failure, failure.recovered
        self.takers = {taker for place in failure.emptied for taker in failure.takers(place)}
        shape = failure.shape
        self.lanes_px = shape.num_workers * _LANE_PX + (shape.num_pipelines - 1) * _GAP_PX
        self.zoom_px = _TOP_PX + self.lanes_px + _ZOOM_PX
        self.legend_px = self.zoom_px + _BAR_PX + _FAN_PX + _NOTE_PX

    def lines(self) -> Iterator[str]:
        yield from head(round(WIDTH_PX), round(self.legend_px + _LEGEND_PX), _STYLE)
        yield from titles(*_words(self.failure))
        yield from self._pause()
        yield from self._axis()
        for activity in self.failure.activities:
            yield from self._lane(activity)
        yield from self._kill()
        yield from self._spans()
        yield from self._parts()
        yield from self._legend()

    def x_px(self, time_us: int) -> float:
        first, last = self.failure.extent
        return LEFT_PX + PLOT_PX * (time_us - first) / (last - first)

    def _top_px(self, worker: Worker) -> float:
        number = worker.pipeline * self.failure.shape.num_stages + worker.stage
        return _TOP_PX + number * _LANE_PX + worker.pipeline * _GAP_PX

    def _pause(self) -> Iterator[str]:
        """The background of the recovery pause, and the lines along which the pause is enlarged."""
        first, last = self.x_px(self.recovered.at_us), self.x_px(self.recovered.end_us)
        bottom = _TOP_PX + self.lanes_px
        yield rect("stop", first, _TOP_PX - 6, last - first, bottom - _TOP_PX + 10)
        yield f'<path class="stop" d="M{first:.1f} {bottom + 4:.1f}H{last:.1f}L{LEFT_PX + PLOT_PX} {self.zoom_px}H{LEFT_PX}Z"/>'

    def _axis(self) -> Iterator[str]:
        """Ticks before and after the failure, which is at 0."""
        at, (first, last) = self.recovered.at_us, self.failure.extent
        unit, ticks = axis_ticks((0, last - first), int(PLOT_PX // 60))
        step = ticks[1][0]
        size = {"s": 10**6, "ms": 10**3, "µs": 1}[unit]
        yield text_at("faint end", LEFT_PX - 8, _TOP_PX - 11, unit)
        for number in range(-((at - first) // step), (last - at) // step + 1):
            x = self.x_px(at + number * step)
            if not LEFT_PX + 24 < x < WIDTH_PX - 24:
                continue  # the unit is written at the left end, and the picture ends at the right
            yield f'<path class="grid" d="M{x:.1f} {_TOP_PX - 6:.0f}V{_TOP_PX + self.lanes_px + 4:.1f}"/>'
            yield text_at("faint mid", x, _TOP_PX - 11, f"{number * step / size:+g}" if number else "0")

    def _lane(self, activity: WorkerActivity) -> Iterator[str]:
        worker, top = activity.worker, self._top_px(activity.worker)
        (first, last), at, end = self.failure.extent, self.recovered.at_us, self.recovered.end_us
        is_dead, is_empty, is_taker = worker in self.failure.dead, worker in self.failure.emptied, worker in self.takers
        yield text_at("end bold" if is_dead or is_empty or is_taker else "end", LEFT_PX - 8, top + 13, str(worker))
        for start, stop in ((first, at),) if is_empty else ((first, at), (end, last)):
            yield rect("bubble", self.x_px(start), top, self.x_px(stop) - self.x_px(start), _SLOT_PX)
        yield from self._slots(activity, top)
        if is_dead:
            yield from self._lost(activity, top)
        if is_empty:
            yield from self._gone(worker, top)
        if is_taker:
            yield rect("taker", self.x_px(end), top - 1, self.x_px(last) - self.x_px(end), _SLOT_PX + 2)

    def _slots(self, activity: WorkerActivity, top: float) -> Iterator[str]:
        for look, blocks in (("beside", activity.beside), ("vain", activity.discarded), ("", activity.counted)):
            if blocks:
                boxes = "\n".join(self._slot(block, activity.worker, top) for block in blocks)
                yield f'<g class="{look}">\n{boxes}\n</g>' if look else boxes
        for block in activity.discarded:
            if not block.start_us < self.recovered.at_us < block.end_us:  # the line of the failure would cross the label
                yield from self._slot_label(block, top, "")
        for block in activity.counted:
            yield from self._slot_label(block, top, "" if block.is_rerouted else f" on-{block.look}")

    def _slot(self, block: Block, worker: Worker, top: float) -> str:
        x, end = self.x_px(block.start_us), self.x_px(block.end_us)
        tip = f"{block.op or PAINTS[block.look].meaning} on {worker}, {format_us(block.end_us - block.start_us)}"
        look = f"slot {block.look}-rerouted" if block.is_rerouted else f"slot {block.look}"
        return with_tip(rect(look, x, top, end - x, _SLOT_PX), tip)

    def _slot_label(self, block: Block, top: float, ink: str) -> Iterator[str]:
        x, end = self.x_px(block.start_us), self.x_px(block.end_us)
        label = _label(block, end - x)
        if label and block.is_rerouted:
            width = _SMALL_PX * len(label)
            yield rect(f"plate-{block.look} label", (x + end - width) / 2, top + 3, width, 12)
        if label:
            yield text_at(f"small mid label{ink}", (x + end) / 2, top + 12.2, label)

    def _lost(self, activity: WorkerActivity, top: float) -> Iterator[str]:
        """The last ops of a dead worker, which the record does not hold."""
        before = max([self.failure.extent[0], *(block.end_us for block in (*activity.beside, *activity.discarded))])
        x, at = self.x_px(before), self.x_px(self.recovered.at_us)
        yield rect("unknown", x + 1, top + 1, max(0.0, at - x - 2), _SLOT_PX - 2)
        yield text_at("faint mid small", (x + at) / 2, top + 12.2, _fitting(("its last ops are unknown", "unknown"), at - x))

    def _gone(self, worker: Worker, top: float) -> Iterator[str]:
        """The rest of the row of a place that has become empty: the workers that run its micro-batches."""
        at, end, middle = self.x_px(self.recovered.at_us), self.x_px(self.recovered.end_us), top + _SLOT_PX / 2
        text = _successors(worker, self.failure)
        begin = end + 16 + _LETTER_PX * len(text)
        yield f'<path class="dead" d="M{at:.1f} {middle:.1f}H{end + 4:.1f}"/>'
        yield text_at("", end + 10, top + 13, text)
        if begin < LEFT_PX + PLOT_PX:
            yield f'<path class="dead" d="M{begin:.1f} {middle:.1f}H{LEFT_PX + PLOT_PX:.1f}"/>'

    def _kill(self) -> Iterator[str]:
        x = self.x_px(self.recovered.at_us)
        yield f'<path class="kill" d="M{x:.1f} {_TOP_PX - 8:.0f}V{_TOP_PX + self.lanes_px + 4:.1f}"/>'
        for worker in sorted(self.failure.dead):
            y = self._top_px(worker) + _SLOT_PX / 2
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{palette.PAPER}" stroke="{_KILL}" stroke-width="2"/>'
            yield f'<path class="kill" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'

    def _spans(self) -> Iterator[str]:
        """The names of the three spans of time, above the axis."""
        one, (first, last) = self.recovered, self.failure.extent
        paused = format_ms(one.end_us - one.at_us)
        step = f"step {one.iteration + 1}"
        discarded = (f"{step}, first attempt: discarded", "first attempt: discarded", "discarded")
        again = (f"epoch {one.epoch}: {step} again, by {one.num_live} workers", f"epoch {one.epoch}: {step} again", "again")
        for start, end, texts, look in (
            (first, one.at_us, discarded, ""),
            (one.at_us, one.end_us, (f"paused {paused}", paused), "killed"),
            (one.end_us, last, again, ""),
        ):
            x, stop = self.x_px(start), self.x_px(end)
            y = _TOP_PX - 34
            yield f'<path class="span" d="M{x + 1:.1f} {y + 5:.0f}v-5H{stop - 1:.1f}v5"/>'
            yield text_at(f"mid {look}".strip(), (x + stop) / 2, y - 6, _fitting(texts, stop - x + 30))

    def _parts(self) -> Iterator[str]:
        """The pause, enlarged: its parts to scale, and a note for each, spread so that none hides another."""
        parts = {part: time_us for part, time_us in self.recovered.parts_us.items() if part in _PAUSE_PARTS}
        unit = PLOT_PX / max(1, sum(parts.values()))
        x, wide, y = LEFT_PX, PLOT_PX / len(parts), self.zoom_px + _BAR_PX
        for number, (part, time_us) in enumerate(parts.items()):
            length, left = time_us * unit, LEFT_PX + number * wide
            look, label = f"tone-{number % len(_TONES)}", f"{part} {_exact_ms(time_us)}"
            yield rect(f"slot {look}", x, self.zoom_px, max(1.5, length), _BAR_PX)
            yield text_at("mid", x + length / 2, self.zoom_px + 15, _fitting((part,), length))
            middle = left + wide / 2 - 6
            yield f'<path class="lead" d="M{x + length / 2:.1f} {y}v6L{middle:.1f} {y + _FAN_PX - 8}v6"/>'
            yield rect(look, left, y + _FAN_PX, wide - 12, 3)
            yield text_at("bold", left, y + _FAN_PX + 17, label)
            for line, text in enumerate(wrap(_note(part, self.recovered), int((wide - 12) / _LETTER_PX))):
                yield text_at("faint", left, y + _FAN_PX + 32 + 13 * line, text)
            x += length

    def _legend(self) -> Iterator[str]:
        looks = {block.look for one in self.failure.activities for block in (*one.discarded, *one.counted)}
        entries = [(look, f"{paint.letter} {paint.meaning}") for look, paint in PAINTS.items() if look in looks]
        entries += [
            ("F-rerouted", "re-routed from another pipeline"),
            ("F vain", "discarded"),
            ("bubble", "bubble"),
            ("stop", "no worker trains"),
        ]
        x, y = LEFT_PX, self.legend_px + 20
        for look, meaning in entries:
            width = 36 + _LETTER_PX * len(meaning)
            if x + width > WIDTH_PX:
                x, y = LEFT_PX, y + 18
            yield rect(look, x, y - 10, 18, 13)
            yield text_at("", x + 23, y, meaning)
            x += width


def _words(failure: Failure) -> tuple[str, str]:
    """The title and the line below it."""
    one, shape = failure.recovered, failure.shape
    verb, later = "dies" if len(one.workers) == 1 else "die", format_ms(one.end_us - one.at_us)
    title = f"{', '.join(one.workers)} {verb} in step {one.iteration + 1}; {later} later the other {one.num_live} train on"
    cluster = f"{shape.num_pipelines} pipelines × {shape.num_stages} stages · {shape.num_microbatches} micro-batches each"
    lost = f"lost in all {format_ms(one.lost_us)}, of them {format_ms(one.redo_us)} of work that is done again"
    return title, f"{cluster} · as recorded · {lost}"


def _successors(emptied: Worker, failure: Failure) -> str:
    """Name the workers that run the micro-batches of an emptied place, and the new place of its worker if it moved."""
    moved = dict(move.split(">") for move in failure.recovered.moves)
    where = f"moved to {moved[str(emptied)]}: " if str(emptied) in moved else ""
    names = [str(worker) for worker in failure.takers(emptied)]
    return f"{where}{' and '.join(names)} {'run' if len(names) > 1 else 'runs'} its micro-batches"


def _note(part: str, one: Recovered) -> str:
    """Describe a part of a recovery in a few words."""
    copies = "moved workers copy their new stage from a peer" if one.moves else "no worker changes stage: nothing to copy"
    return {
        "detect": f"the coordinator notices: {one.cause}",
        "abort": "connections are cut; running ops end",
        "plan": "the plan for the live workers is looked up",
        "regroup": "new process groups, then the first op",
        "transfer": copies,
    }[part]


def _exact_ms(time_us: int) -> str:
    return f"{time_us / 1000:.1f} ms" if 0 < time_us < 10_000 else format_ms(time_us)


def _label(block: Block, room_px: float) -> str:
    letter = PAINTS[block.look].letter
    if block.op is None:
        return _fitting((letter,), room_px, _SMALL_PX)
    microbatch = block.op.microbatch
    home = (f"{letter}{microbatch.index}@{microbatch.pipeline}",) if block.is_rerouted else ()
    return _fitting((*home, f"{letter}{microbatch.index}", f"{microbatch.index}"), room_px, _SMALL_PX)


def _fitting(texts: Sequence[str], room_px: float, letter_px: float = _LETTER_PX) -> str:
    """The first of the texts that fits, or nothing."""
    return next((text for text in texts if len(text) * letter_px + 2 <= room_px), "")
