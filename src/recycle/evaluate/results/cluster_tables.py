"""Tables of a measured cluster: iteration times and throughput shares, predictions and errors, requirements, recovery times."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, median, quantiles

from recycle.sim.replay.expected_iteration import ExpectedIteration

Rows = list[list[str]]


PredictedTime = Callable[[ExpectedIteration], float]

# Each step of the prediction takes one more effect into account.
PREDICTION_STEPS: Mapping[str, PredictedTime] = {
    "ops alone": attrgetter("ops_us"),
    "+ links": attrgetter("links_us"),
    "+ contention": attrgetter("contended_us"),
    "+ uneven workers": attrgetter("uneven_us"),
}
FULL: PredictedTime = PREDICTION_STEPS["+ uneven workers"]
BEFOREHAND = "by the first profile"
_NUM_RESAMPLES, _COVERAGE = 1000, 0.9


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The measurements of one variant by round, and the predictions for it.

    `predictions` come from the profile of each round, `beforehand` from the profile that its plan was made from.
    """

    name: str
    title: str
    dead: str
    times_us: Mapping[int, Sequence[float]]
    num_samples: int
    losses: Mapping[int, Sequence[float]]
    predictions: Mapping[int, ExpectedIteration] = field(default_factory=dict)
    beforehand: ExpectedIteration | None = None

    @property
    def typical_us(self) -> float:
        return interquartile_mean(self.iterations_us)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_s_in(self.times_us)

    def samples_per_s_in(self, rounds: Iterable[int]) -> float:
        """The throughput in these rounds, of which one may be named more than once."""
        times_us = (time_us for number in rounds for time_us in self.times_us[number])
        return self.num_samples / interquartile_mean(times_us) * 1e6

    @property
    def iterations_us(self) -> list[float]:
        return [time_us for times_us in self.times_us.values() for time_us in times_us]

    @property
    def is_predicted(self) -> bool:
        return bool(self.predictions)

    def predicted_us(self, step: PredictedTime) -> float:
        """The median over rounds."""
        return median(step(prediction) for prediction in self.predictions.values())

    def error(self, step: PredictedTime) -> float:
        return self.error_of(self.predicted_us(step))

    def error_of(self, predicted_us: float) -> float:
        """The error of a prediction as a share of the measured time, positive where it was too high."""
        return predicted_us / self.typical_us - 1

    def share_of(self, other: "VariantResult") -> float:
        """Its throughput over another variant's."""
        return self.samples_per_s / other.samples_per_s

    def share_interval(self, other: "VariantResult") -> tuple[float, float] | None:
        """The 90 % bootstrap interval of that share, by resampling rounds; None if there is one round only."""
        rounds = sorted(set(self.times_us) & set(other.times_us))
        if len(rounds) < 2 or self is other:
            return None
        generator = random.Random(1)
        resamples = (generator.choices(rounds, k=len(rounds)) for _ in range(_NUM_RESAMPLES))
        shares = sorted(self.samples_per_s_in(drawn) / other.samples_per_s_in(drawn) for drawn in resamples)
        cut = round((1 - _COVERAGE) / 2 * _NUM_RESAMPLES)
        return shares[cut], shares[-1 - cut]


def interquartile_mean(values: Iterable[float]) -> float:
    """The mean of the middle half, which a few disturbed iterations do not change.

    A median would be arbitrary where long and short iterations alternate, as they do in some schedules.
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def throughput_table(results: Sequence[VariantResult], baseline: VariantResult) -> Rows:
    """Return the measured and the predicted time of each variant, and its throughput as a share of the baseline's."""
    times = ["iteration ms", "median", "quartiles"]
    head = ["variant", "dead", *times, "samples/s", f"of {baseline.title}", "predicted ms", "error"]
    return [head, *(_row(result, baseline) for result in results)]


def _row(result: VariantResult, baseline: VariantResult) -> list[str]:
    times_us = result.iterations_us
    low_us, middle_us, high_us = quantiles(times_us, n=4, method="inclusive") if len(times_us) > 1 else times_us * 3
    spread = [f"{middle_us / 1e3:.1f}", f"{low_us / 1e3:.0f} – {high_us / 1e3:.0f}"]
    predicted = [f"{result.predicted_us(FULL) / 1e3:.1f}", f"{result.error(FULL):+.1%}"] if result.is_predicted else ["–", "–"]
    times = [f"{result.typical_us / 1e3:.1f}", *spread, f"{result.samples_per_s:.1f}"]
    return [result.title, result.dead or "nobody", *times, share_text(result, baseline), *predicted]


def share_text(result: VariantResult, other: VariantResult) -> str:
    """The throughput over another variant's, with its 90 % bootstrap interval."""
    interval = result.share_interval(other)
    return f"{result.share_of(other):.1%}" + (f" ({interval[0]:.1%} – {interval[1]:.1%})" if interval else "")


def prediction_table(results: Sequence[VariantResult]) -> Rows:
    """Return the predicted time after each step of the prediction, and by the first profile, with the errors."""
    rows = [[result.title, *_predicted(result), f"{result.typical_us / 1e3:.1f}"] for result in results if result.is_predicted]
    return [["variant", *PREDICTION_STEPS, BEFOREHAND, "measured ms"], *rows]


def _predicted(result: VariantResult) -> list[str]:
    beforehand_us = FULL(result.beforehand) if result.beforehand else None
    times_us = [*(result.predicted_us(step) for step in PREDICTION_STEPS.values()), beforehand_us]
    return [f"{time_us / 1e3:.1f} ({result.error_of(time_us):+.1%})" if time_us else "–" for time_us in times_us]


def errors_beforehand(results: Iterable[VariantResult]) -> list[float]:
    """The absolute errors of the predictions by the first profile."""
    return [abs(result.error_of(FULL(result.beforehand))) for result in results if result.beforehand]


def errors_by_round(results: Iterable[VariantResult]) -> list[float]:
    """The absolute error of each round's prediction, relative to the time that was measured in that round."""
    return [
        abs(FULL(prediction) / interquartile_mean(result.times_us[number]) - 1)
        for result in results
        for number, prediction in result.predictions.items()
    ]


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement on a measurement: its description, the target, the value that was found, and whether it is met."""

    what: str
    target: str
    found: str
    is_met: bool


def requirement_table(requirements: Sequence[Requirement]) -> Rows:
    rows = ([one.what, one.target, one.found, "yes" if one.is_met else "no"] for one in requirements)
    return [["requirement", "target", "found", "met"], *rows]


def error_requirements(results: Sequence[VariantResult], most_median: float, most: float) -> list[Requirement]:
    """Check the median and the worst error of the predictions."""
    errors = [abs(result.error(FULL)) for result in results if result.is_predicted]
    return [
        Requirement(f"predicted iteration time, {name} error", f"≤ {limit:.0%}", f"{error:.1%}", error <= limit)
        for name, error, limit in (("median", median(errors), most_median), ("worst", max(errors), most))
    ]


def times_table(times_us: Mapping[str, Sequence[float]]) -> Rows:
    """Return the number, the median and the maximum of each list of times; empty lists are left out."""
    rows = [
        [what, str(len(times)), f"{median(times) / 1e3:.0f}", f"{max(times) / 1e3:.0f}"]
        for what, times in times_us.items()
        if times
    ]
    return [["time", "count", "median ms", "worst ms"], *rows]
