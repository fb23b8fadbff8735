"""One system over one trace: every microsecond in one spell, every sample counted once."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.core.events.trace import Change, Trace
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.policy import DOWN, Loss, Members, MembershipChange, Pause, PolicyDecision, SteadyState

SHAPE = Shape(2, 2, 4)
STEP = SteadyState(step_us=10, samples=4)
FIRST = PolicyDecision(STEP, state=0)


@dataclass(frozen=True)
class Scripted:
    """A system that answers what the test says, whatever is asked; it remembers nothing."""

    answers: tuple[PolicyDecision, ...]
    first: PolicyDecision = FIRST
    name: str = "scripted"

    def begin(self, members: Members) -> PolicyDecision:
        return self.first

    def change(self, event: MembershipChange, state: Any) -> PolicyDecision:
        answer = self.answers[state]
        return PolicyDecision(
            answer.steady_state, answer.pauses, answer.loses, "", state + 1, answer.keeps_unfinished, answer.drops_samples
        )


def trace(*leaves_at_us: int, end_us: int) -> Trace:
    names = [f"W{p}_{s}" for p in range(2) for s in range(2)]
    start = [Change(0, True, name) for name in names]
    return Trace((*start, *(Change(at, False, name) for at, name in zip(leaves_at_us, names, strict=False))), end_us)


def spells(system, given_trace, ready_us=0):
    return [event for event in simulate_trace(system, given_trace, SHAPE, ready_us) if isinstance(event, Spell)]


def spell_rows(found):
    return [(spell.start_us, spell.end_us, spell.state, spell.cause, spell.samples) for spell in found]


def test_whole_steps_count_and_the_one_that_the_end_cuts_short_does_not():
    assert spell_rows(spells(Scripted(()), trace(end_us=47))) == [(0, 47, "train", "", 16)]


def hang_trace(at_us: int, node: str, end_us: int) -> Trace:
    start = trace(end_us=end_us)
    return Trace((*start.changes, Change(at_us, False, node, hangs=True)), end_us)


def test_a_worker_that_hangs_holds_the_job_up_until_the_system_notices():
    system = Scripted((PolicyDecision(STEP, (Pause("regroup", 7),), Loss.STEP),))
    found = [one for one in simulate_trace(system, hang_trace(25, "W0_0", 100), SHAPE, 0, 30) if isinstance(one, Spell)]
    assert spell_rows(found) == [
        (0, 20, "train", "", 8),
        (20, 25, "redo", "step in flight", 0),
        (25, 55, "pause", "hang", 0),
        (55, 62, "pause", "regroup", 0),
        (62, 100, "train", "", 12),
    ]


def test_a_spare_that_hangs_holds_nobody_up():
    system = Scripted((PolicyDecision(STEP, (), Loss.NOTHING, keeps_unfinished=True),))
    start = trace(end_us=100)
    given_trace = Trace((*start.changes, Change(0, True, "node7"), Change(25, False, "node7", hangs=True)), 100)
    found = simulate_trace(system, given_trace, SHAPE, 0, 30)
    assert [event.state for event in found if isinstance(event, Spell)] == ["train", "train"]


def test_a_failure_throws_away_the_step_in_flight_and_pauses_the_job():
    system = Scripted((PolicyDecision(SteadyState(20, 4), (Pause("regroup", 7),), Loss.STEP),))
    found = spells(system, trace(25, end_us=75))
    assert spell_rows(found) == [
        (0, 20, "train", "", 8),
        (20, 25, "redo", "step in flight", 0),
        (25, 32, "pause", "regroup", 0),
        (32, 75, "train", "", 8),
    ]
    assert found[1].discarded == 2  # half a step of four samples


def test_a_change_that_loses_nothing_waits_for_the_step_in_flight():
    system = Scripted((PolicyDecision(SteadyState(5, 4), (Pause("transfer", 3),), Loss.NOTHING),))
    assert spell_rows(spells(system, trace(25, end_us=43))) == [
        (0, 20, "train", "", 8),
        (20, 30, "train", "", 4),
        (30, 33, "pause", "transfer", 0),
        (33, 43, "train", "", 8),
    ]


def test_a_failure_during_the_last_step_before_a_switch_loses_that_step():
    gentle = PolicyDecision(SteadyState(5, 4), (Pause("transfer", 3),), Loss.NOTHING)
    hard = PolicyDecision(SteadyState(10, 4), (Pause("regroup", 2),), Loss.STEP)
    assert spell_rows(spells(Scripted((gentle, hard)), trace(25, 27, end_us=39))) == [
        (0, 20, "train", "", 8),
        (20, 27, "redo", "step in flight", 0),
        (27, 29, "pause", "regroup", 0),
        (29, 39, "train", "", 4),
    ]


@pytest.mark.parametrize(("keeps", "paused_until"), [(False, 28), (True, 30)])
def test_a_second_failure_replaces_the_pause_or_adds_to_it(keeps, paused_until):
    first = PolicyDecision(STEP, (Pause("regroup", 6),), Loss.STEP)
    second = PolicyDecision(STEP, (Pause("detect", 4),), Loss.STEP, keeps_unfinished=keeps)
    found = spells(Scripted((first, second)), trace(20, 24, end_us=60))
    assert sum(spell.length_us for spell in found if spell.state == "pause") == paused_until - 20


def test_a_roll_back_takes_back_all_steps_since_the_last_whole_checkpoint():
    steady_state = SteadyState(10, 4, checkpoint_every=3, checkpoint_us=5)
    system = Scripted(
        (PolicyDecision(steady_state, (Pause("restart", 8),), Loss.SINCE_CHECKPOINT),), PolicyDecision(steady_state, state=0)
    )
    # Steps end at 10, 20, 30, a checkpoint at 35, steps at 45 and 55; the failure at 58 leaves the first three.
    found = spells(system, trace(58, end_us=66))
    assert spell_rows(found) == [
        (0, 30, "train", "", 12),
        (30, 35, "checkpoint", "", 0),
        (35, 55, "redo", "rolled back", 0),
        (55, 58, "redo", "step in flight", 0),
        (58, 66, "pause", "restart", 0),
    ]
    assert sum(spell.discarded for spell in found) == 8 + 1


def test_a_checkpoint_that_a_failure_interrupts_does_not_count():
    steady_state = SteadyState(10, 4, checkpoint_every=3, checkpoint_us=5)
    system = Scripted((PolicyDecision(steady_state, (), Loss.SINCE_CHECKPOINT),), PolicyDecision(steady_state, state=0))
    found = spells(system, trace(33, end_us=63))
    assert sum(spell.samples for spell in found) == 12
    assert found[0].state == "redo"
    assert found[0].discarded == 12


def test_without_a_steady_state_the_job_is_down_until_a_change_brings_one():
    system = Scripted((PolicyDecision(DOWN, (), Loss.STEP), PolicyDecision(STEP, (), Loss.NOTHING)))
    assert spell_rows(spells(system, trace(20, 30, end_us=50))) == [
        (0, 20, "train", "", 8),
        (20, 30, "down", "too few workers", 0),
        (30, 50, "train", "", 8),
    ]


def test_dropped_samples_are_distinguished_from_repeated_ones():
    found = spells(Scripted((PolicyDecision(STEP, (), Loss.STEP, drops_samples=True),)), trace(25, end_us=45))
    assert [(spell.cause, spell.discarded) for spell in found if spell.state == "redo"] == [("dropped", 2)]


STEADY_STATES = st.builds(
    SteadyState,
    step_us=st.integers(0, 30),
    samples=st.integers(0, 9),
    busy_share=st.floats(0, 1),
    checkpoint_every=st.integers(0, 4),
    checkpoint_us=st.integers(0, 20),
)
DECISIONS = st.builds(
    PolicyDecision,
    STEADY_STATES,
    st.lists(st.builds(Pause, st.sampled_from(["regroup", "plan"]), st.integers(1, 40)), max_size=3).map(tuple),
    st.sampled_from(Loss),
    keeps_unfinished=st.booleans(),
    drops_samples=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(DECISIONS, min_size=4, max_size=4), STEADY_STATES, st.lists(st.integers(0, 300), max_size=4), st.integers(1, 200))
def test_time_is_conserved_whatever_a_system_answers(answers, first, times, more):
    times = sorted(times)
    end_us = (times[-1] if times else 0) + more
    found = spells(Scripted(tuple(answers), PolicyDecision(first, state=0)), trace(*times, end_us=end_us))
    assert found[0].start_us == 0
    assert found[-1].end_us == end_us
    assert all(before.end_us == after.start_us for before, after in pairwise(found))
    assert all(0 <= spell.busy_us <= spell.length_us for spell in found)
    assert all(spell.samples == 0 or spell.state == "train" for spell in found)
    assert all(spell.discarded == 0 or spell.state == "redo" for spell in found)
