"""A plan, or an executed iteration, as a chart for a terminal: lines of cells, each a text and a style.

Every worker is one line. If the shortest op is at least a column wide, slots are drawn to scale and labelled; else each column
shows one of its kinds, so that kinds keep their shares. Kinds are letters, so that nothing depends on colour: upper case in the
home pipeline, lower case if the op is re-routed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from recycle.core.cluster import Cluster, Worker
from recycle.core.units import format_us
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.timeline import Block, Lane, Span, Timeline, axis_ticks, merged

BUBBLE, DEAD, WINDOW, AXIS, LABEL, TITLE, NOTE, PLAIN = "bubble", "dead", "window", "axis", "label", "title", "note", "plain"
REROUTED = " rerouted"
MOST_WORKERS = 40
_LEAST_COLUMNS = 10
_MOST_JUMPS = 8
_WIDEST_OP = 5  # columns: enough for "f0@1" and a space; wider slots only spread the chart


class Cell(NamedTuple):
    """A piece of a line and its style: a look of the palette, with the suffix REROUTED if re-routed, or a style name above."""

    text: str
    style: str


Line = tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """The time axis of a chart: `num_columns` columns over the extent."""

    extent: Span
    num_columns: int

    @staticmethod
    def fit(timeline: Timeline, room: int) -> "Scale":
        """Use at most `room` columns, and whole columns for each unit of time if they fit."""
        extent, shortest = timeline.extent, timeline.shortest_us
        length = extent[1] - extent[0]
        room = max(_LEAST_COLUMNS, min(room, math.ceil(length * _WIDEST_OP / shortest)))
        if shortest * room < length:
            return Scale(extent, room)
        num_units = length // math.gcd(length, timeline.source.grid_us(extent[0]))
        return Scale(extent, room // num_units * num_units or room)

    def column(self, time_us: int) -> int:
        first, last = self.extent
        return (2 * (time_us - first) * self.num_columns + last - first) // (2 * (last - first))

    def is_wide_enough(self, blocks: Iterable[Block]) -> bool:
        """Whether every op gets a column of its own."""
        length = self.extent[1] - self.extent[0]
        return all((block.end_us - block.start_us) * self.num_columns >= length for block in blocks if block.op)


def draw_chart(timeline: Timeline, width: int, all_rows: bool = False) -> list[Line]:
    """Return the chart in lines of at most `width` columns; of many workers a selection, unless `all_rows`."""
    workers = list(timeline.problem.shape.workers())
    shown = workers if all_rows else select_workers(timeline.problem.cluster, MOST_WORKERS)
    margin = max(len(str(worker)) for worker in shown) + 1
    scale = Scale.fit(timeline, width - margin - 2)
    lanes = [timeline.lane(worker) for worker in shown]
    to_scale = all(scale.is_wide_enough(lane.blocks) for lane in lanes)
    clauses = timeline.about, timeline.rating
    titles = (line for texts in clauses for line in _wrap([Cell(text, TITLE) for text in texts], width, " · "))
    lines = [*titles, (), *_axis_lines(scale, margin)]
    drawn = [_lane_line(lane, scale, margin, to_scale) for lane in lanes]
    lines += _spaced(drawn, shown, workers)
    if len(shown) < len(workers):
        text = f"{len(workers) - len(shown)} of {len(workers)} workers are not shown; --rows all shows them"
        lines.append((Cell(" " * (margin + 1), PLAIN), Cell(text, NOTE)))
    return [*lines, (), *_wrap(_legend(drawn, scale, to_scale), width)]


def select_workers(cluster: Cluster, most: int) -> list[Worker]:
    """Choose at most `most` workers: failed ones, their live peers, the first and the last."""
    workers = list(cluster.shape.workers())
    if len(workers) <= most:
        return workers
    dead = sorted(cluster.failed)[: most // 4]
    stages = {worker.stage for worker in cluster.failed}
    peers = [worker for worker in workers if worker.stage in stages and worker not in cluster.failed]
    ends = [worker for pair in zip(workers, reversed(workers), strict=True) for worker in pair]
    wanted = dict.fromkeys([*ends[:2], *dead, *peers[: most // 2], *ends])
    return sorted(list(wanted)[:most])


def _spaced(drawn: list[Line], shown: list[Worker], workers: list[Worker]) -> list[Line]:
    """Separate pipelines by an empty line, and mark omitted workers, unless there are too many gaps."""
    position = {worker: number for number, worker in enumerate(workers)}
    jumps = [position[after] - position[before] > 1 for before, after in pairwise(shown)]
    lines = drawn[:1]
    for line, jump, (before, after) in zip(drawn[1:], jumps, pairwise(shown), strict=True):
        if jump and sum(jumps) <= _MOST_JUMPS:
            lines.append((Cell(" ⋮", NOTE),))
        elif before.pipeline != after.pipeline and not any(jumps):
            lines.append(())
        lines.append(line)
    return lines


def _axis_lines(scale: Scale, margin: int) -> list[Line]:
    unit, ticks = axis_ticks(scale.extent, scale.num_columns // 8)
    numbers, ruler = [" "] * (scale.num_columns + 8), ["─"] * (scale.num_columns + 1)
    for time, text in ticks:
        column = scale.column(time)
        numbers[column : column + len(text)] = text
        ruler[column] = "┬"
    return [
        (Cell(f"{unit:>{margin - 1}}  ", AXIS), Cell("".join(numbers).rstrip(), AXIS)),
        (Cell(" " * (margin + 1), PLAIN), Cell("".join(ruler), AXIS)),
    ]


def _lane_line(lane: Lane, scale: Scale, margin: int, to_scale: bool) -> Line:
    label = Cell(f"{lane.worker!s:<{margin}}", DEAD if lane.is_dead else LABEL)
    if lane.is_dead:
        return (label, Cell(" ", PLAIN), Cell("dead".center(scale.num_columns, "-"), DEAD))
    cells = _background(lane.window, scale)
    for block in lane.blocks if to_scale else merged(lane.blocks, scale.extent, scale.num_columns):
        first, last = scale.column(block.start_us), scale.column(block.end_us)
        if not to_scale:
            last = min(last, scale.column(lane.window[1]))  # a column may extend beyond the window; its bar is kept
        text = _best_text(block, last - first) if to_scale else _letter(block) * (last - first)
        style = block.look + REROUTED * block.is_rerouted
        for at, letter in zip(range(first + 1, len(cells)), text, strict=False):
            cells[at] = Cell(letter, style)
    runs = groupby(cells, key=lambda cell: cell.style)
    return (label, *(Cell("".join(cell.text for cell in run), style) for style, run in runs))


def _background(window: Span, scale: Scale) -> list[Cell]:
    """One cell a column, and one more at either side for the bars of the window: dots inside the window, spaces outside."""
    first, last = scale.column(window[0]) + 1, scale.column(window[1]) + 1
    cells = [Cell("·", BUBBLE) if first <= column < last else Cell(" ", PLAIN) for column in range(scale.num_columns + 2)]
    cells[first - 1], cells[last] = Cell("▕", WINDOW), Cell("▏", WINDOW)
    return cells


def _letter(block: Block) -> str:
    letter = PAINTS[block.look].letter
    return letter.lower() if block.is_rerouted else letter


def _best_text(block: Block, num_columns: int) -> str:
    """The longest label that fits, of kind, micro-batch and (if re-routed) home pipeline, padded to the slot's width."""
    texts = [*block.labels(_letter(block)), _letter(block)]
    return next((text for text in texts if len(text) <= num_columns), "").ljust(num_columns)


