"""The picture of the live view: `draw` turns a `RunState` into an object that rich prints, without a clock or a terminal.

It is readable without colours: a place has a sign and a word, a part of a recovery a letter and its milliseconds.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from recycle.cli.live.event_text import describe_step
from recycle.cli.terminal import STYLES
from recycle.core.cluster import Worker
from recycle.core.events.record import Recovered
from recycle.core.units import format_us
from recycle.report.record.recovery_text import PART_LETTERS, PART_LOOKS, describe_rest, format_ms, who
from recycle.report.record.run_state import ALIVE, DEAD, JOINING, STARTING, SUSPECTED, RunState, StepPace
from recycle.report.render.palette import PAINTS

# How a place is drawn: its look in the palette, its sign, the sign in ASCII, and the word after its name.
_PLACES = {
    ALIVE: ("W", "●", "o", ""),
    DEAD: ("B", "✗", "x", "dead"),
    JOINING: ("F", "+", "+", "joins"),
    STARTING: ("F", "○", ".", "starts"),
    SUSPECTED: ("I", "?", "?", "hangs"),
}
_MOST_PIPELINES, _MOST_SLOW = 12, 4
_CELL, _MARGIN = 13, 12
_COLUMNS = {"detect": 8, "abort": 8, "plan": 8, "regroup": 9, "transfer": 10, "redo": 8, "lost": 9}
_LONGEST_BAR, _SHORTEST_BAR = 30, 8
_HEIGHTS, _ASCII_HEIGHTS = "▁▂▃▄▅▆▇█", ".,:;+*%#"
_FAINT, _BOLD = Style(dim=True), Style(bold=True)


def draw(state: RunState, elapsed_s: float, width: int, is_ascii: bool = False) -> RenderableType:
    """The view of a run: one line, or with a shape the whole picture."""
    if state.shape is None:
        return _progress(state, elapsed_s, _status(state), width)
    parts: list[RenderableType] = [
        _progress(state, elapsed_s, "", width),
        Text(_status(state), no_wrap=True, overflow="ellipsis"),
        Text(),
        _grid(state, width, is_ascii),
        _worker_counts(state),
        *_troubled_processes(state),
        Text(),
    ]
    if state.paces:
        parts.append(_strip(state.paces, width - _MARGIN, is_ascii))
    if state.recoveries:
        parts += [Text(), *_recoveries(state, width, is_ascii)]
    return Group(*parts)


def _progress(state: RunState, elapsed_s: float, text: str, width: int) -> RenderableType:
    """The step, a bar if there is room for one, a text and the clock."""
    left = "" if state.remaining_us is None else f", {_clock(state.remaining_us / 1e6)} left"
    step, clock = f"step {state.facts.num_done} of {state.num_steps}", f"{_clock(elapsed_s)}{left}"
    room = width - len("  ".join((step, text, clock))) - 1
    if room < _SHORTEST_BAR:
        # In a group, because a text that is printed by itself forgets not to wrap.
        return Group(Text("  ".join(filter(None, (step, text, clock))), no_wrap=True, overflow="ellipsis"))
    bar = ProgressBar(total=max(1, state.num_steps), completed=state.facts.num_done, width=min(40, room))
    line = Table.grid(padding=(0, 1))
    line.add_row(Text(step, no_wrap=True), bar, *(Text(part, no_wrap=True) for part in (text, clock) if part))
    return line


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _status(state: RunState) -> str:
    step, checkpoint = state.facts.step, state.facts.checkpoint
    if step is None:
        return "starting workers"
    planned = f" {format_us(step.planned_us)}" if step.planned_us else ""
    saved = f"  saved at {checkpoint.num_steps}" if checkpoint else ""
    return describe_step(step, state.spell) + planned + saved


def _grid(state: RunState, width: int, is_ascii: bool) -> RenderableType:
    """A row a pipeline, a column a stage; only signs where the names have no room."""
    assert state.shape is not None
    is_wide = _MARGIN + state.shape.num_stages * (_CELL + 1) <= width
    grid = Table.grid(padding=(0, 1, 0, 0) if is_wide else 0)
    grid.add_column(width=_MARGIN)
    if is_wide:
        grid.add_row("", *(Text(f"stage {stage}", _FAINT) for stage in range(state.shape.num_stages)))
        if state.carried:  # layers are shared, and stages compute more or fewer of them by where micro-batches are cut
            grid.add_row(Text("compute", _FAINT), *(Text(f"{mean:g} layers", _FAINT) for mean in state.carried))
    shown = _shown_pipelines(state)
    for pipeline in shown:
        names = [str(Worker(pipeline, stage)) for stage in range(state.shape.num_stages)]
        speeds = state.facts.speeds
        cells = [_cell(name, state.places[name], speeds.get(name, 1.0), is_wide, is_ascii) for name in names]
        grid.add_row(Text(f"pipeline {pipeline}", _FAINT), *(cells if is_wide else [Text().join(cells)]))
    if num_hidden := state.shape.num_pipelines - len(shown):
        grid.add_row(Text(f"{num_hidden} more", _FAINT))
    return grid


def _shown_pipelines(state: RunState) -> list[int]:
    """All pipelines; of many, those with a worker that is slow or not alive, and as many others as fit."""
    assert state.shape is not None
    troubled = {Worker.parse(name).pipeline for name, how in state.places.items() if how not in (ALIVE, STARTING)}
    troubled |= {Worker.parse(name).pipeline for name, speed in state.facts.speeds.items() if speed < 1}
    troubled |= {Worker.parse(end).pipeline for name in state.facts.slow_links for end in name.split("-")}
    chosen = sorted(range(state.shape.num_pipelines), key=lambda pipeline: (pipeline not in troubled, pipeline))
    return sorted(chosen[:_MOST_PIPELINES])


def _cell(name: str, how: str, speed: float, is_wide: bool, is_ascii: bool) -> Text:
    look, sign, plain, word = _PLACES[how]
    if how == ALIVE and speed != 1:
        look, word = "I" if speed < 1 else look, f"x{speed:g}"
    sign = plain if is_ascii else sign
    return Text(f" {sign} {name} {word}".ljust(_CELL) if is_wide else sign, STYLES[look], no_wrap=True)


def _worker_counts(state: RunState) -> Text:
    """The number of workers in each state, slow workers and links, and the workers whose work is being taken over."""
    counts = {how: sum(one == how for one in state.places.values()) for how in _PLACES}
    text = f"{counts.pop(ALIVE)} of {len(state.places)} workers alive"
    text += "".join(f", {count} {how}" for how, count in counts.items() if count)
    slow = [f"{name} x{speed:g}" for name, speed in sorted(state.facts.speeds.items()) if speed < 1]
    if slow := [*slow, *(f"{name} x{link.speed:g}" for name, link in sorted(state.facts.slow_links.items()))]:
        text += f"; slow: {', '.join(slow[:_MOST_SLOW])}{' and more' if len(slow) > _MOST_SLOW else ''}"
    made = Text(" " * _MARGIN + text)
    if state.gone:
        made.append(f"   recovering: {', '.join(state.gone)} left", Style(bold=True, color=PAINTS["B"].fill))
    return made


def _troubled_processes(state: RunState) -> list[Text]:
    """The host and the process id of workers that are not alive, in one line: a user may have to end those processes."""
    troubled = {name: how for name, how in state.places.items() if how != ALIVE and name in state.processes}
    texts = [f"{name} {_PLACES[how][3]}: {state.processes[name]}" for name, how in troubled.items()]
    return [Text(" " * _MARGIN + "; ".join(texts), no_wrap=True, overflow="ellipsis")] if texts else []


def _strip(paces: Sequence[StepPace], width: int, is_ascii: bool) -> Text:
    """The last iterations as columns, one of median length at two thirds of the height; bold if a tenth longer than its plan."""
    heights = _ASCII_HEIGHTS if is_ascii else _HEIGHTS
    shown = paces[-max(1, width - 24) :]
    times_us = sorted(pace.took_us for pace in shown)
    top_us = max(1, times_us[-1], 3 * times_us[len(times_us) // 2] // 2)
    strip = Text(no_wrap=True, overflow="crop").append(f"{'iterations':<{_MARGIN}}", _FAINT)
    for pace in shown:
        is_late = bool(pace.planned_us) and pace.took_us > 1.1 * pace.planned_us
        height = heights[min(len(heights) - 1, pace.took_us * len(heights) // top_us)]
        strip.append(height, Style(color=PAINTS["F"].fill, bold=is_late))
    return strip.append(f"  longest {format_us(times_us[-1])}", _FAINT)


def _recoveries(state: RunState, width: int, is_ascii: bool) -> list[RenderableType]:
    """The number of recoveries, and of the last ones, the newest first, the cause and the time of each part."""
    bar = max(0, min(_LONGEST_BAR, width - _MARGIN - sum(_COLUMNS.values())))
    lost_us = sum(state.facts.lost_us.values())
    head = Text(f"recoveries  {state.facts.num_recoveries}, which cost {format_ms(lost_us)}", _BOLD)
    made: list[RenderableType] = [head, _part_names(bar)]
    longest_us = max(1, *(one.lost_us for one in state.recoveries))
    for one in reversed(state.recoveries):
        look, sign, plain, _ = _PLACES[ALIVE if one.joins else DEAD]
        line = Text(f"step {one.iteration + 1:<7}", no_wrap=True, overflow="ellipsis")
        line.append(f"{plain if is_ascii else sign} {who(one)}", Style(color=PAINTS[look].fill, bold=True))
        made += [line.append(f": {describe_rest(one)}"), _parts(one, bar, longest_us)]
    return made


def _line(indent: int) -> Text:
    return Text(" " * (_MARGIN + indent), no_wrap=True, overflow="ellipsis")


def _part_names(indent: int) -> Text:
    """The names of the parts, each in the colour that it has in the bars."""
    line = _line(indent)
    for part, wide in _COLUMNS.items():
        line.append(" " * (wide - len(part)))
        line.append(part, STYLES[PART_LOOKS[part]] if part in PART_LOOKS else _FAINT)
    return line


def _parts(recovered: Recovered, width: int, longest_us: int) -> Text:
    """A bar of letters, as long as the recovery beside the longest one, and every part in milliseconds."""
    line = _line(0)
    cells = bar_cells(recovered.parts_us, round(width * recovered.lost_us / longest_us))
    for part, num_cells in cells.items():
        line.append(PART_LETTERS[part] * num_cells, STYLES[PART_LOOKS[part]])
    line.append(" " * (width - sum(cells.values())))
    for part, time_us in recovered.parts_us.items():
        line.append(format_ms(time_us).rjust(_COLUMNS[part]), Style() if time_us else _FAINT)
    return line.append(format_ms(recovered.lost_us).rjust(_COLUMNS["lost"]), _BOLD)


def bar_cells(times_us: Mapping[str, int], num_cells: int) -> dict[str, int]:
    """Divide a bar among parts by their times, in whole cells; a part too short for a cell has none."""
    total_us, spent_us, filled, cells = max(1, sum(times_us.values())), 0, 0, {}
    for part, time_us in times_us.items():
        spent_us += time_us
        end = round(num_cells * spent_us / total_us)
        cells[part], filled = end - filled, end
    return cells
