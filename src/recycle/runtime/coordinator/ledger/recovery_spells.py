"""The spells of a recovery in the record: work that is redone, and the parts of the pause, as a simulated run has them."""

from collections.abc import Iterator

from recycle.core.events.record import Recovered, Spell


def recovery_spells(event: Recovered, stepped_us: int, num_discarded: int) -> Iterator[Spell]:
    """Yield the spells between the last step, at `stepped_us`, and the first op after the recovery.

    `num_discarded` samples were in flight. Steps that a checkpoint discarded stay as they were written: a reader corrects them by
    `in_hindsight`.
    """
    if stepped_us < event.at_us:
        cause = "replan" if not event.workers else "join" if event.joins else "failure"
        yield Spell(stepped_us, event.at_us, "redo", cause, discarded=num_discarded, num_live=event.num_live)
    end_us = event.at_us
    for cause in ("detect", "abort", "plan", "regroup", "transfer"):
        start_us, end_us = end_us, end_us + getattr(event, f"{cause}_us")
        # A step in flight may have ended after the failure: its time belongs to the step.
        if max(start_us, stepped_us) < end_us:
            yield Spell(max(start_us, stepped_us), end_us, "pause", cause, num_live=event.num_live)
