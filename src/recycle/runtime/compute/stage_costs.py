"""A profile by measurement: one micro-batch goes through all stages, forwards and backwards, as workers would run it.

Copies are measured. Modules, their gradients and torch's random state are afterwards as they were before.
"""

import contextlib
import copy
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recycle.core.errors import UserError
from recycle.core.op import Kind
from recycle.core.profile import Link, Profile, StageProfile
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Stepper
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.stage import Loss, Stage

Clock = Callable[[], float]
"""The time in µs, from any moment on."""

_Made = TypeVar("_Made")
_CHAIN = 0
# Between two steps the micro-batch goes through with its backward pass in two parts, and in one.
_NUM_GOES = 2
_OPTIMIZER = "optimizer"
# A link of which nothing is known: within a machine, messages cost next to nothing beside ops.
_UNMEASURED = Link(bytes_per_us=1e9)


class StageBytes(NamedTuple):
    """What a stage stores in F, what W needs after I, and what the stage sends on (the loss, at the last one).

    W may need more than F stored: the gradients of a plain MLP's layers are as large as their inputs, and what a checkpointed
    block computes again stays for its W. A plan's memory model has no I that takes memory. So F is said to take as much then: a
    plan counts on more than is held, never on less.
    """

    activation_bytes: int
    weight_held_bytes: int
    output_bytes: int


def measure_stages(
    stages: Sequence[nn.Module],
    samples: MicroBatchSource,
    loss: Loss,
    num_repeats: int = 5,
    is_exact: bool = False,
    make_optimizer: MakeOptimizer | None = None,
    sum_dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: str | None = None,
    clock_us: Clock | None = None,
) -> Profile:
    """Return what every stage costs on `device`, or where it is: medians of `num_repeats`, after a first go that does not count.

    Static bytes are those of the parameters, gradient bytes those of the sums that peers reduce. An optimizer that is not given
    takes no time; links are not measured, and as if they were free. With how many threads torch computes is the caller's matter.
    """
    if isinstance(num_repeats, bool) or not isinstance(num_repeats, int) or num_repeats < 1:
        raise UserError(f"num_repeats is {num_repeats!r}, but it must be a whole number of at least 1")
    with _random_state_kept():
        copies = _copies(stages, loss, is_exact, sum_dtype, autocast, device)
        steppers = (
            [(stage, Stepper(stage.parameters(), make_optimizer)) for stage in copies] if make_optimizer is not None else []
        )
        given, targets = _sample(samples)
        sizes = _sizes(copies, given, targets)
        _go(copies, steppers, given, targets, _Stopwatch(clock_us or _now_us))
        watch = _Stopwatch(clock_us or _now_us)
        for _ in range(num_repeats):
            _go(copies, steppers, given, targets, watch)
    made = tuple(_profile(stage, own, watch) for stage, own in zip(copies, sizes, strict=True))
    return Profile(made, _UNMEASURED, _UNMEASURED, name=f"measured on {machine(_device_of(copies))}, links as if they were free")


def measure_bytes(
    stages: Sequence[nn.Module],
    samples: MicroBatchSource,
    loss: Loss,
    autocast: torch.dtype | None = None,
    device: str | None = None,
) -> list[StageBytes]:
    """Return what every stage holds and sends, from one micro-batch and without a clock."""
    with _random_state_kept():
        copies = _copies(stages, loss, False, torch.float32, autocast, device)
        return _sizes(copies, *_sample(samples))


class _Stopwatch:
    """How long what took at which stage, each time."""

    def __init__(self, clock_us: Clock) -> None:
        self._clock_us = clock_us
        self._laps_us: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def time(self, stage: Stage, what: str, run: Callable[[], _Made]) -> _Made:
        start_us = self._clock_us()
        made = run()
        self._laps_us[stage.number, what].append(self._clock_us() - start_us)
        return made

    def median_us(self, stage: Stage, what: str, least: int) -> int:
        """The median, or `least` if that is more or nothing was timed."""
        return max(least, round(median(self._laps_us.get((stage.number, what), [0.0]))))


def _copies(
    stages: Sequence[nn.Module],
    loss: Loss,
    is_exact: bool,
    sum_dtype: torch.dtype,
    autocast: torch.dtype | None,
    device: str | None,
) -> list[Stage]:
    made = []
    for number, original in enumerate(stages):
        module = copy.deepcopy(original).to(device)
        sums = make_sums(module.parameters(), _NUM_GOES, is_exact, sum_dtype)
        own_loss = loss if number == len(stages) - 1 else None
        made.append(Stage(module, sums, number, own_loss, autocast=autocast))
    return made


