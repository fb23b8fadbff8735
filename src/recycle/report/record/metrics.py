"""`recycle.measure`: the metrics of a run from its record alone: throughput, lost samples, time by use.

Every microsecond of the record lies in exactly one spell, so that the times add up to the total.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recycle.core.events.record import Changed, Event, Spell


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of a run, simulated or real.

    Attributes:
        total_us: The length of the run in µs, the sum of all other times.
        samples: Samples that were applied to the weights, each once.
        redone_samples: Samples whose work was lost and repeated.
        dropped_samples: Samples whose work was lost and not repeated.
        busy_us: Training time in which live workers computed, as the mean over workers.
        bubble_us: Training time in which live workers were idle, as the mean over workers.
        redo_us: Time of lost work.
        checkpoint_us: Time of regular checkpoints.
        downs_us: Time in which the system could not train, by cause, the longest first.
        pauses_us: Pauses of recoveries, by cause, the longest first.
        num_failures: Workers that left.
        num_joins: Workers that joined.
    """

    total_us: int
    samples: int
    redone_samples: int
    dropped_samples: int
    busy_us: int
    bubble_us: int
    redo_us: int
    checkpoint_us: int
    downs_us: dict[str, int]
    pauses_us: dict[str, int]
    num_failures: int
    num_joins: int

    @property
    def throughput(self) -> float:
        """Applied samples per second, over the whole run."""
        return self.samples * 1e6 / self.total_us

    @property
    def down_us(self) -> int:
        return sum(self.downs_us.values())

    @property
    def pause_us(self) -> int:
        return sum(self.pauses_us.values())

    @property
    def train_us(self) -> int:
        return self.busy_us + self.bubble_us

    @property
    def bubble_share(self) -> float:
        """The share of the training time in which live workers were idle."""
        return self.bubble_us / self.train_us if self.train_us else 0.0

    def share_of(self, rate: float) -> float:
        """The throughput as a share of `rate`, in samples per second."""
        return self.throughput / rate

    def to_json(self) -> dict[str, Any]:
        return {
            "throughput": round(self.throughput, 6),
            "samples": self.samples,
            "lost_samples": self.redone_samples + self.dropped_samples,
            "redone_samples": self.redone_samples,
            "dropped_samples": self.dropped_samples,
            "bubble_share": round(self.bubble_share, 6),
            "time_us": {
                "total": self.total_us,
                "busy": self.busy_us,
                "bubble": self.bubble_us,
                "redo": self.redo_us,
                "checkpoint": self.checkpoint_us,
                "pause": self.pause_us,
                "down": self.down_us,
            },
            "pauses_us": self.pauses_us,
            "downs_us": self.downs_us,
            "failures": self.num_failures,
            "joins": self.num_joins,
        }


def measure(record: Iterable[Event]) -> Metrics:
    """Return the metrics of a recorded run.

    Args:
        record: The events of a run, from `recycle.simulate` or from the `record.jsonl` of a training run. Only `Spell` and
            `Changed` events are used.

    Returns:
        The metrics: throughput, samples that were lost, time by use, failures and joins.

    Example:
        >>> from recycle.core.events.record import Changed, Spell
        >>> metrics = measure([
        ...     Spell(0, 8_000_000, "train", samples=80, busy_us=6_000_000, num_live=4),
        ...     Changed(8_000_000, "W0_0", False, 3),
        ...     Spell(8_000_000, 10_000_000, "pause", "regroup"),
        ... ])
        >>> metrics.throughput, metrics.bubble_share, metrics.pauses_us, metrics.num_failures
        (8.0, 0.25, {'regroup': 2000000}, 1)
    """
    events = list(record)
    spells = [event for event in events if isinstance(event, Spell)]
    changes = [event for event in events if isinstance(event, Changed)]
    time = {state: sum(s.length_us for s in spells if s.state == state) for state in ("train", "redo", "checkpoint")}
    busy_us = sum(spell.busy_us for spell in spells if spell.state == "train")
    return Metrics(
        total_us=sum(spell.length_us for spell in spells),
        samples=sum(spell.samples for spell in spells),
        redone_samples=sum(spell.discarded for spell in spells if spell.cause != "dropped"),
        dropped_samples=sum(spell.discarded for spell in spells if spell.cause == "dropped"),
        busy_us=busy_us,
        bubble_us=time["train"] - busy_us,
        redo_us=time["redo"],
        checkpoint_us=time["checkpoint"],
        downs_us=_by_cause(spells, "down"),
        pauses_us=_by_cause(spells, "pause"),
        num_failures=sum(not change.joins for change in changes),
        num_joins=sum(change.joins for change in changes),
    )


def _by_cause(spells: list[Spell], state: str) -> dict[str, int]:
    """The time in `state` by cause, the longest first."""
    found: dict[str, int] = {}
    for spell in spells:
        if spell.state == state:
            found[spell.cause] = found.get(spell.cause, 0) + spell.length_us
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def throughput_over_time(record: Iterable[Event], num_bins: int) -> list[tuple[float, float]]:
    """Return (hours, samples per second) for equal parts of the run; a spell's samples are spread evenly over it."""
    spells = [event for event in record if isinstance(event, Spell)]
    end_us = max((spell.end_us for spell in spells), default=0)
    width = end_us / num_bins
    filled = [0.0] * num_bins
    for spell in spells:
        if spell.samples and spell.length_us:
            rate = spell.samples / spell.length_us
            first, last = int(spell.start_us / width), min(num_bins - 1, int(spell.end_us / width))
            for number in range(first, last + 1):
                overlap = min(spell.end_us, (number + 1) * width) - max(spell.start_us, number * width)
                filled[number] += rate * max(0.0, overlap)
    return [((number + 0.5) * width / 3.6e9, value * 1e6 / width) for number, value in enumerate(filled)]
