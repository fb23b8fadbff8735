"""`simulate_trace`: one training system over one failure trace, as a record. It keeps time and accounts; the system decides.

Every microsecond is in exactly one spell.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from msgspec import structs

from recycle.core.cluster import Shape
from recycle.core.events.record import Changed, Event, Spell
from recycle.core.events.trace import Trace
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.policy import DOWN, ChangeKind, Loss, MembershipChange, Pause, PolicyDecision, System


def simulate_trace(system: System, trace: Trace, shape: Shape, ready_us: int = 0, hang_us: int = 0) -> list[Event]:
    """Return the record of `system` from the start to the end of `trace`.

    An added node is used `ready_us` later. If a worker hangs, the job stands still for `hang_us` before the system answers.
    """
    changes = membership_changes(trace, shape, ready_us, hang_us)
    first = next(changes)
    job = _JobTimeline(first.members.num_live)
    decision = system.begin(first.members)
    job.apply(decision)
    members = first.members
    for change in chain(changes, [None]):
        until_us = change.at_us if change else trace.end_us
        while decision.review_us and job.now_us + decision.review_us < until_us:
            job.advance(job.now_us + decision.review_us)
            decision = system.change(MembershipChange(job.now_us, members, kind=ChangeKind.REVIEW), decision.state)
            job.apply(decision)
        job.advance(until_us)
        if change:
            members = change.members
            decision = system.change(change, decision.state)
            if change.hangs and hang_us and not job.is_down:
                decision = replace(decision, pauses=(Pause("hang", hang_us), *decision.pauses))
            job.num_live = members.num_live
            job.apply(decision)
    return [*_changed_events(trace), *job.finish()]


def _changed_events(trace: Trace) -> Iterator[Changed]:
    num_live = len(trace.initial)
    for change in trace.later:
        num_live += 1 if change.joins else -1
        yield Changed(change.at_us, change.node, change.joins, num_live)


class _JobTimeline:
    """The present time and state of the job, and its spells so far.

    `_uncommitted` are the spells since the last complete checkpoint: a roll-back turns them into discarded work.
    """

    def __init__(self, num_live: int) -> None:
        self.now_us = 0
        self.num_live = num_live
        self._steady_state = DOWN
        self._next: PolicyDecision | None = None  # takes effect when the step in flight ends
        self._reason_down = ""
        self._pauses: list[Pause] = []
        self._in_step_us = 0
        self._delay_us = 0  # by which the step in flight takes longer than those of the steady state
        self._slowdown = 1.0  # of the step in flight
        self._in_checkpoint_us = 0
        self._steps_since_checkpoint = 0
        self._committed: list[Spell] = []
        self._uncommitted: list[Spell] = []

    @property
    def is_down(self) -> bool:
        return self._steady_state.is_down

    @property
    def _has_unsaved_work(self) -> bool:
        """Whether there is anything that a checkpoint would save: steps since the last one, or the step in flight."""
        return bool(self._in_step_us) or any(spell.state == "train" for spell in self._uncommitted)

    def apply(self, decision: PolicyDecision) -> None:
        """Discard the work that the decision loses, and switch to its pauses and its steady state."""
        unfinished = self._pauses if decision.keeps_unfinished else []
        is_saved = decision.secures and not self._has_unsaved_work
        pauses = [pause for pause in decision.pauses if not (is_saved and pause.cause == "checkpoint")]
        self._pauses = [*pauses, *unfinished]
        if decision.loses is Loss.NOTHING and self._in_step_us and not self._steady_state.is_down:
            self._slow_step(decision.slows_step)
            self._next = decision
            return
        if decision.loses is Loss.SINCE_CHECKPOINT:
            self._roll_back(decision)
        self._lose_step(decision)
        self._switch_to(decision)

    def advance(self, to_us: int) -> None:
        while self.now_us < to_us:
            if self._pauses and self._next is None:
                self._pause(to_us)
            elif self._steady_state.is_down:
                self._add(to_us, "down", self._reason_down)
            else:
                self._train(to_us)

    def finish(self) -> list[Spell]:
        """Return all spells, equal neighbours merged. A step that the end cuts short has taken time and adds no samples."""
        self._add_train(num_steps=0)
        return _merged([*self._committed, *self._uncommitted])

    def _pause(self, to_us: int) -> None:
        pause, *later = self._pauses
        end_us = min(to_us, self.now_us + pause.time_us)
        left_us = pause.time_us - (end_us - self.now_us)
        self._pauses = [Pause(pause.cause, left_us), *later] if left_us else later
        self._add(end_us, "pause", pause.cause)

    def _train(self, to_us: int) -> None:
        """Run whole steps up to the next decision, checkpoint or `to_us`; else the checkpoint, or the beginning of a step."""
        step_us, every = self._steady_state.step_us + self._delay_us, self._steady_state.checkpoint_every
        if every and self._steps_since_checkpoint >= every:
            self._checkpoint(to_us)
            return
        most = every - self._steps_since_checkpoint if every else 1 << 60
        num_steps = min(1 if self._next else most, (self._in_step_us + to_us - self.now_us) // step_us)
        if num_steps:
            self.now_us += num_steps * step_us - self._in_step_us
            self._in_step_us = num_steps * step_us
            self._add_train(num_steps)
            self._steps_since_checkpoint += num_steps
            if not every:
                self._commit()
            if self._next:
                self._switch_to(self._next)
                self._next = None
        else:
            self._in_step_us += to_us - self.now_us
            self.now_us = to_us

    def _slow_step(self, slowdown: float) -> None:
        """Let the rest of the step in flight take `slowdown` times as long as usual, unless it does already."""
        if slowdown > self._slowdown:
            rest_us = self._steady_state.step_us + self._delay_us - self._in_step_us
            self._delay_us += round(rest_us * (slowdown / self._slowdown - 1))
            self._slowdown = slowdown

    def _add_train(self, num_steps: int) -> None:
        """Record the time since the last spell, in which so many steps were completed."""
        length_us, self._in_step_us = self._in_step_us, 0
        if length_us:
            busy_us = round(length_us * self._steady_state.busy_share)
            samples = num_steps * self._steady_state.samples
            spell = Spell(self.now_us - length_us, self.now_us, "train", "", samples, 0, busy_us, self.num_live)
            self._uncommitted.append(spell)

    def _checkpoint(self, to_us: int) -> None:
        """Write a checkpoint; only a complete one commits the steps before it."""
        end_us = min(to_us, self.now_us + self._steady_state.checkpoint_us - self._in_checkpoint_us)
        self._in_checkpoint_us += end_us - self.now_us
        self._add(end_us, "checkpoint")
        if self._in_checkpoint_us == self._steady_state.checkpoint_us:
            self._commit()

    def _commit(self) -> None:
        self._committed += self._uncommitted
        self._uncommitted = []
        self._steps_since_checkpoint = self._in_checkpoint_us = 0

    def _roll_back(self, decision: PolicyDecision) -> None:
        cause = "dropped" if decision.drops_samples else "rolled back"
        self._committed += [_discarded(spell, cause) for spell in self._uncommitted]
        self._uncommitted = []
        self._steps_since_checkpoint = 0

    def _lose_step(self, decision: PolicyDecision) -> None:
        """Record the step in flight as discarded, with the share of its samples that it had time for."""
        if self._in_step_us:
            num_samples = self._steady_state.samples * self._in_step_us // (self._steady_state.step_us + self._delay_us)
            cause = "dropped" if decision.drops_samples else "step in flight"
            start_us = self.now_us - self._in_step_us
            self._uncommitted.append(Spell(start_us, self.now_us, "redo", cause, 0, num_samples, 0, self.num_live))
            self._in_step_us = 0
        # A change that loses nothing does not interrupt a checkpoint, if checkpoints take the same time after it.
        if decision.loses is not Loss.NOTHING or decision.steady_state.checkpoint_us != self._steady_state.checkpoint_us:
            self._in_checkpoint_us = 0
        self._next = None

    def _switch_to(self, decision: PolicyDecision) -> None:
        if decision.secures or decision.steady_state.checkpoint_every == 0:
            self._commit()
        self._steady_state, self._reason_down = decision.steady_state, decision.reason or "too few workers"
        self._delay_us, self._slowdown = 0, decision.steady_state.slowdown

    def _add(self, end_us: int, state: str, cause: str = "") -> None:
        if end_us > self.now_us:
            self._uncommitted.append(Spell(self.now_us, end_us, state, cause, num_live=self.num_live))
        self.now_us = end_us


def _discarded(spell: Spell, cause: str) -> Spell:
    """The same time with all its work discarded."""
    if spell.state not in ("train", "checkpoint"):
        return spell
    return structs.replace(spell, state="redo", cause=cause, samples=0, discarded=spell.samples + spell.discarded, busy_us=0)


def _merged(spells: list[Spell]) -> list[Spell]:
    """Merge neighbours of one state, cause and number of live nodes."""
    merged: list[Spell] = []
    for spell in sorted(spells, key=lambda spell: spell.start_us):
        last = merged[-1] if merged else None
        if last and (last.state, last.cause, last.num_live) == (spell.state, spell.cause, spell.num_live):
            merged[-1] = structs.replace(
                last,
                end_us=spell.end_us,
                samples=last.samples + spell.samples,
                discarded=last.discarded + spell.discarded,
                busy_us=last.busy_us + spell.busy_us,
            )
        else:
            merged.append(spell)
    return merged
