"""The course: one system through one trace, as a record. It keeps the clock and the books; the system only gives verdicts.

Nothing happens between two changes but steps, checkpoints and pauses of known length, so that a month of training takes as long
to compute as its changes, not as its steps. Every microsecond ends up in exactly one spell.
"""

from collections.abc import Iterator

from recycle.core.cluster import Shape
from recycle.core.events.record import Changed, Event, Spell
from recycle.core.events.trace import Trace
from recycle.sim.campaign import placement as seats
from recycle.sim.policy import DOWN, Loss, Pause, PolicyDecision, System


def simulate_trace(system: System, trace: Trace, shape: Shape, ready_us: int = 0) -> list[Event]:
    """Return what `system` does from the start to the end of `trace`, every microsecond in one spell."""
    happenings = seats.events(trace, shape, ready_us)
    first = next(happenings)
    books = _Books(first.members.num_live)
    verdict = system.begin(first.members)
    books.obey(verdict)
    for event in happenings:
        books.advance(event.at_us)
        verdict = system.change(event, verdict.state)
        books.num_live = event.members.num_live
        books.obey(verdict)
    books.advance(trace.end_us)
    return [*_changes(trace), *books.close()]


def _changes(trace: Trace) -> Iterator[Changed]:
    num_live = len(trace.initial)
    for change in trace.later:
        num_live += 1 if change.joins else -1
        yield Changed(change.at_us, change.node, change.joins, num_live)


