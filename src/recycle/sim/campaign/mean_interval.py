"""`mean_interval`: the mean of a result over seeds, and its 90 % interval by Student's t.

Every seed makes a trace of its own, so that results of different seeds are independent. Over many failures they are nearly
normal, which is what the interval assumes: of 100 such intervals, each from other seeds, about 90 hold the mean over all seeds.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.9


class MeanInterval(NamedTuple):
    """A mean, and how far its interval reaches to either side; None if there is only one value."""

    mean: float
    half_width: float | None

    def over(self, rate: float) -> "MeanInterval":
        """The same as a share of `rate`."""
        return MeanInterval(self.mean / rate, None if self.half_width is None else self.half_width / rate)

    def text(self, digits: int) -> str:
        """The mean and half of its interval; that is left out where it is 0 with so many digits."""
        mean = f"{self.mean:.{digits}f}"
        if self.half_width is None or round(self.half_width, digits) == 0:
            return mean
        return f"{mean} ± {self.half_width:.{digits}f}"

    def to_json(self) -> dict[str, float | None]:
        low, high = (None, None) if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)
        return {
            "mean": round(self.mean, 6),
            "low": None if low is None else round(low, 6),
            "high": None if high is None else round(high, 6),
        }


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of independent values, with its interval at `LEVEL`."""
    if len(values) < 2:
        return MeanInterval(fmean(values), None)
    return MeanInterval(fmean(values), student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


@lru_cache(maxsize=256)
def student_t(degrees: int, level: float = LEVEL) -> float:
    """The t between whose negative and itself Student's distribution with so many degrees of freedom has the share `level`."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if _share_within(middle, degrees) >= level else (middle, high)
    return math.sqrt(degrees) * math.tan(high)


def _share_within(angle: float, degrees: int) -> float:
    """The share of the distribution between -t and t = sqrt(degrees) * tan(angle), a finite sum (Abramowitz and Stegun, 26.7)."""
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for number in range(2 + is_odd, degrees, 2):
        term *= (number - 1) / number * cosine * cosine
        total += term
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if is_odd else inner
