"""`RunFacts`: the latest numbers of a run (loss, throughput, live workers, lost time); `facts_after` adds one event."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from recycle.core.events.record import (
    PARTS,
    Changed,
    Event,
    Held,
    LinkChanged,
    Placed,
    Recovered,
    Saved,
    SpeedChanged,
    Spell,
    Stepped,
    Warned,
)
from recycle.core.events.step_rates import iteration_us, samples_per_s


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The numbers of a run so far. Counters begin at 0; every other number is None until an event contains it.

    `num_done` steps are done. After a rollback to a checkpoint, the next `num_again` steps are done for the second time; their
    samples were counted the first time and are not counted again, so that no counter ever falls. `hosts` has the machine of each
    worker, and `is_up` whether it is alive. `speeds` are those of workers that are not as fast as their peers. `links`
    has the last news of each link that was ever slow, if both its workers are still there.
    """

    step: Stepped | None = None
    iteration_us: int | None = None
    samples_per_s: float | None = None
    num_live: int | None = None
    checkpoint: Saved | None = None
    num_done: int = 0
    num_again: int = 0
    num_samples: int = 0
    num_discarded: int = 0
    num_skipped: int = 0
    num_warnings: int = 0
    num_recoveries: int = 0
    lost_us: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    state_us: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    is_up: Mapping[str, bool] = field(default_factory=dict)
    speeds: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, LinkChanged] = field(default_factory=dict)

    @property
    def slow_links(self) -> dict[str, LinkChanged]:
        return {name: link for name, link in self.links.items() if link.speed < 1}


def facts_after(facts: RunFacts, event: Event) -> RunFacts:
    """The facts of the run after `event`."""
    match event:
        case Stepped():
            return _after_step(facts, event)
        case Spell():
            return _after_spell(facts, event)
        case Changed():
            speeds = {node: speed for node, speed in facts.speeds.items() if node != event.node}
            links = {name: link for name, link in facts.links.items() if event.node not in name.split("-")}
            changed = replace(facts, num_live=event.num_live, speeds=speeds, links=links)
            return replace(changed, is_up={**facts.is_up, event.node: event.joins})
        case SpeedChanged():
            return replace(facts, speeds={**facts.speeds, event.node: event.speed})
        case LinkChanged():
            return replace(facts, links={**facts.links, event.link: event})
        case Placed():
            # One that joins later is up when the epoch with it begins.
            is_up = facts.is_up if facts.num_recoveries else {**facts.is_up, event.node: True}
            return replace(facts, hosts={**facts.hosts, event.node: event.host}, is_up=is_up)
        case Recovered():
            return _after_recovery(facts, event)
        case Held():
            return replace(facts, held={**facts.held, event.worker: event})
        case Saved():
            return replace(facts, checkpoint=event)
        case Warned():
            return replace(facts, num_warnings=facts.num_warnings + 1)
        case _:
            return facts


def _after_step(facts: RunFacts, step: Stepped) -> RunFacts:
    took_us = iteration_us(facts.step, step)
    return replace(
        facts,
        step=step,
        num_done=step.iteration + 1,
        iteration_us=facts.iteration_us if took_us is None else took_us,
        num_skipped=facts.num_skipped + (step.scale is None),
    )


def _after_spell(facts: RunFacts, spell: Spell) -> RunFacts:
    rate = samples_per_s(spell)
    is_again = spell.state == "train" and facts.num_again > 0
    return replace(
        facts,
        samples_per_s=facts.samples_per_s if rate is None else rate,
        num_live=spell.num_live or facts.num_live,  # 0: a spell without a count of workers
        num_again=facts.num_again - is_again,
        num_samples=facts.num_samples + (0 if is_again else spell.samples),
        num_discarded=facts.num_discarded + spell.discarded + (spell.samples if is_again else 0),
        state_us={**facts.state_us, spell.state: facts.state_us.get(spell.state, 0) + spell.length_us},
    )


def _after_recovery(facts: RunFacts, recovered: Recovered) -> RunFacts:
    return replace(
        facts,
        num_live=recovered.num_live or facts.num_live,
        num_done=min(facts.num_done, recovered.iteration),
        num_again=facts.num_again + max(0, facts.num_done - recovered.iteration),
        num_recoveries=facts.num_recoveries + 1,
        is_up={**facts.is_up, **dict.fromkeys(recovered.emptied, False), **dict.fromkeys(recovered.filled, True)},
        lost_us={part: facts.lost_us[part] + time_us for part, time_us in recovered.parts_us.items()},
    )
