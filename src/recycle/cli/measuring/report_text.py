"""The text of `recycle report`: one labelled paragraph for each subject, and a curve of the loss."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from recycle.cli.live.event_text import format_loss
from recycle.core.cluster import Worker
from recycle.core.events.record import Held
from recycle.core.units import format_bytes, format_duration, format_us
from recycle.report.record.recovery_text import describe_link, describe_speed, format_ms, recovery_lines
from recycle.report.record.run_summary import Summary, fullest_by_stage, memory_ratio
from recycle.report.record.tables import aligned

_MOST_WORKERS = 16
_MOST_WARNINGS = 8
_MOST_SAVED = 4
_MOST_RECOVERIES = 12
_MOST_SPEEDS = 8
_CURVE_ROWS = 7
_MARGIN = 11
# The bits of a braille character's dots: four rows of two.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def report_lines(summary: Summary, state: str, width: int) -> list[str]:
    """Return the report in lines; `state` describes how the run ended."""
    run, times = summary.run, summary.times
    spread = f"{format_us(times.tenth_us)} at the 10th percentile, {format_us(times.ninetieth_us)} at the 90th"
    paragraphs = {
        "run": [f"{run.source} of {run.name}, {state}" if run.name else f"{run.source}, {state}"],
        "steps" if run.steps else "iterations": _steps(summary),
        "evaluation": _evaluations(summary),
        "speed": [f"{summary.samples_per_s:.4g} samples/s, the median"] if summary.samples_per_s else [],
        "iteration": [f"{format_us(times.median_us)}, the median of {times.num:,}; {spread}"],
        "plan": _plan(summary),
        "bubbles": _bubbles(summary),
        "time": _time(summary),
        "speeds": _speeds(summary),
        "links": _links(summary),
        "recoveries": _recoveries(summary),
        "workers": _workers(summary),
        "memory": _memory(summary),
        "saved": _saved(summary),
        "warnings": _warnings(summary),
        "missing": _missing(summary),
        "not whole": [summary.gaps_text] if summary.gaps else [],
    }
    lines = [line for label, texts in paragraphs.items() for line in _labelled(label, texts)]
    loss_lines = _labelled("loss", _loss_curve(summary, width))
    return [*lines, "", *loss_lines] if loss_lines else lines


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    """Return lines of text, the first of them labelled in the margin."""
    return [f"{label if number == 0 else '':<{_MARGIN}}{text}".rstrip() for number, text in enumerate(texts)]


def _evaluations(summary: Summary) -> list[str]:
    """The last evaluation, and the best one if that is another."""
    if not (found := summary.run.evaluations):
        return []
    last, *_ = reversed(found)
    best = min(found, key=lambda each: math.inf if each.loss is None else each.loss)
    text = f"{len(found):,}; loss {format_loss(last.loss)} after step {last.num_steps}"
    return [f"{text}, at the best {format_loss(best.loss)} after step {best.num_steps}" if best is not last else text]


def _steps(summary: Summary) -> list[str]:
    executed = summary.executed
    if not summary.run.steps:
        return [f"{len(executed.whole):,} whole ones, {executed.whole[0]} to {executed.whole[-1]}"]
    (_, first), (_, last) = summary.losses[0], summary.losses[-1]
    counts = {"skipped": len(summary.skipped), "clipped": len(summary.clipped), "taken back": len(executed.taken_back)}
    texts = [
        f"{len(summary.run.steps):,}; loss {format_loss(first)} at the first, {format_loss(last)} at the last",
        ", ".join(f"{count or 'none'} {what}" for what, count in counts.items()),
    ]
    if executed.num_in_vain:
        lost = f"{executed.num_in_vain:,} ops ran in vain, {format_duration(executed.in_vain_us)} of all workers together"
        texts.append(f"{lost}, and were run again")
    return texts


def _plan(summary: Summary) -> list[str]:
    executed, num_other = summary.executed, len(summary.executed.of_other_plans)
    promise = f"at the speed at which ops ran the plan promises {format_us(round(executed.promised_us))}"
    ratios = ", ".join(f"{kind} {_times(ratio)}" for kind, ratio in summary.slowdowns.items())
    slow = f"ops took {_times(executed.slowdown())} times as long as planned: {ratios}"
    texts = [
        f"{promise}: the iteration takes {summary.over_promise:.3f} times that",
        f"its period is {format_us(summary.plan.period_us)}; {slow}",
    ]
    if num_other:
        texts.append(f"{len(executed.whole):,} iterations were executed by this plan, {num_other:,} by plans of other epochs")
    return texts


def _times(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.0f}"


def _bubbles(summary: Summary) -> list[str]:
    ordered = sorted(summary.executed.shares, key=lambda share: (share.bubble, share.worker))
    least, most = (f"{share.bubble:.1%} ({share.worker})" for share in (ordered[0], ordered[-1]))
    shares = f"{summary.bubble:.1%} of the workers' time as executed, {summary.planned_bubble:.1%} as planned"
    return [f"{shares}; from {least} to {most}"]


def _time(summary: Summary) -> list[str]:
    metrics = summary.run.metrics
    if metrics is None:
        return []
    parts = {"busy": metrics.busy_us, "bubble": metrics.bubble_us, "redo": metrics.redo_us, "checkpoint": metrics.checkpoint_us}
    parts |= {cause or "a pause": time for cause, time in {**metrics.pauses_us, **metrics.downs_us}.items()}
    shares = ", ".join(f"{name} {time / metrics.total_us:.1%}" for name, time in parts.items() if time)
    return [f"{format_duration(metrics.total_us)} in all: {shares}"]


def _speeds(summary: Summary) -> list[str]:
    """Who was slower or faster than its peers, from which step on."""
    known = summary.run.speeds
    return [*map(describe_speed, known[:_MOST_SPEEDS]), *_more(len(known) - _MOST_SPEEDS)]


def _links(summary: Summary) -> list[str]:
    """Which links were slower than others, from which step on."""
    known = summary.run.links
    return [*map(describe_link, known[:_MOST_SPEEDS]), *_more(len(known) - _MOST_SPEEDS)]


def _recoveries(summary: Summary) -> list[str]:
    known = summary.run.recoveries
    if not known:
        return []
    num_left, num_joined = (sum(len(one.workers) for one in known if one.joins == joins) for joins in (False, True))
    head = f"{len(known):,}, which cost {format_ms(summary.lost_us)}; {num_left or 'none'} left, {num_joined or 'none'} joined"
    return [head, *recovery_lines(known[:_MOST_RECOVERIES]), *_more(len(known) - _MOST_RECOVERIES)]


def _more(num_hidden: int) -> list[str]:
    return [f"and {num_hidden:,} more; --json lists all"] if num_hidden > 0 else []


def _workers(summary: Summary) -> list[str]:
    """Return a table of the processes at each place, so that a user finds a process that is to be ended."""
    placed = sorted(summary.run.placed, key=lambda one: (Worker.parse(one.node), one.at_us))
    rows = [[one.node, one.host, str(one.pid), format_duration(one.at_us)] for one in placed[:_MOST_WORKERS]]
    table = aligned([["worker", "host", "pid", "from"], *rows]).splitlines() if rows else []
    return [*table, *_more(len(placed) - _MOST_WORKERS)]


def _memory(summary: Summary) -> list[str]:
    held, note = list(summary.run.held), []
    if not held:
        return []
    if len(held) > _MOST_WORKERS:
        note = [f"of each stage the fullest of {len(held)} workers"]
        held = fullest_by_stage(summary.run.held)
    table = [["worker", "process", "activations", "planned", "of planned"], *map(_memory_row, held)]
    if any(one.static_bytes for one in held):
        table = [row + state for row, state in zip(table, [["state", "planned"], *map(_state_cells, held)], strict=True)]
    return [*note, *aligned(table).splitlines()]


def _memory_row(held: Held) -> list[str]:
    ratio = memory_ratio(held)
    planned = format_bytes(held.planned_bytes) if held.planned_bytes else "-"
    measured = (format_bytes(held.peak_bytes), format_bytes(held.activation_bytes))
    return [held.worker, *measured, planned, "-" if ratio is None else f"{ratio:.0%}"]


def _state_cells(held: Held) -> list[str]:
    """The memory of parameters, optimizer state and gradients, guests included, and what the plan says of it if it does."""
    return [format_bytes(held.static_bytes), format_bytes(held.planned_static_bytes) if held.planned_static_bytes else "-"]


def _saved(summary: Summary) -> list[str]:
    saved = summary.run.saved
    texts = [
        f"step {one.num_steps:,} at {format_duration(one.at_us)}, {format_bytes(one.size_bytes)}, in {one.folder}"
        for one in saved[-_MOST_SAVED:]
    ]
    return [f"{len(saved) - _MOST_SAVED} before these", *texts] if len(saved) > _MOST_SAVED else texts


def _warnings(summary: Summary) -> list[str]:
    warned = summary.run.warned
    texts = [f"at {format_duration(one.at_us)}: {' '.join(one.text.split())}" for one in warned[:_MOST_WARNINGS]]
    return [*texts, *_more(len(warned) - _MOST_WARNINGS)]


def _missing(summary: Summary) -> list[str]:
    if not summary.missing:
        return []
    *others, last = summary.missing
    return [f"the record holds no {', no '.join(others)}{' and no ' if others else ''}{last}"]


def _loss_curve(summary: Summary, width: int) -> list[str]:
    known = [(iteration, loss) for iteration, loss in summary.losses if loss is not None]
    if len(known) < 2:
        return []
    num_columns = max(10, min(72, width - _MARGIN - 12))
    low, high = (f"{bound(loss for _, loss in known):.4g}" for bound in (min, max))
    label = max(len(low), len(high))
    drawn = curve([loss for _, loss in known], num_columns, _CURVE_ROWS)
    marks = {0: high, _CURVE_ROWS - 1: low}
    lines = [f"{marks.get(row, ''):>{label}} │{text}" for row, text in enumerate(drawn)]
    first, last = str(known[0][0]), str(known[-1][0])
    return [*lines, f"{'':>{label}}  {first}{last:>{num_columns - len(first)}}  iteration"]


def curve(values: Sequence[float], num_columns: int, num_rows: int) -> list[str]:
    """Draw values as a line of braille dots, the highest in the first row; of many values, each dot is a mean."""
    wide, high = 2 * num_columns, 4 * num_rows
    points = _resampled(values, wide)
    low, span = min(points), max(points) - min(points)
    levels = [round((point - low) / span * (high - 1)) if span else high // 2 for point in points]
    cells = [[0] * num_columns for _ in range(num_rows)]
    for x, level in enumerate(levels):
        before = levels[max(0, x - 1)]
        # All levels from the one before to this one, so that a steep line has no gaps.
        reached = range(min(level, before + 1), level + 1) if before <= level else range(level, before)
        for y in (high - 1 - dot for dot in reached):
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row).rstrip() for row in cells]


def _resampled(values: Sequence[float], num: int) -> list[float]:
    """Return `num` values over the same range: means of equal parts, or linear interpolation if there are fewer values."""
    if len(values) >= num:
        bounds = [number * len(values) // num for number in range(num + 1)]
        return [math.fsum(values[first:last]) / (last - first) for first, last in pairwise(bounds)]
    points: list[float] = np.interp(np.linspace(0, len(values) - 1, num), range(len(values)), values).tolist()
    return points
