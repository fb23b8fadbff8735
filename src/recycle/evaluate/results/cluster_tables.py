"""A measured cluster in tables: what an iteration took by each variant, what was predicted, and whether it is what was asked."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, median, quantiles

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
BEFOREHAND = "as was known beforehand"
_NUM_DRAWS, _COVERED = 1000, 0.9


@dataclass(frozen=True, slots=True)
class Line:
    """One variant: what iterations took in each round, how many samples one trains on, its losses in each, what was predicted.

    Predictions are by what was rehearsed in each round; the one beforehand is by the profile that its plan was made from.
    """

    name: str
    title: str
    dead: str
    times_us: Mapping[int, Sequence[float]]
    num_samples: int
    losses: Mapping[int, Sequence[float]]
    predictions: Mapping[int, Prediction] = field(default_factory=dict)
    beforehand: Prediction | None = None

    @property
    def typical_us(self) -> float:
        return middle_mean(self.iterations_us)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_s_in(self.times_us)

    def samples_per_s_in(self, rounds: Iterable[int]) -> float:
        """By these rounds, of which one may be named more than once."""
        return self.num_samples / middle_mean(took_us for number in rounds for took_us in self.times_us[number]) * 1e6

    @property
    def iterations_us(self) -> list[float]:
        """What its iterations took, one by one."""
        return [took_us for times_us in self.times_us.values() for took_us in times_us]

    @property
    def is_predicted(self) -> bool:
        return bool(self.predictions)

    def predicted_us(self, how: How) -> float:
        """The median over rounds."""
        return median(how(made) for made in self.predictions.values())

    def error(self, how: How) -> float:
        """By how much the prediction was too high, as a share of what was measured."""
        return self.error_of(self.predicted_us(how))

    def error_of(self, predicted_us: float) -> float:
        return predicted_us / self.typical_us - 1

    def share_of(self, other: "Line") -> float:
        """Its throughput over another one's."""
        return self.samples_per_s / other.samples_per_s

    def share_between(self, other: "Line") -> tuple[float, float] | None:
        """Between what that share lies nine times in ten if rounds are drawn by chance from these; None if there is but one."""
        rounds = sorted(set(self.times_us) & set(other.times_us))
        if len(rounds) < 2 or self is other:
            return None
        chance = random.Random(1)
        draws = (chance.choices(rounds, k=len(rounds)) for _ in range(_NUM_DRAWS))
        shares = sorted(self.samples_per_s_in(drawn) / other.samples_per_s_in(drawn) for drawn in draws)
        cut = round((1 - _COVERED) / 2 * _NUM_DRAWS)
        return shares[cut], shares[-1 - cut]


def middle_mean(values: Iterable[float]) -> float:
    """The mean of the middle half: what a mean is without the few that something else held up.

    A median would take sides where long and short iterations alternate, as they do in some schedules.
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def throughput_table(lines: Sequence[Line], yardstick: Line) -> Rows:
    """What each variant took, beside what was predicted."""
    times = ["iteration ms", "median", "quartiles"]
    head = ["variant", "dead", *times, "samples/s", f"of {yardstick.title}", "predicted ms", "error"]
    return [head, *(_row(line, yardstick) for line in lines)]


def _row(line: Line, yardstick: Line) -> list[str]:
    times_us = line.iterations_us
    low_us, middle_us, high_us = quantiles(times_us, n=4, method="inclusive") if len(times_us) > 1 else times_us * 3
    spread = [f"{middle_us / 1e3:.1f}", f"{low_us / 1e3:.0f} – {high_us / 1e3:.0f}"]
    told = [f"{line.predicted_us(BEST) / 1e3:.1f}", f"{line.error(BEST):+.1%}"] if line.is_predicted else ["–", "–"]
    times = [f"{line.typical_us / 1e3:.1f}", *spread, f"{line.samples_per_s:.1f}"]
    return [line.title, line.dead or "nobody", *times, share_text(line, yardstick), *told]


def share_text(line: Line, other: Line) -> str:
    """Its throughput over another one's, and between what that lies by chance."""
    between = line.share_between(other)
    return f"{line.share_of(other):.1%}" + (f" ({between[0]:.1%} – {between[1]:.1%})" if between else "")


def prediction_table(lines: Sequence[Line]) -> Rows:
    """How the prediction comes about: each column knows one thing more, with its error; beside it, what was known beforehand."""
    rows = [[line.title, *_told(line), f"{line.typical_us / 1e3:.1f}"] for line in lines if line.is_predicted]
    return [["variant", *WAYS, BEFOREHAND, "measured ms"], *rows]


def _told(line: Line) -> list[str]:
    known = BEST(line.beforehand) if line.beforehand else None
    times_us = [*(line.predicted_us(how) for how in WAYS.values()), known]
    return [f"{time_us / 1e3:.1f} ({line.error_of(time_us):+.1%})" if time_us else "–" for time_us in times_us]


def errors_beforehand(lines: Iterable[Line]) -> list[float]:
    """How far off predictions were, from what was known before the race alone."""
    return [abs(line.error_of(BEST(line.beforehand))) for line in lines if line.beforehand]


def errors_by_round(lines: Iterable[Line]) -> list[float]:
    """How far off each round's prediction was of that round's turn."""
    return [
        abs(BEST(made) / middle_mean(line.times_us[number]) - 1) for line in lines for number, made in line.predictions.items()
    ]


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