class _Books:
    """The clock, what the job is doing, and the spells so far.

    `_unsafe` are the spells since the last complete checkpoint: a roll-back turns them into work that was thrown away.
    """

    def __init__(self, num_live: int) -> None:
        self.now_us = 0
        self.num_live = num_live
        self._regime = DOWN
        self._next: PolicyDecision | None = None  # takes over when the step in flight ends
        self._why_down = ""
        self._pauses: list[Pause] = []
        self._in_step_us = 0
        self._in_checkpoint_us = 0
        self._steps_since_checkpoint = 0
        self._safe: list[Spell] = []
        self._unsafe: list[Spell] = []

    def obey(self, verdict: PolicyDecision) -> None:
        """Throw away what the verdict says is lost, and take up its pauses and its regime."""
        unfinished = self._pauses if verdict.keeps_unfinished else []
        self._pauses = [*verdict.pauses, *unfinished]
        if verdict.loses is Loss.NOTHING and self._in_step_us and not self._regime.is_down:
            self._next = verdict
            return
        if verdict.loses is Loss.SINCE_CHECKPOINT:
            self._roll_back(verdict)
        self._lose_step(verdict)
        self._take_up(verdict)

    def advance(self, to_us: int) -> None:
        """Live on until `to_us`."""
        while self.now_us < to_us:
            if self._next is not None:
                self._finish_step(to_us)
            elif self._pauses:
                self._sit_out(to_us)
            elif self._regime.is_down:
                self._add(to_us, "down", self._why_down)
            else:
                self._train(to_us)

    def close(self) -> list[Spell]:
        """Return all spells, those of equal nature joined. A step that the end cuts short has taken time and adds nothing."""
        self._add_train(self.now_us, num_steps=0)
        return _joined([*self._safe, *self._unsafe])

    def _finish_step(self, to_us: int) -> None:
        assert self._next is not None
        left_us = self._regime.step_us - self._in_step_us
        end_us = min(to_us, self.now_us + left_us)
        self._in_step_us += end_us - self.now_us
        self.now_us = end_us
        if self._in_step_us == self._regime.step_us:
            self._complete(1)
            self._take_up(self._next)
            self._next = None

    def _sit_out(self, to_us: int) -> None:
        pause = self._pauses[0]
        end_us = min(to_us, self.now_us + pause.time_us)
        left_us = pause.time_us - (end_us - self.now_us)
        self._pauses = [Pause(pause.cause, left_us), *self._pauses[1:]] if left_us else self._pauses[1:]
        self._add(end_us, "pause", pause.cause)

    def _train(self, to_us: int) -> None:
        """Run whole steps up to the next checkpoint or `to_us`, then the checkpoint, or the beginning of a step."""
        regime, every = self._regime, self._regime.checkpoint_every
        if every and self._steps_since_checkpoint >= every:
            self._checkpoint(to_us)
            return
        wanted = every - self._steps_since_checkpoint if every else 1 << 60
        num_steps = min(wanted, (self._in_step_us + to_us - self.now_us) // regime.step_us)
        if num_steps:
            self.now_us += num_steps * regime.step_us - self._in_step_us
            self._in_step_us = num_steps * regime.step_us
            self._complete(num_steps)
        elif self.now_us < to_us:
            self._in_step_us += to_us - self.now_us
            self.now_us = to_us

    def _complete(self, num_steps: int) -> None:
        """Book `num_steps` steps that end now."""
        self._add_train(self.now_us, num_steps)
        self._steps_since_checkpoint += num_steps
        if not self._regime.checkpoint_every:
            self._secure()

    def _add_train(self, end_us: int, num_steps: int) -> None:
        """Book the time since the last spell, in which so many steps were completed."""
        start_us, self._in_step_us = end_us - self._in_step_us, 0
        regime = self._regime
        if end_us > start_us:
            busy_us = round((end_us - start_us) * regime.busy_share)
            spell = Spell(start_us, end_us, "train", "", num_steps * regime.samples, 0, busy_us, self.num_live)
            self._unsafe.append(spell)

    def _checkpoint(self, to_us: int) -> None:
        """Write a checkpoint; only a whole one makes the steps before it safe."""
        left_us = self._regime.checkpoint_us - self._in_checkpoint_us
        end_us = min(to_us, self.now_us + left_us)
        self._in_checkpoint_us += end_us - self.now_us
        self._add(end_us, "checkpoint")
        if self._in_checkpoint_us == self._regime.checkpoint_us:
            self._secure()

    def _secure(self) -> None:
        self._safe += self._unsafe
        self._unsafe = []
        self._steps_since_checkpoint = self._in_checkpoint_us = 0

    def _roll_back(self, verdict: PolicyDecision) -> None:
        cause = "dropped" if verdict.drops_samples else "rolled back"
        self._safe += [_wasted(spell, cause) for spell in self._unsafe]
        self._unsafe = []
        self._steps_since_checkpoint = 0

    def _lose_step(self, verdict: PolicyDecision) -> None:
        """Book the step in flight as thrown away, as many of its samples as it had time for."""
        if self._in_step_us:
            num_samples = self._regime.samples * self._in_step_us // self._regime.step_us
            cause = "dropped" if verdict.drops_samples else "step in flight"
            start_us = self.now_us - self._in_step_us
            self._unsafe.append(Spell(start_us, self.now_us, "redo", cause, 0, num_samples, 0, self.num_live))
            self._in_step_us = 0
        # A change that loses nothing lets a checkpoint go on, if it is the same one after it.
        if verdict.loses is not Loss.NOTHING or verdict.regime.checkpoint_us != self._regime.checkpoint_us:
            self._in_checkpoint_us = 0
        self._next = None

    def _take_up(self, verdict: PolicyDecision) -> None:
        if verdict.secures or verdict.regime.checkpoint_every == 0:
            self._secure()
        self._regime, self._why_down = verdict.regime, verdict.reason or "too few workers"

    def _add(self, end_us: int, state: str, cause: str = "") -> None:
        if end_us > self.now_us:
            self._unsafe.append(Spell(self.now_us, end_us, state, cause, num_live=self.num_live))
        self.now_us = end_us


def _wasted(spell: Spell, cause: str) -> Spell:
    """The same time, but its work came to nothing."""
    if spell.state not in ("train", "checkpoint"):
        return spell
    return Spell(spell.start_us, spell.end_us, "redo", cause, 0, spell.samples + spell.discarded, 0, spell.num_live)


def _joined(spells: list[Spell]) -> list[Spell]:
    """Join neighbours of one state, cause and number of live nodes."""
    made: list[Spell] = []
    for spell in sorted(spells, key=lambda spell: spell.start_us):
        before = made[-1] if made else None
        if before and (before.state, before.cause, before.num_live) == (spell.state, spell.cause, spell.num_live):
            made[-1] = Spell(
                before.start_us,
                spell.end_us,
                spell.state,
                spell.cause,
                before.samples + spell.samples,
                before.discarded + spell.discarded,
                before.busy_us + spell.busy_us,
                spell.num_live,
            )
        else:
            made.append(spell)
    return made
