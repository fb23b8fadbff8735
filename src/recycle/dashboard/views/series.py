"""Columns over time with few points: of many values, the smallest, largest and mean of equal parts of the time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def thin(at_us: Sequence[int], values: Sequence[float], num_bins: int, span: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return a column of times in seconds, and of values; those of many points are `low`, `high` and `mean` of each bin.

    `span` is the time to show, in µs. Points that are not finite are left out.
    """
    times, numbers = np.asarray(at_us, dtype=np.float64), np.asarray(values, dtype=np.float64)
    chosen = np.isfinite(numbers)
    if span is not None:
        chosen &= (times >= span[0]) & (times <= span[1])
    times, numbers = times[chosen], numbers[chosen]
    if len(times) <= 2 * num_bins:
        shown = _rounded(numbers)
        return {"at_s": _rounded(times / 1e6, 6), "mean": shown, "low": shown, "high": shown, "num": len(times)}
    first, last = times.min(), times.max()
    bins = np.minimum(((times - first) / max(1.0, last - first) * num_bins).astype(np.int64), num_bins - 1)
    return {"num": len(times), **_binned(times, numbers, bins, num_bins)}


def _binned(times: Floats, numbers: Floats, bins: NDArray[np.int64], num_bins: int) -> dict[str, Any]:
    counts = np.bincount(bins, minlength=num_bins)
    filled = counts > 0
    mean = np.bincount(bins, weights=numbers, minlength=num_bins)[filled] / counts[filled]
    at_us = np.bincount(bins, weights=times, minlength=num_bins)[filled] / counts[filled]
    low, high = np.full(num_bins, np.inf), np.full(num_bins, -np.inf)
    np.minimum.at(low, bins, numbers)
    np.maximum.at(high, bins, numbers)
    return {
        "at_s": _rounded(at_us / 1e6, 6),
        "mean": _rounded(mean),
        "low": _rounded(low[filled]),
        "high": _rounded(high[filled]),
    }


def _rounded(values: Floats, num_digits: int = 5) -> list[float]:
    """Values with few digits, which are most of the bytes of an answer: seconds to the microsecond, others to five digits."""
    if num_digits == 6:
        return [round(value, 6) for value in values.tolist()]
    return [float(f"{value:.5g}") for value in values.tolist()]
