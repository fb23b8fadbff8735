"""measure_stages: a profile of all stages, measured one op after the other in one process; links are not measured."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from recycle.core.op import Kind
from recycle.core.profile import FREE_LINK, Profile, StageProfile
from recycle.profiling.machine import machine_name
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import StageBytes, StageCopies, random_state_kept, uses_gpu
from recycle.runtime.job import Job
from recycle.runtime.options import refuse_count

Clock = Callable[[], float]
"""The time in µs, from any moment on."""

_Made = TypeVar("_Made")
# Between two steps the micro-batch goes through with its backward pass in two parts, and in one.
_NUM_PASSES = 2
_OPTIMIZER = "optimizer"


def _now_us() -> float:
    """The time when all work of a GPU is done."""
    if uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter_ns() / 1000


def measure_stages(job: Job, num_repeats: int = 5, clock_us: Clock = _now_us) -> Profile:
    """Return the costs of every stage of `job` on its device: medians of `num_repeats` passes, after a first one.

    Static bytes are those of the parameters, gradient bytes those of the sums that peers reduce. Links are not measured, and as
    if they were free. The caller sets how many threads torch computes with.
    """
    refuse_count("num_repeats", num_repeats, 1)
    options = job.options
    numbers = (_NUM_PASSES, options.is_exact, options.sum_dtype, options.autocast, options.device)
    with random_state_kept():
        copies = StageCopies(job.stages, job.microbatches, job.loss, *numbers)
        steppers = [(stage, Stepper(stage.parameters(), job.optimizer)) for stage in copies.stages]
        sizes = copies.measure_bytes()
        _run_passes(copies, steppers, _Stopwatch(clock_us))
        watch = _Stopwatch(clock_us)
        for _ in range(num_repeats):
            _run_passes(copies, steppers, watch)
    profiles = tuple(_profile(stage, own, watch) for stage, own in zip(copies.stages, sizes, strict=True))
    name = f"measured on {machine_name(options.device)}, links as if they were free"
    return Profile(profiles, FREE_LINK, FREE_LINK, name=name)


class _Stopwatch:
    """The durations of every op and step, by stage."""

    def __init__(self, clock_us: Clock) -> None:
        self._clock_us = clock_us
        self._durations_us: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def time(self, stage: Stage, label: str, run: Callable[[], _Made]) -> _Made:
        start_us = self._clock_us()
        made = run()
        self._durations_us[stage.number, label].append(self._clock_us() - start_us)
        return made

    def median_us(self, stage: Stage, label: str, least: int) -> int:
        """The median, or `least` if that is more."""
        return max(least, round(median(self._durations_us[stage.number, label])))


def _run_passes(copies: StageCopies, steppers: Sequence[tuple[Stage, Stepper]], watch: _Stopwatch) -> None:
    """Run the micro-batch through with its backward pass in two parts, again with it in one, and step."""
    for kinds in ((Kind.I, Kind.W), (Kind.B,)):
        copies.forward(watch.time)
        copies.backward(kinds, watch.time)
    for stage, stepper in steppers:
        watch.time(stage, _OPTIMIZER, partial(stepper.step, 0, stage.sums.means(_NUM_PASSES), 1.0))
    for stage in copies.stages:
        stage.sums.clear()


def _profile(stage: Stage, sizes: StageBytes, watch: _Stopwatch) -> StageProfile:
    input_us = watch.median_us(stage, Kind.I, least=1)
    return StageProfile(
        forward_us=watch.median_us(stage, Kind.F, least=1),
        input_us=input_us,
        weight_us=watch.median_us(stage, Kind.W, least=1),
        # A whole backward pass contains I; where W is next to nothing, the clock may say otherwise.
        fused_us=watch.median_us(stage, Kind.B, least=input_us),
        optimizer_us=watch.median_us(stage, _OPTIMIZER, least=0),
        static_bytes=sum(parameter.nbytes for parameter in stage.module.parameters()),
        gradient_bytes=stage.sums.flat.nbytes,
        **sizes._asdict(),
    )
