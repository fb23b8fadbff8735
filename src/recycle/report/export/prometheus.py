"""A run as Prometheus asks for it: the events so far, as numbers in its text format (version 0.0.4).

`facts_after` is pure: facts and an event in, facts out. `Gauges` only holds the newest facts, in one reference, so that
one thread may ask for the text while another takes in events, and sees no half of an event. What is not known yet
is left out; a loss that is not finite is NaN.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from recycle.core.events.record import PARTS, Changed, Event, Held, Recovered, Saved, Spell, Stepped, Warned

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run. Counters begin at 0; anything else is None until an event tells it.

    `num_done` steps are done, and the next `num_again` were done before all went back to a checkpoint. A counter never falls: the
    samples of those were counted then, and are not counted again.
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


def facts_after(facts: RunFacts, event: Event) -> RunFacts:
    """What is known once `event` is."""
    match event:
        case Stepped():
            return _after_step(facts, event)
        case Spell():
            return _after_spell(facts, event)
        case Changed():
            return replace(facts, num_live=event.num_live)
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


def iteration_us(before: Stepped | None, step: Stepped) -> int | None:
    """The time between the ends of an iteration and the next one, with all pauses in it; None if they are not neighbours."""
    if before is None or step.iteration != before.iteration + 1:
        return None
    return step.at_us - before.at_us


def samples_per_s(spell: Spell) -> float | None:
    """The throughput in a spell of training; None for a spell in which no sample was applied."""
    if spell.state != "train" or not spell.samples or spell.length_us <= 0:
        return None
    return spell.samples * 1e6 / spell.length_us


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
        num_live=spell.num_live or facts.num_live,  # 0 is a spell in which nobody counted
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
        lost_us={part: facts.lost_us[part] + time_us for part, time_us in recovered.parts_us.items()},
    )


class Gauges:
    """What a run has told so far. One thread may hear events; any may ask for the text."""

    def __init__(self) -> None:
        self._facts = RunFacts()

    def hear(self, event: Event) -> None:
        """Take in an event of the record."""
        self._facts = facts_after(self._facts, event)

    def text(self) -> str:
        """All that is known, in Prometheus' text format."""
        return "".join(map(_family, _metrics(self._facts)))


@dataclass(frozen=True, slots=True)
class _Metric:
    """One name with its values, by what stands in the braces behind it."""

    name: str
    kind: str
    about: str
    values: Mapping[str, float]


def _metrics(facts: RunFacts) -> Iterator[_Metric]:
    """Every metric that there is; one without values is not known yet."""
    if facts.step is not None:
        yield _gauge("step", "Steps done since the run first began.", facts.step.iteration + 1)
        yield _gauge("loss", "Mean loss of the last step; NaN if it is not finite.", _number(facts.step.loss))
        yield _gauge("gradient_norm", "Global norm of the last gradient; NaN if it is not finite.", _number(facts.step.norm))
    yield _counter("samples_total", "Samples applied for good.", facts.num_samples)
    yield _counter("discarded_samples_total", "Samples worked on in vain.", facts.num_discarded)
    yield _gauge("samples_per_second", "Throughput of the last spell of training.", facts.samples_per_s)
    took_s = None if facts.iteration_us is None else facts.iteration_us / 1e6
    yield _gauge("iteration_seconds", "Time between the ends of the last two steps, pauses included.", took_s)
    yield _gauge("live_workers", "Workers that are alive.", facts.num_live)
    yield _counter("recoveries_total", "Times that training went on after workers left or joined.", facts.num_recoveries)
    lost = {_labels("part", part): time_us / 1e6 for part, time_us in facts.lost_us.items()}
    yield _Metric("recycle_lost_seconds_total", "counter", "Time lost to recoveries, by what it was lost to.", lost)
    yield _counter("skipped_steps_total", "Steps that changed nothing, because their gradient was not finite.", facts.num_skipped)
    if facts.checkpoint is not None:
        yield _gauge("checkpoint_step", "Steps in the newest checkpoint.", facts.checkpoint.num_steps)
        yield _gauge("checkpoint_bytes", "Size of the newest checkpoint.", facts.checkpoint.size_bytes)
    yield _counter("warnings_total", "Warnings.", facts.num_warnings)
    states = {_labels("state", state): spent_us / 1e6 for state, spent_us in facts.state_us.items()}
    yield _Metric(
        "recycle_state_seconds_total", "counter", "Time spent training, in redoing, checkpoints, pauses and down.", states
    )
    yield _memory(facts, "memory", "Most that the process of a worker held.", "peak_bytes")
    yield _memory(facts, "activation", "Most that the activations of a worker took.", "activation_bytes")
    yield _memory(facts, "planned_activation", "Most that they take by the plan's memory model.", "planned_bytes")


def _gauge(name: str, about: str, value: float | None) -> _Metric:
    return _Metric(f"recycle_{name}", "gauge", about, {} if value is None else {"": value})


def _counter(name: str, about: str, value: float) -> _Metric:
    return _Metric(f"recycle_{name}", "counter", about, {"": value})


def _memory(facts: RunFacts, name: str, about: str, key: str) -> _Metric:
    values = {_labels("worker", worker): getattr(held, key) for worker, held in facts.held.items()}
    return _Metric(f"recycle_worker_{name}_bytes", "gauge", about, values)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _labels(name: str, value: str) -> str:
    """A label as the format writes it."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{{name}="{escaped}"}}'


def _family(metric: _Metric) -> str:
    """The lines of one metric; none where nothing is known."""
    if not metric.values:
        return ""
    head = f"# HELP {metric.name} {metric.about}\n# TYPE {metric.name} {metric.kind}\n"
    return head + "".join(f"{metric.name}{labels} {_value(value)}\n" for labels, value in metric.values.items())


def _value(value: float) -> str:
    """A number as the format writes it, which knows NaN and infinities by its own names."""
    if isinstance(value, int) or math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
