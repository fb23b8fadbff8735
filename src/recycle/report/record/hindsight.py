"""The spells of a record as they are known at its end: a record grows during the run, and steps may be lost later."""

from collections.abc import Iterable

from msgspec.structs import replace

from recycle.core.events.record import Recovered, Spell, Stepped

# The cause of a spell whose work was lost: the run went back to a checkpoint.
ROLLED_BACK = "rolled back"


def in_hindsight(spells: Iterable[Spell], progress: Iterable[Stepped | Recovered]) -> list[Spell]:
    """Return the spells as they are known at the end: a `train` spell of steps that a rollback lost becomes `redo`.

    A record grows during the run, so that it has such steps twice: done, and later done again. `progress` is all steps and
    recoveries, in the order of the record.
    """
    done: list[Stepped] = []
    lost_us: set[int] = set()
    for one in progress:
        while done and done[-1].iteration >= one.iteration:
            lost_us.add(done.pop().at_us)
        if isinstance(one, Stepped):
            done.append(one)
    return [
        replace(spell, state="redo", cause=ROLLED_BACK, samples=0, discarded=spell.samples)
        if spell.state == "train" and spell.end_us in lost_us
        else spell
        for spell in spells
    ]
