"""Tables as rows of text cells: the metrics of a campaign, and their form for a terminal or in Markdown."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from recycle.core.units import format_duration
from recycle.report.record.metrics import Metrics

_SHARES = ["system", "samples/s", "of 1F1B", "of own", "of best"]
_TIMES = ["paused", "redo", "down"]
Spread = tuple[float, float | None]
"""A mean, and half of its interval; None for a single value."""


def campaign_table(
    runs: Mapping[str, Metrics], fault_free: float, own_fault_free: Mapping[str, float], best_fault_free: float
) -> list[list[str]]:
    """Return the head and one row a system: throughput, its shares, lost samples, time by use.

    The shares are those of fault-free 1F1B, of the system's own throughput without failures, and of the best schedule without
    failures, which are given in samples per second.
    """
    rows = [
        [
            name,
            f"{run.throughput:.4g}",
            *(_share(run, rate) for rate in (fault_free, own_fault_free[name], best_fault_free)),
            f"{run.redone_samples:,}",
            f"{run.dropped_samples:,}",
            f"{run.bubble_share:.1%}",
            *(_time(value) for value in (run.pause_us + run.checkpoint_us, run.redo_us, run.down_us)),
        ]
        for name, run in runs.items()
    ]
    return [[*_SHARES, "redone", "dropped", "bubble", *_TIMES], *rows]


def seed_table(runs: Mapping[str, Sequence[Metrics]], shares: Mapping[str, Sequence[Spread | None]]) -> list[list[str]]:
    """Return the head and one row a system: throughput and time by use as means over runs.

    `shares` are the throughput and the three shares of it, with their intervals.
    """
    rows = []
    for name, own in runs.items():
        throughput, *others = shares[name]
        cells = [spread_text(throughput, ".4g"), *(spread_text(share, ".1%") for share in others)]
        times = ([run.pause_us + run.checkpoint_us for run in own], [run.redo_us for run in own], [run.down_us for run in own])
        rows.append([name, *cells, *(_time(round(fmean(each))) for each in times)])
    return [[*_SHARES, *_TIMES], *rows]


def spread_text(spread: Spread | None, form: str) -> str:
    """A mean and half of its interval; a dash for nothing."""
    if spread is None:
        return "–"
    mean, half_width = spread
    if half_width is None:
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {half_width:{'.0f' if form == '.4g' and half_width >= 100 else form.replace('.4g', '.2g')}}"


def pause_table(runs: Mapping[str, Metrics]) -> list[list[str]]:
    """Return the head and a row for each system that paused, with its pauses by cause; nothing if none paused."""
    pauses = {name: _pauses_us(run) for name, run in runs.items()}
    causes = sorted({cause for times in pauses.values() for cause in times})
    rows = [[name, *(_time(times.get(cause, 0)) for cause in causes)] for name, times in pauses.items() if times]
    return [["paused by cause", *causes], *rows] if causes else []


def _pauses_us(run: Metrics) -> dict[str, int]:
    """Pauses by cause, including regular checkpoints; their sum is the paused time of a run."""
    checkpoint_us = run.checkpoint_us + run.pauses_us.get("checkpoint", 0)
    return {**run.pauses_us, "checkpoint": checkpoint_us} if checkpoint_us else run.pauses_us


def down_notes(runs: Mapping[str, Metrics]) -> list[str]:
    """Return a line for each system that was down, with its longest cause."""
    longest = {name: next(iter(run.downs_us)) for name, run in runs.items() if run.downs_us}
    return [f"{name} was down for {_time(runs[name].down_us)}: {reason}" for name, reason in longest.items()]


def _share(run: Metrics, rate: float) -> str:
    return f"{run.share_of(rate):.1%}" if rate else "–"


def _time(time_us: int) -> str:
    return format_duration(time_us) if time_us else "–"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, as a Markdown table; all columns but the first are right-aligned."""
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns for a terminal; all columns but the first are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines)


def document(
    title: str,
    made_by: str,
    assumptions: Sequence[str],
    tables: Mapping[str, Sequence[Sequence[str]]],
    picture: str,
    findings: Sequence[str] = (),
    answer: Sequence[str] = (),
) -> str:
    """Return a page of Markdown: answer, assumptions, what the numbers cannot tell, tables under their captions, the picture."""
    lines = [f"# {title}", "", f"Made by `{made_by}`.", ""]
    if answer:
        lines += ["## Answer", "", *(f"- {text}" for text in answer), ""]
    lines += ["## Assumptions", "", *(f"- {text}" for text in assumptions), ""]
    if findings:
        lines += ["## What the numbers cannot tell", "", *(f"- {text}" for text in findings), ""]
    for caption, rows in tables.items():
        lines += [f"## {caption}", "", markdown(rows), ""]
    return "\n".join([*lines, f"![{title}]({picture})", ""])