def _legend(drawn: list[Line], scale: Scale, to_scale: bool) -> list[Cell]:
    """Explain the styles that the lanes use."""
    used = {cell.style for line in drawn for cell in line}
    cells = [Cell(f"{paint.letter} {paint.meaning}", look) for look, paint in PAINTS.items() if look in used]
    rerouted = next((look + REROUTED for look in PAINTS if look + REROUTED in used), None)
    if rerouted:
        names_home = any("@" in cell.text for line in drawn for cell in line)
        home = "f2@1 is micro-batch 2 of pipeline 1" if names_home else "its micro-batch is another pipeline's"
        cells.append(Cell(f"lower case: re-routed, {home}", rerouted))
    cells += [Cell("· bubble", BUBBLE), Cell("▏ next iteration starts", WINDOW)]
    if not to_scale:
        column_us = (scale.extent[1] - scale.extent[0]) // scale.num_columns
        cells.append(Cell(f"a column is {format_us(column_us)} and shows one op of those in it", NOTE))
    return cells


def _wrap(cells: list[Cell], width: int, between: str = "  ") -> list[Line]:
    """Join cells by `between`, in lines of at most `width` columns unless a single cell is longer."""
    lines: list[list[Cell]] = [[]]
    for cell in cells:
        used = sum(len(known.text) for known in lines[-1])
        if lines[-1] and used + len(between) + len(cell.text) > width:
            lines.append([])
        if lines[-1]:
            lines[-1].append(Cell(between, PLAIN))
        lines[-1].append(cell)
    return [tuple(line) for line in lines]
