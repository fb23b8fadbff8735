"""measure_stages: a profile of all stages, measured one op after the other in one process; links are not measured."""

from collections.abc import Sequence
from functools import partial

from recycle.core.op import Kind
from recycle.core.profile import FREE_LINK, Profile, StageProfile
from recycle.profiling.layer_times import measure_layers
from recycle.profiling.machine import machine_name
from recycle.profiling.stopwatch import Clock, Stopwatch, device_clock_us
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import StageBytes, StageCopies, random_state_kept, return_gpu_memory, state_bytes
from recycle.runtime.job import Job
from recycle.runtime.options import refuse_count

# Between two steps the micro-batch goes through with its backward pass in two parts, and in one.
_NUM_PASSES = 2
_OPTIMIZER = "optimizer"


def measure_stages(job: Job, num_repeats: int = 5, clock_us: Clock = device_clock_us) -> Profile:
    """Return the costs of every stage of `job` on its device: medians of `num_repeats` passes, after a first one.

    Static bytes are those of parameters, optimizer state and gradients, gradient bytes those of the sums that peers reduce. Links
    are not measured, and as if they were free. The caller sets how many threads torch computes with.
    """
    refuse_count("num_repeats", num_repeats, 1)
    stages = _measured_stages(job, num_repeats, clock_us)
    layers = measure_layers(job, 2 * num_repeats, clock_us)
    return_gpu_memory()
    name = f"measured on {machine_name(job.options.device)}, links as if they were free"
    return Profile(stages, FREE_LINK, FREE_LINK, name=name, layers=layers)


def _measured_stages(job: Job, num_repeats: int, clock_us: Clock) -> tuple[StageProfile, ...]:
    options = job.options
    numbers = (_NUM_PASSES, options.is_exact, options.sum_dtype, options.ops, options.device)
    with random_state_kept():
        copies = StageCopies(job.stages, job.microbatches, job.loss_function, *numbers)
        steppers = [
            (stage, Stepper(stage.parameters(), job.optimizer, is_lean=options.has_lean_steps)) for stage in copies.stages
        ]
        sizes = copies.measure_bytes()
        _run_passes(copies, steppers, Stopwatch(clock_us))
        watch = Stopwatch(clock_us)
        for _ in range(num_repeats):
            _run_passes(copies, steppers, watch)
        states = [state_bytes(stage, job.optimizer, options.has_lean_steps) for stage in copies.stages]
        return tuple(_profile(stage, own, state, watch) for stage, own, state in zip(copies.stages, sizes, states, strict=True))


def _run_passes(copies: StageCopies, steppers: Sequence[tuple[Stage, Stepper]], watch: Stopwatch) -> None:
    """Run the micro-batch through with its backward pass in two parts, again with it in one, and step."""
    for kinds in ((Kind.I, Kind.W), (Kind.B,)):
        copies.forward(watch.time)
        copies.backward(kinds, watch.time)
    for stage, stepper in steppers:
        watch.time(stage, _OPTIMIZER, partial(_step, stage, stepper))
    for stage in copies.stages:
        stage.sums.clear()


def _step(stage: Stage, stepper: Stepper) -> None:
    """A staggered step: it is tried, and settled when its verdict arrives."""
    gradients = partial(stage.sums.means, _NUM_PASSES)
    stepper.try_step(0, gradients)
    stepper.settle(0, gradients)


def _profile(stage: Stage, sizes: StageBytes, static_bytes: int, watch: Stopwatch) -> StageProfile:
    def took_us(label: str, least: int) -> int:
        return max(least, round(watch.median_us(stage, label)))

    input_us = took_us(Kind.I, least=1)
    return StageProfile(
        forward_us=took_us(Kind.F, least=1),
        input_us=input_us,
        weight_us=took_us(Kind.W, least=1),
        # A whole backward pass contains I; where W is next to nothing, the clock may say otherwise.
        fused_us=took_us(Kind.B, least=input_us),
        optimizer_us=took_us(_OPTIMIZER, least=0),
        static_bytes=static_bytes,
        gradient_bytes=stage.sums.flat.nbytes,
        **sizes._asdict(),
    )
