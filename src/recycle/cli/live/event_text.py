"""Events as lines of text, for the live view and the reports: steps, and workers that leave, join or are suspected."""

from collections.abc import Mapping

from recycle.core.events.record import (
    Changed,
    Event,
    Joining,
    LinkChanged,
    Recovered,
    SpeedChanged,
    Spell,
    Stepped,
    Suspected,
)
from recycle.core.units import format_us
from recycle.report.record.recovery_text import describe_link, describe_parts, describe_rest, describe_speed, who


def format_loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def format_rate(rate: float) -> str:
    """A rate with three digits, or with all that stand before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def describe_step(event: Stepped, spell: Spell | None) -> str:
    """A line on a step: its loss, and if its spell is known, its speed relative to the plan."""
    parts = [f"loss {format_loss(event.loss)}"]
    if spell is not None and spell.length_us > 0:
        parts.append(f"{format_rate(spell.samples * 1e6 / spell.length_us)} samples/s")
        parts.append(f"iteration {format_us(spell.length_us)}")
        if event.planned_us:
            parts.append(f"{spell.length_us / event.planned_us:.2f} of the plan's")
    if event.scale is None:
        parts.append("skipped")
    return "  ".join(parts)


def describe_change(event: Event, processes: Mapping[str, str]) -> str | None:
    """A line on a worker that left, joined, is suspected or slow, on a slow link, or on a recovery; None for other events."""
    match event:
        case Changed():
            verb = "joined" if event.joins else "left"
            return f"{_with_process(event.node, processes)} {verb}: {event.num_live} workers are live"
        case Joining():
            return f"{_with_process(event.node, processes)} is loading, and joins at the next iteration"
        case Suspected():
            return f"{_with_process(event.node, processes)} is suspected, and will be fenced: {event.reason}"
        case SpeedChanged():
            return describe_speed(event)
        case LinkChanged():
            return describe_link(event)
        case Recovered():
            return (
                f"recovered, from step {event.iteration + 1} on: {who(event)} ({describe_rest(event)}); {describe_parts(event)}"
            )
        case _:
            return None


def _with_process(node: str, processes: Mapping[str, str]) -> str:
    """A worker with its host and process id, if they are known: a user may have to end that process."""
    return f"{node} ({processes[node]})" if node in processes else node
