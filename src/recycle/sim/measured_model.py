"""MeasuredModel and MeasuredDevice: a measured profile in the place of a model's and a GPU's numbers in a simulated job.

The profile says what every layer costs: its share of the costs of its stage. So the model can be cut into other stages than those
that were measured, which systems do that choose their depth or move layers. Cut as it was measured, its costs are the measured
ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median

from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.profile import Link, Profile, Spread, StageProfile
from recycle.planner.profiles.estimate import LayerCost

# A LayerCost counts parameters; this many bytes of state stand for one, as in the rest of the simulator.
_STATE_BYTES = 18
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """What a measured profile does not say of its device: the memory; and the link to other workers, which it does."""

    name: str
    memory_bytes: int
    inter_node: Link


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model by its measured profile, which lists the layers of each stage.

    `sequence` is the number of tokens of a sample, 0 if it is not known.
    """

    profile: Profile
    microbatch: int
    sequence: int = 0

    def __post_init__(self) -> None:
        if not self.profile.layers:
            raise UserError(
                f"the profile ({self.profile.name}) does not list the layers of its stages, which systems need that cut the "
                "model anew: give --layers N if all layers are alike"
            )

    @property
    def name(self) -> str:
        return self.profile.taken.model if self.profile.taken else self.profile.name

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.profile.layers))

    @property
    def num_parameters(self) -> int:
        """By the gradients that peers sum, as if each had four bytes."""
        return sum(stage.gradient_bytes for stage in self.profile.stages) // _GRADIENT_BYTES

    def profile_of(self, layers: tuple[int, ...]) -> Profile:
        """The profile if the stages have so many layers."""
        return _recut(self.profile, layers)

    def profile_with(self, num_stages: int) -> Profile:
        """The profile of so many stages: as measured, or cut so that the slowest stage is as fast as possible."""
        if num_stages == len(self.profile.stages):
            return self.profile
        if not 1 <= num_stages <= self.num_layers:
            raise UserError(
                f"{num_stages} stages are more than the {self.num_layers} layers of the profile: every stage needs one"
            )
        return self.profile_of(even_cut(tuple(_time_us(one) for one in _layer_stages(self.profile)), num_stages))

    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Embedding, layers and head, for systems that take all layers as equal: as the median one.

        What the first and the last layer cost more than that counts as embedding and head.
        """
        layers = [_cost(one) for one in _layer_stages(self.profile)]
        plain = LayerCost(*(median(values) for values in zip(*map(_numbers, layers), strict=True)))
        return (_beyond(layers[0], plain), *[plain] * len(layers), _beyond(layers[-1], plain))


def measured(
    profile: Profile, memory_bytes: int, microbatch: int | None = None, sequence: int = 0
) -> tuple[MeasuredModel, MeasuredDevice]:
    """The model and the device of a profile; a micro-batch has as many samples as it was measured with, unless they are given."""
    samples = microbatch or (profile.taken.samples if profile.taken else 1)
    device = MeasuredDevice(profile.taken.machine if profile.taken else "device", memory_bytes, profile.peer_link)
    return MeasuredModel(profile, samples, sequence), device


@lru_cache(maxsize=1024)
def even_cut(times: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """How many consecutive layers each stage gets, at least one, so that the slowest stage is as fast as possible."""
    total = [0.0, *accumulate(times)]
    # best[n]: the least slowest stage of the first n layers in the stages so far, and where its last stage begins
    best = [(total[end], 0) for end in range(len(times) + 1)]
    chosen = [best]
    for stage in range(2, num_stages + 1):
        best = [
            min(((max(best[cut][0], total[end] - total[cut]), cut) for cut in range(stage - 1, end)), default=(float("inf"), 0))
            for end in range(len(times) + 1)
        ]
        chosen.append(best)
    ends = [len(times)]
    for row in reversed(chosen[1:]):
        ends.append(row[ends[-1]][1])
    return tuple(end - start for start, end in pairwise([0, *reversed(ends)]))


@lru_cache(maxsize=256)
def _recut(profile: Profile, layers: tuple[int, ...]) -> Profile:
    if layers == tuple(map(len, profile.layers)):
        return profile
    each = _layer_stages(profile)
    if sum(layers) != len(each) or min(layers) < 1:
        raise UserError(f"the split {', '.join(map(str, layers))} does not give the {len(each)} layers of the profile to stages")
    bounds = [0, *accumulate(layers)]
    boundary_bytes = max(stage.output_bytes for stage in profile.stages)
    stages = tuple(_sum(each[start:end], boundary_bytes if end < len(each) else 0) for start, end in pairwise(bounds))
    shares = [_absolute(one) for one in each]
    return replace(profile, stages=stages, layers=tuple(tuple(shares[start:end]) for start, end in pairwise(bounds)), factors=())


_COSTS = {
    "forward": ("forward_us",),
    "input": ("input_us",),
    "weight": ("weight_us",),
    "activation": ("activation_bytes", "weight_held_bytes"),
    "parameters": ("optimizer_us", "static_bytes", "gradient_bytes"),
}
_LayerNumbers = dict[str, float]


@lru_cache(maxsize=64)
def _layer_stages(profile: Profile) -> tuple[_LayerNumbers, ...]:
    """The costs of each layer, as fractions of those of its stage."""
    found: list[_LayerNumbers] = []
    for stage, own in zip(profile.stages, profile.layers, strict=True):
        whole = {field: sum(getattr(share, field) for share in own) for field in _COSTS}
        for share in own:
            numbers = {
                name: getattr(stage, name) * getattr(share, field) / whole[field]
                for field, names in _COSTS.items()
                for name in names
            }
            split = stage.input_us + stage.weight_us
            numbers["fused_us"] = stage.fused_us * (numbers["input_us"] + numbers["weight_us"]) / split
            found.append(numbers)
    return tuple(found)


def _time_us(layer: _LayerNumbers) -> float:
    return layer["forward_us"] + layer["fused_us"]


def _sum(layers: Sequence[_LayerNumbers], output_bytes: int) -> StageProfile:
    total = {name: round(sum(layer[name] for layer in layers)) for name in layers[0]}
    for name in ("forward_us", "input_us", "weight_us", "fused_us"):
        total[name] = max(1, total[name])
    total["fused_us"] = max(total["fused_us"], total["input_us"])
    total["weight_held_bytes"] = min(total["weight_held_bytes"], total["activation_bytes"])
    return StageProfile(**total, output_bytes=output_bytes, spread=Spread())


def _absolute(layer: _LayerNumbers) -> LayerShare:
    """The share of a layer in any stage: its own costs, since only ratios count."""
    return LayerShare(*(max(layer[names[-1]], 1e-9) for names in _COSTS.values()))


def _cost(layer: _LayerNumbers) -> LayerCost:
    parameters = layer["static_bytes"] / _STATE_BYTES
    return LayerCost(layer["forward_us"], layer["fused_us"], parameters, layer["activation_bytes"])


def _numbers(cost: LayerCost) -> tuple[float, float, float, float]:
    return cost.forward_us, cost.backward_us, cost.num_parameters, cost.activation_bytes


def _beyond(cost: LayerCost, plain: LayerCost) -> LayerCost:
    """What a layer costs more than a plain one."""
    return LayerCost(*(max(0.0, one - other) for one, other in zip(_numbers(cost), _numbers(plain), strict=True)))
