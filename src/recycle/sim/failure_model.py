"""FailureModel: how often GPUs, machines and racks fail, by cause, and how long repairs take, from published data.

A model is data: causes with their rates for a GPU and a day. `failure_traces.model_trace` draws a trace from it.
docs/simulator.md has the sources, and what of this is an assumption.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist

from recycle.core.errors import UserError
from recycle.core.units import parse_duration_us

_MINUTE, _HOUR, _DAY = 60_000_000, 3_600_000_000, 86_400_000_000
# What every model assumes of machines and racks unless it says otherwise.
GPUS_PER_MACHINE, GPUS_PER_RACK = 8, 16


class FailureScope(Enum):
    """What fails together: the worker of a GPU, all workers of a machine, or all workers of a rack."""

    GPU = "gpu"
    MACHINE = "machine"
    RACK = "rack"


@dataclass(frozen=True, slots=True)
class RepairTime:
    """The time until a node is back: lognormal, given by its mean and its median. With both equal it is always the same."""

    mean_us: int
    median_us: int

    def __post_init__(self) -> None:
        if not 1000 <= self.median_us <= self.mean_us:
            raise UserError(
                f"a repair takes {self.mean_us} µs in the mean and {self.median_us} µs in the median: give a mean that is not "
                "below the median, and a median of at least 1 ms"
            )

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm."""
        return math.sqrt(2 * math.log(self.mean_us / self.median_us))

    def draw_us(self, uniform: float) -> int:
        """The time at this share of all repairs, from 0 to 1: `uniform` is a random number."""
        if self.mean_us == self.median_us:
            return self.median_us
        return max(1000, round(self.median_us * math.exp(self.sigma * NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12)))))

    def times(self, factor: float) -> "RepairTime":
        return RepairTime(round(self.mean_us * factor), round(self.median_us * factor))


# Lognormal repair times: Schroeder and Gibson (DSN 2006), from 23,000 failures at Los Alamos.
HARDWARE_REPAIR = RepairTime(6 * _HOUR, _HOUR)
# Nothing is repaired: the process starts again.
PROCESS_RESTART = RepairTime(5 * _MINUTE, 5 * _MINUTE)


@dataclass(frozen=True, slots=True)
class FailureCause:
    """A cause of failures: its rate for a GPU and a day, what fails together, and the repair.

    If it `hangs`, nobody is told: the job stands still until a system notices by itself.
    """

    name: str
    per_gpu_day: float
    scope: FailureScope
    repair: RepairTime = HARDWARE_REPAIR
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class FailureModel:
    """The causes of failures of a cluster, and how many GPUs its machines and racks have."""

    name: str
    source: str
    causes: tuple[FailureCause, ...]
    gpus_per_machine: int = GPUS_PER_MACHINE
    gpus_per_rack: int = GPUS_PER_RACK

    def __post_init__(self) -> None:
        for what, count in (("machine", self.gpus_per_machine), ("rack", self.gpus_per_rack)):
            if not 1 <= count <= 10**6:
                raise UserError(f"a {what} has {count} GPUs, but it must be a number from 1 to 1000000")

    @property
    def per_gpu_day(self) -> float:
        """Failures of all causes for a GPU and a day."""
        return sum(cause.per_gpu_day for cause in self.causes)

    def mtbf_us(self, num_gpus: int) -> int:
        """The mean time between two failures in a job of so many GPUs; a machine or rack that fails counts once."""
        return round(_DAY / (self.per_gpu_day * num_gpus))

    @property
    def mean_repair_us(self) -> int:
        """The mean time until a node is back, over failures of all causes."""
        return round(sum(cause.per_gpu_day * cause.repair.mean_us for cause in self.causes) / self.per_gpu_day)

    def of_scope(self, scope: FailureScope) -> tuple[FailureCause, ...]:
        return tuple(cause for cause in self.causes if cause.scope is scope)

    def times(self, factor: float) -> "FailureModel":
        """The same with so many times as many failures."""
        return replace(self, causes=tuple(replace(one, per_gpu_day=one.per_gpu_day * factor) for one in self.causes))

    def repairs_times(self, factor: float) -> "FailureModel":
        """The same with repairs, and starts of processes, that take so many times as long."""
        return replace(self, causes=tuple(replace(one, repair=one.repair.times(factor)) for one in self.causes))

    def with_repair(self, mean_us: int) -> "FailureModel":
        """The same with this mean time of hardware repairs; processes start again as before."""
        longer = HARDWARE_REPAIR.times(mean_us / HARDWARE_REPAIR.mean_us)
        causes = (replace(one, repair=longer) if one.repair == HARDWARE_REPAIR else one for one in self.causes)
        return replace(self, causes=tuple(causes))