def _sample(samples: MicroBatchSource) -> tuple[Tensor, Tensor]:
    """A micro-batch with storages of its own: a view would hold all of the data set that it looks at."""
    given, targets = samples.get(0, 0, 0)
    return given.clone(), targets.clone()


def _sizes(stages: Sequence[Stage], given: Tensor, targets: Tensor) -> list[StageBytes]:
    """What the stages hold at their op boundaries; meters run for this alone, since they take time."""
    meters = [ActivationMeter(stage.module) for stage in stages]
    for stage, meter in zip(stages, meters, strict=True):
        stage.meter = meter
    outputs = _forward(stages, given, targets, _Stopwatch(lambda: 0.0))
    activations = [meter.held_bytes for meter in meters]
    gradient = None
    for stage in reversed(stages):
        gradient = stage.backward_input(_CHAIN, gradient)
    rests = [meter.held_bytes for meter in meters]
    for stage in stages:
        stage.backward_weight(_CHAIN)
        stage.sums.clear()
        stage.meter = None
    return [
        StageBytes(max(activation, rest), rest, output.nbytes)
        for activation, rest, output in zip(activations, rests, outputs, strict=True)
    ]


def _go(
    stages: Sequence[Stage], steppers: Sequence[tuple[Stage, Stepper]], given: Tensor, targets: Tensor, watch: _Stopwatch
) -> None:
    """Send the micro-batch through with its backward pass in two parts, again with it in one, and step."""
    _forward(stages, given, targets, watch)
    gradient = None
    for stage in reversed(stages):
        gradient = watch.time(stage, Kind.I, partial(stage.backward_input, _CHAIN, gradient))
        watch.time(stage, Kind.W, partial(stage.backward_weight, _CHAIN))
    _forward(stages, given, targets, watch)
    gradient = None
    for stage in reversed(stages):
        gradient = watch.time(stage, Kind.B, partial(stage.backward, _CHAIN, gradient))
    for stage, stepper in steppers:
        watch.time(stage, _OPTIMIZER, partial(stepper.step, 0, stage.sums.means(_NUM_GOES), 1.0))
    for stage in stages:
        stage.sums.clear()


def _forward(stages: Sequence[Stage], given: Tensor, targets: Tensor, watch: _Stopwatch) -> list[Tensor]:
    """Run F at every stage, and return what each made."""
    outputs: list[Tensor] = []
    for stage in stages:
        taken = outputs[-1] if outputs else given
        outputs.append(
            watch.time(stage, Kind.F, partial(stage.forward, _CHAIN, taken, seed_of("measure", stage.number), targets))
        )
    return outputs


def _profile(stage: Stage, sizes: StageBytes, watch: _Stopwatch) -> StageProfile:
    input_us = watch.median_us(stage, Kind.I, least=1)
    return StageProfile(
        forward_us=watch.median_us(stage, Kind.F, least=1),
        input_us=input_us,
        weight_us=watch.median_us(stage, Kind.W, least=1),
        # A whole backward pass contains I; where W is next to nothing, the clock may say otherwise.
        fused_us=watch.median_us(stage, Kind.B, least=input_us),
        optimizer_us=watch.median_us(stage, _OPTIMIZER, least=0),
        activation_bytes=sizes.activation_bytes,
        weight_held_bytes=sizes.weight_held_bytes,
        static_bytes=sum(parameter.nbytes for parameter in stage.module.parameters()),
        gradient_bytes=stage.sums.flat.nbytes,
        output_bytes=sizes.output_bytes,
    )


def machine(device: str) -> str:
    """What computes, in words: the GPU, or the processor and how many cores it has."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{_processor()}, {num_cores()} cores"


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _device_of(stages: Sequence[Stage]) -> str:
    return next((parameter.device.type for stage in stages for parameter in stage.parameters()), "cpu")


def _random_state_kept() -> AbstractContextManager[None]:
    """Stages seed torch's generators for every micro-batch; afterwards they are as they were, those of GPUs in use, too."""
    return torch.random.fork_rng(range(torch.cuda.device_count()) if _uses_gpu() else ())


def _now_us() -> float:
    """The time when all that was asked of a GPU is done."""
    if _uses_gpu():
        torch.cuda.synchronize()
    return time.perf_counter_ns() / 1000


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
