"""`RunState`: a run so far, with the state of every worker, updated event by event. Live views draw it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Changed, Event, Joining, Placed, Recovered, Spell, Stepped, Suspected
from recycle.report.record.live_facts import RunFacts, facts_after

ALIVE, DEAD, JOINING, SUSPECTED, STARTING = "alive", "dead", "joining", "suspected", "starting"
_MOST_RECOVERIES = 4
_MOST_PACES = 60


@dataclass(frozen=True, slots=True)
class StepPace:
    """The measured and the planned time of an iteration; the latter is 0 if it is not known."""

    took_us: int
    planned_us: int


@dataclass(frozen=True, slots=True)
class RunState:
    """A run so far. `places` has the state of the worker at each place of the shape, if there is a shape.

    `processes` has the host and the process id of the last worker at each place. `gone` are the workers that left and whose work
    no other worker has taken over yet. `carried` has the mean number of layers that each stage computes for a micro-batch, if
    layers are shared.
    """

    num_steps: int
    shape: Shape | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    processes: Mapping[str, str] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)
    first: Stepped | None = None
    spell: Spell | None = None
    paces: tuple[StepPace, ...] = ()
    gone: tuple[str, ...] = ()
    recoveries: tuple[Recovered, ...] = ()
    carried: tuple[float, ...] = ()

    @property
    def remaining_us(self) -> int | None:
        """The time that the rest takes at the mean speed so far; None before there is one."""
        first, last = self.first, self.facts.step
        if first is None or last is None or last.iteration <= first.iteration:
            return None
        each_us = (last.at_us - first.at_us) / (last.iteration - first.iteration)
        return round(each_us * (self.num_steps - self.facts.num_done))


def initial_state(
    num_steps: int, shape: Shape | None = None, dead: Iterable[Worker] = (), carried: tuple[float, ...] = ()
) -> RunState:
    dead = set(dead)
    workers = shape.workers() if shape else ()
    places = {str(worker): DEAD if worker in dead else STARTING for worker in workers}
    return RunState(num_steps, shape, places, carried=carried)


def state_after(state: RunState, event: Event) -> RunState:
    state = replace(state, facts=facts_after(state.facts, event))
    match event:
        case Spell(state="train"):
            return _with_pace(replace(state, spell=event))
        case Stepped():
            # A job that was set back to a checkpoint counts anew from there.
            first = event if state.first is None or event.iteration <= state.first.iteration else state.first
            # With the first step all have started; of later ones, thousands of places are not looked through.
            return _with_pace(replace(state if state.first else _started(state, *state.places), first=first))
        case Changed():
            return _after_change(state, event)
        case Placed():
            process = f"host {event.host}, pid {event.pid}"
            return replace(_started(state, event.node), processes={**state.processes, event.node: process})
        case Joining():
            return _with_places(state, {event.node: JOINING})
        case Suspected():
            return _with_places(state, {event.node: SUSPECTED})
        case Recovered():
            return _after_recovery(state, event)
        case _:
            return state


def _with_places(state: RunState, places: Mapping[str, str]) -> RunState:
    """The state with some places changed; names outside the shape are ignored."""
    known = {place: how for place, how in places.items() if place in state.places}
    return replace(state, places={**state.places, **known})


def _started(state: RunState, *names: str) -> RunState:
    """The state after those of these workers that were still to start have done so."""
    return _with_places(state, {name: ALIVE for name in names if state.places.get(name) == STARTING})


def _with_pace(state: RunState) -> RunState:
    """The state with the pace of its last step, once the spell of that step is known too; they come in either order."""
    spell, step = state.spell, state.facts.step
    if spell is None or step is None or spell.end_us != step.at_us:
        return state
    pace = StepPace(spell.length_us, step.planned_us)
    return replace(state, paces=(*state.paces, pace)[-_MOST_PACES:])


def _after_change(state: RunState, change: Changed) -> RunState:
    changed = _with_places(state, {change.node: ALIVE if change.joins else DEAD})
    gone = tuple(name for name in state.gone if name != change.node)
    return replace(changed, gone=gone if change.joins else (*gone, change.node))


def _after_recovery(state: RunState, recovered: Recovered) -> RunState:
    # A worker that left is marked already, and another may have its place by now.
    moved = recovered.emptied.difference(recovered.workers)
    return replace(
        _with_places(state, {**dict.fromkeys(moved, DEAD), **dict.fromkeys(recovered.filled, ALIVE)}),
        gone=tuple(name for name in state.gone if name not in recovered.workers),
        recoveries=(*state.recoveries, recovered)[-_MOST_RECOVERIES:],
        carried=recovered.carried or state.carried,
    )
