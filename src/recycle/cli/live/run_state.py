"""What the live view knows of a run: events in, facts out. `live_grid` draws them, `live` holds the terminal."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Changed, Event, Joining, Recovered, Saved, Spell, Stepped, Suspected
from recycle.core.units import format_us
from recycle.report.record.recoveries import describe_parts, describe_rest, who

ALIVE, DEAD, JOINING, SUSPECTED = "alive", "dead", "joining", "suspected"
_MOST_RECOVERIES = 4
_MOST_PACES = 60


@dataclass(frozen=True, slots=True)
class StepPace:
    """How long an iteration took, and what its plan says; 0 if that is not known."""

    took_us: int
    planned_us: int


@dataclass(frozen=True, slots=True)
class RunState:
    """A run so far. Without a shape there are no seats. `gone` are those who left, and whose work nobody has taken over yet."""

    num_steps: int
    shape: Shape | None = None
    seats: Mapping[str, str] = field(default_factory=dict)
    first: Stepped | None = None
    step: Stepped | None = None
    spell: Spell | None = None
    num_saved: int = 0
    paces: tuple[StepPace, ...] = ()
    gone: tuple[str, ...] = ()
    recoveries: tuple[Recovered, ...] = ()
    num_recoveries: int = 0
    lost_us: int = 0
    num_done: int = 0

    @property
    def remaining_us(self) -> int | None:
        """How long the rest takes at the mean speed so far; None before there is one."""
        if self.first is None or self.step is None or self.step.iteration <= self.first.iteration:
            return None
        each_us = (self.step.at_us - self.first.at_us) / (self.step.iteration - self.first.iteration)
        return round(each_us * (self.num_steps - self.num_done))


def initial_state(num_steps: int, shape: Shape | None = None, dead: Iterable[Worker] = ()) -> RunState:
    """What is known before the first event."""
    gone = set(dead)
    workers = shape.workers() if shape else ()
    return RunState(num_steps, shape, {str(worker): DEAD if worker in gone else ALIVE for worker in workers})


def state_after(state: RunState, event: Event) -> RunState:
    """What is known once `event` is."""
    match event:
        case Spell(state="train"):
            return _after_spell(state, event)
        case Stepped():
            return _after_step(state, event)
        case Saved():
            return replace(state, num_saved=event.num_steps)
        case Changed():
            return _after_change(state, event)
        case Joining():
            return _seated(state, {event.node: JOINING})
        case Suspected():
            return _seated(state, {event.node: SUSPECTED})
        case Recovered():
            return _after_recovery(state, event)
        case _:
            return state


def _seated(state: RunState, seats: Mapping[str, str]) -> RunState:
    """The same with other seats; a name that is none of the shape has no place in it."""
    known = {seat: how for seat, how in seats.items() if seat in state.seats}
    return replace(state, seats={**state.seats, **known})


def _after_spell(state: RunState, spell: Spell) -> RunState:
    """A spell and its step come in either order: whichever is second knows both."""
    spelled = replace(state, spell=spell)
    return _paced(spelled) if state.step is not None and state.step.at_us == spell.end_us else spelled


def _after_step(state: RunState, step: Stepped) -> RunState:
    # A job that went back to a checkpoint counts anew from there.
    first = step if state.first is None or step.iteration <= state.first.iteration else state.first
    stepped = replace(state, first=first, step=step, num_done=step.iteration + 1)
    return _paced(stepped) if state.spell is not None and state.spell.end_us == step.at_us else stepped


def _paced(state: RunState) -> RunState:
    assert state.spell is not None
    assert state.step is not None
    pace = StepPace(state.spell.length_us, state.step.planned_us)
    return replace(state, paces=(*state.paces, pace)[-_MOST_PACES:])


def _after_change(state: RunState, change: Changed) -> RunState:
    seated = _seated(state, {change.node: ALIVE if change.joins else DEAD})
    gone = tuple(name for name in state.gone if name != change.node)
    return replace(seated, gone=gone if change.joins else (*gone, change.node))


def _after_recovery(state: RunState, recovered: Recovered) -> RunState:
    # Who left was told when it did, and somebody may have its seat again by now.
    moved = recovered.emptied.difference(recovered.workers)
    return replace(
        _seated(state, {**dict.fromkeys(moved, DEAD), **dict.fromkeys(recovered.filled, ALIVE)}),
        gone=tuple(name for name in state.gone if name not in recovered.workers),
        recoveries=(*state.recoveries, recovered)[-_MOST_RECOVERIES:],
        num_recoveries=state.num_recoveries + 1,
        lost_us=state.lost_us + recovered.lost_us,
        num_done=min(state.num_done, recovered.iteration),  # a checkpoint may be far behind
    )


def describe_step(event: Stepped, spell: Spell | None) -> str:
    """A step in a line: its loss, and if its spell is known, its speed beside that of the plan."""
    parts = [f"loss {event.loss:.4f}" if event.loss is not None else "loss not finite"]
    if spell is not None and spell.length_us > 0:
        parts.append(f"{spell.samples * 1e6 / spell.length_us:.3g} samples/s")
        parts.append(f"iteration {format_us(spell.length_us)}")
        if event.planned_us:
            parts.append(f"{spell.length_us / event.planned_us:.2f} of the plan's")
    if event.scale is None:
        parts.append("skipped")
    return "  ".join(parts)


def describe_change(event: Event) -> str | None:
    """Say in a line who came, went or is suspected, or how training went on; None of other events."""
    match event:
        case Changed():
            return f"{event.node} {'joined' if event.joins else 'left'}: {event.num_live} workers are live"
        case Joining():
            return f"{event.node} is loading, and joins at the next iteration"
        case Suspected():
            return f"{event.node} is suspected, and will be fenced: {event.reason}"
        case Recovered():
            return (
                f"recovered, from step {event.iteration + 1} on: {who(event)} ({describe_rest(event)}); {describe_parts(event)}"
            )
        case _:
            return None
