"""Events of a record as deliveries: the calls of callbacks, each with a number by which it is known to be new or old."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from recycle.core.errors import FileProblem
from recycle.core.events.record import Evaluated, Event, Recovered, Saved, Spell, Stepped
from recycle.core.events.step_rates import iteration_us, samples_per_s
from recycle.core.files import read_json, write_text
from recycle.runtime.callbacks.protocol import StepMetrics

STEP, EVALUATE, RECOVERY, CHECKPOINT = "step", "evaluate", "recovery", "checkpoint"
_FORMAT, _VERSION = "recycle-logger", 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call of a callback: of its method `on_<kind>`, with `value`. Later deliveries of a kind have higher numbers."""

    kind: str
    number: int
    value: StepMetrics | Evaluated | Recovered | Saved


class DeliveryStream:
    """Turns events into deliveries. It remembers the step and the spell before, from which the rates of a step follow."""

    def __init__(self) -> None:
        self._step: Stepped | None = None
        self._spell: Spell | None = None

    def add(self, event: Event) -> Delivery | None:
        """The delivery of an event; None for an event of which callbacks hear nothing."""
        match event:
            case Spell():
                self._spell = event if samples_per_s(event) is not None else self._spell
            case Stepped():
                before, self._step = self._step, event
                return Delivery(STEP, event.iteration + 1, self._metrics(event, iteration_us(before, event)))
            case Evaluated():
                return Delivery(EVALUATE, event.num_steps, event)
            case Recovered():  # their times never fall, also when a run is resumed
                return Delivery(RECOVERY, event.end_us, event)
            case Saved():
                return Delivery(CHECKPOINT, event.num_steps, event)
            case _:
                pass
        return None

    def _metrics(self, step: Stepped, took_us: int | None) -> StepMetrics:
        spell, self._spell = self._spell, None
        is_of_step = spell is not None and spell.start_us < step.at_us <= spell.end_us
        rate = samples_per_s(spell) if spell is not None and is_of_step else None
        took_s = None if took_us is None else took_us / 1e6
        return StepMetrics(step.iteration + 1, step.loss, step.norm, step.scale, took_s, rate)


def deliveries_of(events: Iterable[Event]) -> Iterator[Delivery]:
    stream = DeliveryStream()
    return (made for event in events if (made := stream.add(event)) is not None)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The number of the last delivery of each kind, 0 if there was none."""

    step: int = 0
    evaluate: int = 0
    recovery: int = 0
    checkpoint: int = 0

    def is_before(self, delivery: Delivery) -> bool:
        return bool(delivery.number > getattr(self, delivery.kind))

    def after(self, delivery: Delivery) -> "Cursor":
        return replace(self, **{delivery.kind: delivery.number})

    def rewound(self, num_steps: int) -> "Cursor":
        """The cursor of somebody who has forgotten all later steps than this."""
        counts = {kind: min(getattr(self, kind), num_steps) for kind in (STEP, EVALUATE, CHECKPOINT)}
        return replace(self, **counts)

    def save(self, path: Path) -> None:
        numbers = {kind: getattr(self, kind) for kind in (STEP, EVALUATE, RECOVERY, CHECKPOINT)}
        write_text(path, json.dumps({"format": _FORMAT, "version": _VERSION, **numbers}) + "\n")

    @staticmethod
    def load(path: Path) -> "Cursor":
        """The cursor in a file; one that has got nothing if there is no such file.

        Raises:
            FileProblem: The file is not one of ours.
        """
        if not path.exists():
            return Cursor()
        found = read_json(path, _FORMAT, _VERSION)
        numbers = [found.get(kind) for kind in (STEP, EVALUATE, RECOVERY, CHECKPOINT)]
        known = [number for number in numbers if type(number) is int and number >= 0]
        if len(known) < len(numbers):
            raise FileProblem(f"{path} does not say what was logged: remove it, and everything is logged again")
        return Cursor(*known)
