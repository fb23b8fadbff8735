"""Tables of numbers as rows of texts, for a terminal or for Markdown."""

from collections.abc import Mapping, Sequence

from recycle.core.units import format_duration
from recycle.report.metrics import Metrics


def campaign_table(runs: Mapping[str, Metrics], fault_free: float) -> list[list[str]]:
    """Return the head and one row a system: throughput, share of fault-free, samples lost, and where the time went."""
    head = ["system", "samples/s", "of fault-free", "redone", "dropped", "bubble", "pauses", "redo", "checkpoints", "down"]
    rows = [
        [
            name,
            f"{run.throughput:.4g}",
            f"{run.goodput(fault_free):.1%}",
            f"{run.redone_samples:,}",
            f"{run.dropped_samples:,}",
            f"{run.bubble_share:.1%}",
            *(_time(value) for value in (run.pause_us, run.redo_us, run.checkpoint_us, run.down_us)),
        ]
        for name, run in runs.items()
    ]
    return [head, *rows]


def pause_table(runs: Mapping[str, Metrics]) -> list[list[str]]:
    """Return the head and one row a system with the pauses by cause; the head alone if nobody paused."""
    causes = sorted({cause for run in runs.values() for cause in run.pauses_us})
    rows = [[name, *(_time(run.pauses_us.get(cause, 0)) for cause in causes)] for name, run in runs.items()]
    return [["pauses by cause", *causes], *rows] if causes else []


def _time(time_us: int) -> str:
    return format_duration(time_us) if time_us else "–"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the head, as a Markdown table with numbers to the right."""
    head, *body = rows
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in body)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns for a terminal: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(lines)


def document(
    title: str, made_by: str, assumptions: Sequence[str], tables: Mapping[str, Sequence[Sequence[str]]], picture: str
) -> str:
    """Return a page of Markdown: what was assumed, then every table under its caption, then the picture."""
    lines = [f"# {title}", "", f"Made by `{made_by}`.", "", "## Assumptions", "", *(f"- {text}" for text in assumptions), ""]
    for caption, rows in tables.items():
        lines += [f"## {caption}", "", markdown(rows), ""]
    return "\n".join([*lines, f"![{title}]({picture})", ""])
