"""Problem, Memory and Techniques: all input that decides whether a plan is legal and how long it takes.

They are in core, not in the planner, because a plan on disk must be checkable without a planner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.held_layers import HeldLayers
from recycle.core.layers import StageLayers
from recycle.core.op import Kind
from recycle.core.profile import Profile
from recycle.core.units import format_bytes

MOST_SHARED_LAYERS = 26
_LEAST_SPEED, _MOST_SPEED = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class Techniques:
    """The three techniques of ReCycle, each on or off. With none of them, a plan is a classic 1F1B schedule.

    Args:
        adaptive: Adaptive Pipelining: peers execute the micro-batches of a dead worker.
        decoupled: Decoupled BackProp: a backward pass may be split into I and W.
        staggered: Staggered Optimizer: a stage steps when its own gradients are reduced.

    Example:
        >>> Techniques.parse("adaptive,decoupled").staggered
        False
    """

    adaptive: bool = True
    decoupled: bool = True
    staggered: bool = True

    NAMES = ("adaptive", "decoupled", "staggered")

    @staticmethod
    def parse(text: str) -> "Techniques":
        names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
        return Techniques.of(names)

    @staticmethod
    def of(names: Iterable[str]) -> "Techniques":
        chosen = set(names)
        if unknown := sorted(chosen - set(Techniques.NAMES)):
            raise UserError(f"{unknown[0]!r} is not a technique: choose from {', '.join(Techniques.NAMES)}, or none")
        return Techniques(*(name in chosen for name in Techniques.NAMES))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in Techniques.NAMES if getattr(self, name))

    def __str__(self) -> str:
        return ",".join(self.names) or "none"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory limit of a worker of each stage; `unit` is "microbatches", "bytes" or "unlimited".

    Raises:
        UserError: The unit is unknown, or a limit is not a whole number of at least 1.

    Example:
        >>> Memory.microbatches([4, 3, 2, 1]).unit
        'microbatches'
    """

    unit: str
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in ("microbatches", "bytes", "unlimited"):
            raise UserError(f"{self.unit!r} is not a unit of memory: it is microbatches, bytes or unlimited")
        for stage, limit in enumerate(self.limits):
            if not isinstance(limit, int):
                raise UserError(f"the memory of stage {stage} is {limit!r}, but it must be a whole number of at least 1")
            if limit > 10**15:
                raise UserError(f"the memory of stage {stage} is larger than a petabyte: that cannot be meant; write unlimited")
            if limit < 1:
                raise MemoryTooSmall(
                    f"the memory of stage {stage} is {limit} {self.unit}, too little for any schedule: the least that works is 1"
                )

    @staticmethod
    def unlimited() -> "Memory":
        return Memory("unlimited")

    @staticmethod
    def microbatches(limits: Iterable[int]) -> "Memory":
        return Memory("microbatches", tuple(limits))

    @staticmethod
    def bytes(limits: Iterable[int]) -> "Memory":
        return Memory("bytes", tuple(limits))


