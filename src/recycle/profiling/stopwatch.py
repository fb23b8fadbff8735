"""Stopwatch: the durations of the ops and steps of stages, their medians and the shortest of them."""

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch

from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import uses_gpu

Clock = Callable[[], float]
"""The time in µs, from any moment on."""

_Made = TypeVar("_Made")


def device_clock_us() -> float:
    """The time when all work of a GPU is done."""
    if uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter_ns() / 1000


class Stopwatch:
    """The durations of every op and step, by the number of the stage."""

    def __init__(self, clock_us: Clock) -> None:
        self._clock_us = clock_us
        self._durations_us: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def time(self, stage: Stage, label: str, run: Callable[[], _Made]) -> _Made:
        start_us = self._clock_us()
        made = run()
        self._durations_us[stage.number, label].append(self._clock_us() - start_us)
        return made

    def median_us(self, stage: Stage, label: str) -> float:
        return median(self._durations_us[stage.number, label])

    def least_us(self, stage: Stage, label: str) -> float:
        return min(self._durations_us[stage.number, label])
