"""How fast a run steps: `iteration_us` between two steps, `samples_per_s` of a spell of training."""

from recycle.core.events.record import Spell, Stepped


def iteration_us(before: Stepped | None, step: Stepped) -> int | None:
    """The time between the ends of two steps, pauses included; None if they are not consecutive iterations."""
    if before is None or step.iteration != before.iteration + 1:
        return None
    return step.at_us - before.at_us


def samples_per_s(spell: Spell) -> float | None:
    """The throughput of a spell of training; None for a spell that applied no samples."""
    if spell.state != "train" or not spell.samples or spell.length_us <= 0:
        return None
    return spell.samples * 1e6 / spell.length_us