@dataclass(frozen=True, slots=True)
class Problem:
    """The input of the planner: cluster, profile, memory limit and techniques. `recycle.problem` makes one from texts.

    Args:
        cluster: The shape and the dead workers.
        profile: The costs of every stage; with `shared_layers`, of its layers too.
        memory: The memory limit of a worker of each stage.
        techniques: The techniques that a plan may use.
        speeds: Workers that are slower or faster than the profile says, each with its speed: at 0.6 an op takes 1 / 0.6 of its
            time. Speeds are counted in thousandths.
        shared_layers: How many layers on either side of a boundary both stages hold, so that micro-batches may be cut there.

    Raises:
        UserError: The parts do not fit together. `MemoryTooSmall`, if no schedule at all fits.

    Example:
        >>> from recycle.core.profile import Profile
        >>> Problem(Cluster(Shape(3, 4, 6)), Profile.uniform(4, 10, 13, 9)).shape.num_workers
        12
    """

    cluster: Cluster
    profile: Profile
    memory: Memory = Memory("unlimited")
    techniques: Techniques = Techniques()
    speeds: tuple[tuple[Worker, float], ...] = ()
    shared_layers: int = 0
    held_layers: HeldLayers | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_stages = self.shape.num_stages
        if len(self.profile.stages) != num_stages:
            raise UserError(
                f"the profile describes {len(self.profile.stages)} stages, but the cluster has {num_stages}: "
                "every stage needs its costs"
            )
        if self.cluster.failed and not self.techniques.adaptive:
            first = min(self.cluster.failed)
            raise UserError(f"{first} failed, but only the technique 'adaptive' can re-route its micro-batches: switch it on")
        if self.memory.unit != "unlimited" and len(self.memory.limits) != num_stages:
            raise UserError(
                f"memory is given for {len(self.memory.limits)} stages, but there are {num_stages}: "
                "give one number for all stages or one for each"
            )
        self._settle_speeds()
        self._settle_layers()
        for stage in range(num_stages):
            self._refuse_too_little_memory(stage)

    def _settle_speeds(self) -> None:
        """Check the speeds, round them to thousandths, sort them, and leave those of 1 out."""
        for worker, speed in self.speeds:
            if worker not in self.shape:
                raise UserError(f"{worker} has a speed, but is not a worker of this cluster: {self.shape.ranges}")
            if isinstance(speed, bool) or not isinstance(speed, int | float) or not _LEAST_SPEED <= speed <= _MOST_SPEED:
                raise UserError(
                    f"the speed of {worker} is {speed!r}, but it must be a number from {_LEAST_SPEED} to {_MOST_SPEED:g}: "
                    "0.6 is 60 % of the profile's speed"
                )
        if len({worker for worker, _ in self.speeds}) < len(self.speeds):
            raise UserError("a worker has two speeds: give each worker one")
        rounded = sorted((worker, round(float(speed), 3)) for worker, speed in self.speeds)
        object.__setattr__(self, "speeds", tuple((worker, speed) for worker, speed in rounded if speed != 1))

    def _settle_layers(self) -> None:
        shared = self.shared_layers
        if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared <= MOST_SHARED_LAYERS:
            raise UserError(f"shared_layers is {shared!r}, but it must be a whole number from 0 to {MOST_SHARED_LAYERS}")
        live = [self.cluster.num_live(stage) for stage in range(self.shape.num_stages)]
        object.__setattr__(self, "held_layers", HeldLayers(self.profile, shared, live) if shared else None)

    def _refuse_too_little_memory(self, stage: int) -> None:
        capacity = self.capacity(stage)
        if capacity is None or capacity >= self.held_by_forward(stage):
            return
        costs, static = self.profile.stages[stage], self.static_bytes(stage)
        least = static + costs.activation_bytes
        raise MemoryTooSmall(
            f"stage {stage} has {format_bytes(self.memory.limits[stage])} of memory, too little for any schedule: "
            f"the least that works is {format_bytes(least)} ({least} bytes: parameters and states {static}, "
            f"one micro-batch's activations {costs.activation_bytes})"
        )

    @property
    def shape(self) -> Shape:
        return self.cluster.shape

    @property
    def stage_layers(self) -> StageLayers | None:
        """Which layers each stage holds; None if the profile does not say what layers there are."""
        return StageLayers(self.layer_counts, self.shared_layers) if self.profile.layers else None

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The number of layers that are each stage's own; empty if the profile does not say what layers there are."""
        return tuple(map(len, self.profile.layers))

    def duration_us(self, stage: int, kind: Kind) -> int:
        """The time of an op on all layers of its stage, and on no others, at the profile's speed; `OpCosts` knows the others."""
        return self.profile.stages[stage].duration_us(kind)

    def finish_us(self, stage: int) -> int:
        """Time from a stage's last gradient to the end of its optimizer step."""
        return self.reduce_us(stage) + self.optimizer_us(stage)

    def reduce_us(self, stage: int) -> int:
        """Time to reduce the gradients of all layers that a stage holds."""
        if self.held_layers is not None:
            return self.held_layers.reduce_us[stage]
        return self.profile.reduce_us(stage, self.cluster.num_live(stage))

    def optimizer_us(self, stage: int) -> int:
        """Time to step all layers that a stage holds, at the profile's speed."""
        if self.held_layers is not None:
            return self.held_layers.optimizer_us[stage]
        return self.profile.stages[stage].optimizer_us

    def static_bytes(self, stage: int) -> int:
        """Parameters and states of all layers that a worker of `stage` holds."""
        if self.held_layers is not None:
            return self.held_layers.static_bytes[stage]
        return self.profile.stages[stage].static_bytes

    def capacity(self, stage: int) -> int | None:
        """The memory for activations on a worker of `stage`, in the unit of the limit; None if unlimited.

        With shared layers, a limit in micro-batches counts layers: so many times the layers of the stage. A micro-batch of which
        fewer layers are computed there takes less.
        """
        if self.memory.unit == "unlimited":
            return None
        if self.memory.unit == "microbatches":
            return self.memory.limits[stage] * self._num_counted(stage)
        return self.memory.limits[stage] - self.static_bytes(stage)

    def _num_counted(self, stage: int) -> int:
        """How much a whole micro-batch counts in a limit in micro-batches: 1, or with shared layers the layers of the stage."""
        return 1 if self.held_layers is None else len(self.profile.layers[stage])

    def held_by_forward(self, stage: int) -> int:
        """The memory that F takes on the layers of the stage, in the unit of the limit."""
        return self.profile.stages[stage].activation_bytes if self.memory.unit == "bytes" else self._num_counted(stage)

    def held_for_weight(self, stage: int) -> int:
        """The part of it that remains between I and W."""
        return self.profile.stages[stage].weight_held_bytes if self.memory.unit == "bytes" else self._num_counted(stage)

    def memory_delta(self, stage: int, kind: Kind) -> int:
        """How an op changes the memory held: F when it starts, the others when they end."""
        whole, rest = self.held_by_forward(stage), self.held_for_weight(stage)
        return {Kind.F: whole, Kind.I: rest - whole, Kind.W: -rest, Kind.B: -whole}[kind]

    def to_json(self) -> dict[str, Any]:
        shape = self.shape
        made: dict[str, Any] = {
            "shape": {"pipelines": shape.num_pipelines, "stages": shape.num_stages, "microbatches": shape.num_microbatches},
            "failed": [str(worker) for worker in sorted(self.cluster.failed)],
            "techniques": list(self.techniques.names),
            "memory": {"unit": self.memory.unit, "limits": list(self.memory.limits)},
            "profile": self.profile.to_json(),
        }
        if self.speeds:
            made["speeds"] = {str(worker): speed for worker, speed in self.speeds}
        if self.shared_layers:
            made["shared_layers"] = self.shared_layers
        return made

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Problem":
        shape = Shape(data["shape"]["pipelines"], data["shape"]["stages"], data["shape"]["microbatches"])
        return Problem(
            Cluster.of(shape, map(Worker.parse, data["failed"])),
            Profile.from_json(data["profile"]),
            Memory(data["memory"]["unit"], tuple(data["memory"]["limits"])),
            Techniques.of(data["techniques"]),
            tuple((Worker.parse(name), speed) for name, speed in data.get("speeds", {}).items()),
            data.get("shared_layers", 0),
        )
