"""A measured cluster in tables: what an iteration took by each variant, what was predicted, and whether it is what was asked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

Rows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a variant's iteration was to take, in µs: by its ops alone, with links, with their crowd, with uneven workers."""

    ops_us: float
    links_us: float
    crowded_us: float
    uneven_us: float


How = Callable[[Prediction], float]
"""One of a prediction's times."""

# Each knows one thing more than the one before.
WAYS: Mapping[str, How] = {
    "ops alone": attrgetter("ops_us"),
    "+ links": attrgetter("links_us"),
    "+ crowd": attrgetter("crowded_us"),
    "+ uneven workers": attrgetter("uneven_us"),
}
BEST: How = WAYS["+ uneven workers"]


@dataclass(frozen=True, slots=True)
class Line:
    """One variant: what an iteration took in each round, how many samples it trains on, its losses, and what was predicted."""

    name: str
    title: str
    dead: str
    times_us: Mapping[int, float]
    num_samples: int
    losses: Sequence[float]
    predictions: Mapping[int, Prediction] = field(default_factory=dict)

    @property
    def median_us(self) -> float:
        return median(self.times_us.values())

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.median_us * 1e6

    @property
    def is_predicted(self) -> bool:
        return bool(self.predictions)

    def predicted_us(self, how: How) -> float:
        """The median over rounds."""
        return median(how(made) for made in self.predictions.values())

    def error(self, how: How) -> float:
        """By how much predictions were too high, as a share of what was measured: the median over rounds, each beside its own."""
        return median(how(made) / self.times_us[number] for number, made in self.predictions.items()) - 1

    def share_of(self, other: "Line") -> float:
        """Its throughput over another one's: the median over rounds, since a round's turns lie next to each other in time."""
        common = sorted(set(self.times_us) & set(other.times_us))
        ratios = (other.times_us[number] / self.times_us[number] for number in common)
        return median(ratios) * self.num_samples / other.num_samples


def throughput_table(lines: Sequence[Line], yardstick: Line) -> Rows:
    """What each variant took, beside what was predicted."""
    head = ["variant", "dead", "iteration ms", "range", "samples/s", f"of {yardstick.title}", "predicted ms", "error"]
    return [head, *(_row(line, yardstick) for line in lines)]


def _row(line: Line, yardstick: Line) -> list[str]:
    times_us = line.times_us.values()
    spread = f"{min(times_us) / 1e3:.0f} – {max(times_us) / 1e3:.0f}"
    told = [f"{line.predicted_us(BEST) / 1e3:.1f}", f"{line.error(BEST):+.1%}"] if line.is_predicted else ["–", "–"]
    share = f"{line.share_of(yardstick):.1%}"
    return [line.title, line.dead or "nobody", f"{line.median_us / 1e3:.1f}", spread, f"{line.samples_per_s:.1f}", share, *told]


def prediction_table(lines: Sequence[Line]) -> Rows:
    """How the prediction comes about: each column knows one thing more, with its error."""
    rows = [
        [line.title, *(_with_error(how, line) for how in WAYS.values()), f"{line.median_us / 1e3:.1f}"]
        for line in lines
        if line.is_predicted
    ]
    return [["variant", *WAYS, "measured ms"], *rows]


def _with_error(how: How, line: Line) -> str:
    return f"{line.predicted_us(how) / 1e3:.1f} ({line.error(how):+.1%})"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of a measurement: in words, what was found, and whether it is met."""

    what: str
    asked: str
    found: str
    is_met: bool


def asked_table(asked: Sequence[Asked]) -> Rows:
    return [
        ["asked", "target", "found", "met"],
        *([one.what, one.asked, one.found, "yes" if one.is_met else "no"] for one in asked),
    ]


def errors_asked(lines: Sequence[Line], most_median: float, most: float) -> list[Asked]:
    """Whether predictions came true."""
    errors = [abs(line.error(BEST)) for line in lines if line.is_predicted]
    return [
        Asked(
            "predicted iteration time, median error",
            f"≤ {most_median:.0%}",
            f"{median(errors):.1%}",
            median(errors) <= most_median,
        ),
        Asked("predicted iteration time, worst error", f"≤ {most:.0%}", f"{max(errors):.1%}", max(errors) <= most),
    ]


def times_table(times_us: Mapping[str, Sequence[float]]) -> Rows:
    """Medians and worst of times by what they are of."""
    rows = [
        [what, str(len(times)), f"{median(times) / 1e3:.0f}", f"{max(times) / 1e3:.0f}"]
        for what, times in times_us.items()
        if times
    ]
    return [["what", "times", "median ms", "worst ms"], *rows]
