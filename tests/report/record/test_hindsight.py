"""Spells of steps that a rollback lost."""

from recycle.core.events.record import Recovered, Spell, Stepped
from recycle.report.record.hindsight import ROLLED_BACK, in_hindsight


def step(iteration, at_us):
    return Stepped(iteration, at_us, 1.0, 1.0, 1.0)


def trained(end_us):
    return Spell(end_us - 10, end_us, "train", samples=8, busy_us=7, num_live=4)


def back_to(iteration, at_us):
    return Recovered(at_us, at_us + 5, 2, ("W0_1",), False, "killed", iteration)


def test_spells_of_steps_that_are_done_again_were_in_vain():
    spells = [trained(10), trained(20), trained(30), Spell(30, 45, "pause", "regroup"), trained(55)]
    progress = [step(0, 10), step(1, 20), step(2, 30), back_to(1, 30), step(1, 55)]
    lost = [Spell(at, at + 10, "redo", ROLLED_BACK, discarded=8, busy_us=7, num_live=4) for at in (10, 20)]
    known = [spells[0], *lost, *spells[3:]]
    assert in_hindsight(spells, progress) == known
    assert (
        in_hindsight(spells, [one for one in progress if not isinstance(one, Recovered)]) == known
    )  # no worker was left to report it
    assert in_hindsight(spells[:4], progress[:4]) == known[:4]
    assert in_hindsight(known, progress) == known


def test_a_step_that_was_settled_after_a_failure_counts():
    spells, progress = [trained(10), trained(20)], [step(0, 10), back_to(2, 15), step(1, 20)]
    assert in_hindsight(spells, progress) == spells


# The plans of a run.
