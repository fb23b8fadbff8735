"""Problem, Memory and Techniques: all input that decides whether a plan is legal and how long it takes.

They are in core, not in the planner, because a plan on disk must be checkable without a planner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.op import Kind
from recycle.core.profile import Profile
from recycle.core.units import format_bytes


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
        for stage in range(num_stages):
            self._refuse_too_little_memory(stage)

    def _refuse_too_little_memory(self, stage: int) -> None:
        capacity = self.capacity(stage)
        if capacity is None or capacity >= self.held_by_forward(stage):
            return
        costs = self.profile.stages[stage]
        least = costs.static_bytes + costs.activation_bytes
        raise MemoryTooSmall(
            f"stage {stage} has {format_bytes(self.memory.limits[stage])} of memory, too little for any schedule: "
            f"the least that works is {format_bytes(least)} ({least} bytes: parameters and states {costs.static_bytes}, "
            f"one micro-batch's activations {costs.activation_bytes})"
        )

    @property
    def shape(self) -> Shape:
        return self.cluster.shape

    def duration_us(self, stage: int, kind: Kind) -> int:
        return self.profile.stages[stage].duration_us(kind)

    def finish_us(self, stage: int) -> int:
        """Time from a stage's last gradient to the end of its optimizer step."""
        return self.reduce_us(stage) + self.profile.stages[stage].optimizer_us

    def reduce_us(self, stage: int) -> int:
        return self.profile.reduce_us(stage, self.cluster.num_live(stage))

    def capacity(self, stage: int) -> int | None:
        """The memory for activations on a worker of `stage`, in the unit of the limit; None if unlimited."""
        if self.memory.unit == "unlimited":
            return None
        static = self.profile.stages[stage].static_bytes if self.memory.unit == "bytes" else 0
        return self.memory.limits[stage] - static

    def held_by_forward(self, stage: int) -> int:
        """The memory that F takes, in the unit of the limit."""
        return self.profile.stages[stage].activation_bytes if self.memory.unit == "bytes" else 1

    def held_for_weight(self, stage: int) -> int:
        """The part of it that remains between I and W."""
        return self.profile.stages[stage].weight_held_bytes if self.memory.unit == "bytes" else 1

    def memory_delta(self, stage: int, kind: Kind) -> int:
        """How an op changes the memory held: F when it starts, the others when they end."""
        whole, rest = self.held_by_forward(stage), self.held_for_weight(stage)
        return {Kind.F: whole, Kind.I: rest - whole, Kind.W: -rest, Kind.B: -whole}[kind]

    def to_json(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "shape": {"pipelines": shape.num_pipelines, "stages": shape.num_stages, "microbatches": shape.num_microbatches},
            "failed": [str(worker) for worker in sorted(self.cluster.failed)],
            "techniques": list(self.techniques.names),
            "memory": {"unit": self.memory.unit, "limits": list(self.memory.limits)},
            "profile": self.profile.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Problem":
        shape = Shape(data["shape"]["pipelines"], data["shape"]["stages"], data["shape"]["microbatches"])
        return Problem(
            Cluster.of(shape, map(Worker.parse, data["failed"])),
            Profile.from_json(data["profile"]),
            Memory(data["memory"]["unit"], tuple(data["memory"]["limits"])),
            Techniques.of(data["techniques"]),
        )
