"""LayerSums: the cost of any run of layers, as the difference of two sums that were rounded once.

The sums go over all layers of the model. At the boundaries of the stages they are the sums of the stages' own costs, so that a
whole stage costs exactly what its profile says, and a micro-batch costs the same in all, wherever it is cut.
"""

from collections.abc import Sequence
from itertools import accumulate

from recycle.core.layer_shares import LayerShare
from recycle.core.op import Kind
from recycle.core.profile import Profile, StageProfile

_TIMES = {Kind.F: "forward_us", Kind.I: "input_us", Kind.W: "weight_us", Kind.B: "fused_us"}
_SHARE_OF = {
    "forward_us": "forward",
    "input_us": "input",
    "weight_us": "weight",
    "optimizer_us": "parameters",
    "activation_bytes": "activation",
    "weight_held_bytes": "activation",
    "static_bytes": "parameters",
    "gradient_bytes": "parameters",
}


class LayerSums:
    """Sums of the costs of the layers from the first one on, by name of the cost in `StageProfile`, and the base boundaries.

    `bounds[s]` is the first layer of stage s, and the last entry the number of layers.
    """

    def __init__(self, profile: Profile) -> None:
        assert profile.layers, "the profile says nothing about layers"
        self.bounds = (0, *accumulate(map(len, profile.layers)))
        self.sums = {name: _sums(profile, name, share) for name, share in _SHARE_OF.items()}
        # A fused backward is I and W and a difference, so that it equals their sum everywhere if it does in the whole stage.
        extra = _rounded(
            [stage.fused_us - stage.input_us - stage.weight_us for stage in profile.stages],
            [_fused_shares(stage, layers) for stage, layers in zip(profile.stages, profile.layers, strict=True)],
        )
        both = zip(self.sums["input_us"], self.sums["weight_us"], extra, strict=True)
        self.sums["fused_us"] = tuple(split + weight + more for split, weight, more in both)

    @property
    def num_layers(self) -> int:
        return self.bounds[-1]

    def total(self, name: str, layers: range) -> int:
        """The cost `name` of a run of layers."""
        sums = self.sums[name]
        return sums[layers.stop] - sums[layers.start]

    def duration_us(self, kind: Kind, layers: range) -> int:
        """The time of an op on these layers, at least 1 µs."""
        return max(1, self.total(_TIMES[kind], layers))

    def times(self, kind: Kind) -> tuple[int, ...]:
        """The sums of the times of a kind."""
        return self.sums[_TIMES[kind]]


def _sums(profile: Profile, name: str, share: str) -> tuple[int, ...]:
    shares = [[getattr(layer, share) for layer in layers] for layers in profile.layers]
    return _rounded([getattr(stage, name) for stage in profile.stages], shares)


def _rounded(costs: Sequence[int], shares: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Divide the cost of each stage by shares; return the sums, each rounded once, halves up."""
    made = [0]
    for cost, weights in zip(costs, shares, strict=True):
        base, whole = made[-1], sum(weights)
        parts = [
            base + int(cost * part / whole + 0.5) if cost >= 0 else base - int(-cost * part / whole + 0.5)
            for part in accumulate(weights)
        ]
        made += [*parts[:-1], base + cost]
    return tuple(made)


def _fused_shares(stage: StageProfile, layers: Sequence[LayerShare]) -> list[float]:
    splits, weights = sum(layer.input for layer in layers), sum(layer.weight for layer in layers)
    return [stage.input_us * layer.input / splits + stage.weight_us * layer.weight / weights for layer in layers]