def _counted(causes: Iterable[tuple[str, int]], scope: FailureScope, gpu_days: float) -> tuple[FailureCause, ...]:
    return tuple(FailureCause(name, count / gpu_days, scope) for name, count in causes)


_LLAMA3_GPU_DAYS = 16_384 * 54
_LLAMA3_GPU = (
    ("faulty GPU", 148),
    ("GPU HBM3 memory", 72),
    ("GPU SRAM memory", 19),
    ("GPU system processor", 17),
    ("silent data corruption", 6),
    ("GPU thermal interface and sensor", 6),
)
_LLAMA3_MACHINE = (
    ("host maintenance", 32),
    ("NIC", 7),
    ("SSD", 3),
    ("power supply", 3),
    ("server chassis", 2),
    ("IO expansion board", 2),
    ("CPU", 2),
    ("system memory", 2),
)
_LLAMA3 = FailureModel(
    "llama3",
    "Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 H100, by 18 causes",
    (
        *_counted(_LLAMA3_GPU, FailureScope.GPU, _LLAMA3_GPU_DAYS),
        *_counted(_LLAMA3_MACHINE, FailureScope.MACHINE, _LLAMA3_GPU_DAYS),
        *_counted([("network switch or cable", 35)], FailureScope.RACK, _LLAMA3_GPU_DAYS),
        FailureCause("software bug", 54 / _LLAMA3_GPU_DAYS, FailureScope.GPU, PROCESS_RESTART),
        FailureCause("dependency", 2 / _LLAMA3_GPU_DAYS, FailureScope.GPU, PROCESS_RESTART),
        FailureCause("NCCL watchdog timeout", 7 / _LLAMA3_GPU_DAYS, FailureScope.GPU, PROCESS_RESTART, hangs=True),
    ),
)


def _by_node(name: str, source: str, per_thousand_node_days: float) -> FailureModel:
    rate = per_thousand_node_days / 1000 / GPUS_PER_MACHINE
    return FailureModel(name, source, (FailureCause("node failure", rate, FailureScope.MACHINE),))


_RSC = "research clusters of Meta (arXiv 2410.21680): {} failures in a thousand node-days of 8 A100"
FAILURE_MODELS: dict[str, FailureModel] = {
    "llama3": _LLAMA3,
    "rsc1": _by_node("rsc1", _RSC.format("6.50"), 6.50),
    "rsc2": _by_node("rsc2", _RSC.format("2.34"), 2.34),
}


def own_failure_model(gpu_mtbf_us: int, repair_mean_us: int | None = None) -> FailureModel:
    """A model of one cause: a GPU fails once in `gpu_mtbf_us` on average, and its worker with it."""
    if gpu_mtbf_us < 1000:
        raise UserError(f"a GPU fails once in {gpu_mtbf_us} µs, but the time between failures must be at least 1 ms")
    cause = FailureCause("GPU failure", _DAY / gpu_mtbf_us, FailureScope.GPU)
    made = FailureModel("own", "a rate of your own", (cause,))
    return made if repair_mean_us is None else made.with_repair(repair_mean_us)


def parse_failure_model(text: str) -> FailureModel:
    """Read `llama3`, `rsc1,times=2,repair=4h`, or a rate of one's own such as `mtbf=2000d,repair=6h`.

    `mtbf` is the mean time between failures of a GPU, `times` multiplies the rates, `repair` is the mean of hardware repairs,
    `machine` and `rack` are the GPUs that fail together.
    """
    first, *rest = [part.strip() for part in text.split(",")]
    if first.startswith("mtbf="):
        model = own_failure_model(parse_duration_us(first.removeprefix("mtbf=")))
    elif first in FAILURE_MODELS:
        model = FAILURE_MODELS[first]
    else:
        raise UserError(f"{first!r} is not a failure model: choose from {', '.join(FAILURE_MODELS)}, or give mtbf=TIME of a GPU")
    for part in rest:
        model = _changed(model, *part.partition("=")[::2])
    return model


def _changed(model: FailureModel, key: str, value: str) -> FailureModel:
    """The model with one of its numbers changed."""
    match key.strip():
        case "repair":
            return model.with_repair(parse_duration_us(value))
        case "times":
            return model.times(_factor(value))
        case "machine" | "rack" as group:
            if not value.strip().isdecimal() or len(value) > 9:
                raise UserError(f"{key} is {value!r} in a failure model, but it is a whole number of GPUs")
            num_gpus = int(value)
            return replace(model, gpus_per_rack=num_gpus) if group == "rack" else replace(model, gpus_per_machine=num_gpus)
    raise UserError(f"{key!r} is nothing that a failure model has: change times, repair, machine or rack, such as repair=4h")


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1e-6 <= factor <= 1e6:
        raise UserError(f"times is {text!r} in a failure model, but it is a number from 0.000001 to 1000000")
    return factor
