"""Profile: the cost of each op at each stage in microseconds and bytes, and the links between workers."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from recycle.core.errors import UserError
from recycle.core.files import read_json
from recycle.core.layer_shares import EQUAL, StageShares, refuse_bad_shares, shares_from_json, shares_to_json
from recycle.core.op import Kind

FORMAT, VERSION = "recycle-profile", 1
_Part = TypeVar("_Part")
QUARTILE = 0.6745  # of a normal distribution, in standard deviations
_MOST = 10**15  # 30 years in µs, a petabyte in bytes: more is a mistake, and sums could exceed 64 bits


def _refuse_out_of_range(what: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{what} is {value!r}, but it must be a whole number of at least {least}")
    if value > _MOST:
        raise UserError(f"{what} is larger than {_MOST}: that cannot be meant")


@dataclass(frozen=True, slots=True)
class Link:
    """A connection: a message takes `latency_us` plus its bytes over `bytes_per_us`."""

    latency_us: int = 0
    bytes_per_us: float = 1.0

    def __post_init__(self) -> None:
        _refuse_out_of_range("a link's latency_us", self.latency_us, 0)
        if not (isinstance(self.bytes_per_us, int | float) and 1e-9 <= self.bytes_per_us <= sys.float_info.max):
            raise UserError(f"a link's bytes_per_us is {self.bytes_per_us!r}, but it must be a finite number above 0")

    def time_us(self, size_bytes: int) -> int:
        return self.latency_us + math.ceil(size_bytes / self.bytes_per_us)


# A link that was not measured: within a machine, messages cost next to nothing beside ops.
FREE_LINK = Link(bytes_per_us=1e9)


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of measured durations: half their interquartile range in µs; 0 where nothing was measured."""

    forward_us: int = 0
    input_us: int = 0
    weight_us: int = 0
    fused_us: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _refuse_out_of_range(f"the spread {field.name}", getattr(self, field.name), 0)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Costs of one stage. Activations are per micro-batch; `weight_held_bytes` of them stay between I and W."""

    forward_us: int
    input_us: int
    weight_us: int
    fused_us: int
    optimizer_us: int = 0
    activation_bytes: int = 0
    weight_held_bytes: int = 0
    static_bytes: int = 0
    gradient_bytes: int = 0
    output_bytes: int = 0
    spread: Spread = Spread()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "spread":
                continue
            least = 1 if field.name in ("forward_us", "input_us", "weight_us", "fused_us") else 0
            _refuse_out_of_range(field.name, getattr(self, field.name), least)
        if self.weight_held_bytes > self.activation_bytes:
            raise UserError(
                f"weight_held_bytes is {self.weight_held_bytes}, more than activation_bytes {self.activation_bytes}: "
                "W can only keep what F stored"
            )
        if self.fused_us < self.input_us:
            raise UserError(f"fused_us is {self.fused_us}, less than input_us {self.input_us}: a whole backward contains I")

    def duration_us(self, kind: Kind) -> int:
        return {Kind.F: self.forward_us, Kind.I: self.input_us, Kind.W: self.weight_us, Kind.B: self.fused_us}[kind]


@dataclass(frozen=True, slots=True)
class Taken:
    """The conditions of a measured profile: device and machine, the model, and how many pipelines computed at the same time."""

    device: str
    machine: str
    torch: str
    pipelines: int
    samples: int
    model: str

    def __post_init__(self) -> None:
        for name in ("device", "machine", "torch", "model"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"the profile was taken on a {name} of {getattr(self, name)!r}, but that must be a text")
        for name in ("pipelines", "samples"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"the profile was taken with {value!r} {name}, but it must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of every stage, measured, estimated or given.

    Args:
        stages: The costs of each stage.
        stage_link: The link between two stages.
        peer_link: The link between peers, for reductions and copies of state.
        device_bytes: The memory of a device, if known.
        name: Where the profile comes from, in a few words.
        taken: The conditions of the measurement, if it was measured.
        factors: How much slower than the median each worker was in the measurement.
        contention: The duration of an op while 0, 1, 2, ... other workers compute on the same machine, over its cost here.
        layers: The layers of each stage with their shares of its costs, if known. The layers at which micro-batches may be cut
            have outputs of equal size: a message to the next stage takes as long wherever the cut is.

    Raises:
        UserError: A number is out of range.

    Example:
        >>> Profile.uniform(4, forward_us=10, input_us=13, weight_us=9).stages[0].fused_us
        22
    """

    stages: tuple[StageProfile, ...]
    stage_link: Link = Link()
    peer_link: Link = Link()
    device_bytes: int | None = None
    name: str = "given"
    taken: Taken | None = None
    factors: tuple[float, ...] = ()
    contention: tuple[float, ...] = ()
    layers: tuple[StageShares, ...] = ()

    def __post_init__(self) -> None:
        for name in ("factors", "contention"):
            if not all(_is_above_zero(one) for one in getattr(self, name)):
                raise UserError(f"the profile's {name} cannot be read: each must be a finite number above 0")
        if not self.stages:
            raise UserError("the profile has no stage: give at least one")
        if self.layers:
            refuse_bad_shares(self.layers, len(self.stages))
        if self.device_bytes is not None and (not isinstance(self.device_bytes, int) or not 1 <= self.device_bytes <= _MOST):
            raise UserError(f"device_bytes is {self.device_bytes!r}, but it must be a whole number from 1 to {_MOST}")

    @staticmethod
    def uniform(num_stages: int, forward_us: int, input_us: int, weight_us: int, comm_us: int = 0) -> "Profile":
        """Make the profile of equal stages from three costs, where a fused backward takes I + W."""
        stage = StageProfile(forward_us, input_us, weight_us, fused_us=input_us + weight_us)
        name = f"costs {forward_us},{input_us},{weight_us} comm {comm_us}"
        return Profile((stage,) * num_stages, stage_link=Link(latency_us=comm_us), name=name)

    def comm_us(self, lower_stage: int) -> int:
        """Time between `lower_stage` and the next one; the gradient on its way back is as large as the activation."""
        return self.stage_link.time_us(self.stages[lower_stage].output_bytes)

    def reduce_us(self, stage: int, num_live: int) -> int:
        """Time of a ring all-reduce of the stage's gradients over its live peers."""
        return self.ring_us(self.stages[stage].gradient_bytes, num_live)

    def ring_us(self, size_bytes: int, num_live: int) -> int:
        """Time of a ring all-reduce of so many bytes over so many workers."""
        if num_live < 2:
            return 0
        share = size_bytes / num_live
        steps = 2 * (num_live - 1)
        return steps * self.peer_link.latency_us + math.ceil(steps * share / self.peer_link.bytes_per_us)

    def with_equal_layers(self, num_layers: int) -> "Profile":
        """The profile with `num_layers` equal layers, as many in each stage."""
        each, rest = divmod(num_layers, len(self.stages))
        if rest or each < 1:
            raise UserError(
                f"{num_layers} layers cannot be divided equally over {len(self.stages)} stages: give a multiple of "
                f"{len(self.stages)}, or a profile that lists the layers of each stage"
            )
        return self.with_layers([each] * len(self.stages))

    def with_layers(self, num_layers: Sequence[int]) -> "Profile":
        """The profile with so many equal layers in each stage."""
        return replace(self, layers=tuple((EQUAL,) * each for each in num_layers))

    def held_up(self, num_others: int) -> float:
        """The duration of an op while `num_others` compute, over its cost; beyond the most that were measured, as with those."""
        return self.contention[min(num_others, len(self.contention) - 1)] if self.contention else 1.0

    @property
    def jitter(self) -> float:
        """The standard deviation of an op's duration, as a share of it, if durations are normal; 0 if none was measured."""
        pairs = (
            (getattr(stage.spread, field.name), getattr(stage, field.name)) for stage in self.stages for field in fields(Spread)
        )
        return float(median(spread / took for spread, took in pairs)) / QUARTILE

    def to_json(self) -> dict[str, Any]:
        made = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("taken", "factors", "contention"):
            if not made[name]:
                del made[name]
        del made["layers"]
        if self.layers:
            made["layers"] = shares_to_json(self.layers)
        for stage, written in zip(self.stages, made["stages"], strict=True):
            if stage.spread == Spread():
                del written["spread"]
        return made

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Profile":
        stages = data.get("stages")
        if not isinstance(stages, list | tuple):
            raise UserError("the profile has no list of stages: give one object for each stage under 'stages'")
        made = tuple(_stage_from_json(number, stage) for number, stage in enumerate(stages))
        return Profile(
            made,
            stage_link=_part(Link, data.get("stage_link", {}), "links are"),
            peer_link=_part(Link, data.get("peer_link", {}), "links are"),
            device_bytes=data.get("device_bytes"),
            name=str(data.get("name", "given")),
            taken=_part(Taken, data["taken"], "notes on what it was taken on are") if data.get("taken") is not None else None,
            factors=_numbers(data.get("factors", []), "factors"),
            contention=_numbers(data.get("contention", []), "contention"),
            layers=shares_from_json(data.get("layers", [])),
        )

    @staticmethod
    def load(path: Path) -> "Profile":
        try:
            return Profile.from_json(read_json(path, FORMAT, VERSION))
        except UserError as problem:
            raise type(problem)(f"profile {path}: {problem}") from None


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _numbers(data: Any, what: str) -> tuple[float, ...]:
    if not isinstance(data, list | tuple):
        raise UserError(f"the profile's {what} cannot be read: give a list of numbers")
    return tuple(data)


def _part(kind: Callable[..., _Part], data: Any, what: str) -> _Part:
    """Make a part of the profile from its JSON object; `what` is its name in an error."""
    try:
        return kind(**data)
    except TypeError as problem:
        raise UserError(f"the profile's {what} malformed: {problem}") from None


def _stage_from_json(number: int, data: Any) -> StageProfile:
    if not isinstance(data, Mapping):
        raise UserError(f"stage {number} is missing: it is {data!r} instead of an object with its costs")
    known = {field.name for field in fields(StageProfile)}
    if unknown := sorted(set(data) - known):
        raise UserError(f"stage {number} has unknown keys {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    if missing := [name for name in ("forward_us", "input_us", "weight_us", "fused_us") if name not in data]:
        raise UserError(f"stage {number} lacks {', '.join(missing)}: every stage needs its four costs")
    try:
        return StageProfile(**{**data, "spread": Spread(**data.get("spread", {}))})
    except TypeError as problem:
        raise UserError(f"stage {number}: its spread is malformed: {problem}") from None
    except UserError as problem:
        raise UserError(f"stage {number}: {problem}") from None
