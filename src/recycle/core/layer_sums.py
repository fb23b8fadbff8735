"""LayerSums: the cost of any run of layers, as the difference of two sums that were rounded once.

The sums go over all layers of the model. At the boundaries of the stages they are the sums of the stages' own costs, so that a
whole stage costs exactly what its profile says, and a micro-batch costs the same in all, wherever it is cut.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise

from recycle.core.errors import UserError
from recycle.core.layer_shares import EQUAL, LayerShare, StageShares
from recycle.core.op import Kind
from recycle.core.profile import Profile, Spread, StageProfile

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


def with_layer_counts(profile: Profile, counts: Sequence[int]) -> Profile:
    """The profile of the same model with its layers distributed otherwise: so many of them are the own layers of each stage.

    A stage costs what its layers cost. What a stage sends is taken from the stage that had its last layer.

    Raises:
        UserError: There are not as many layers, or a stage would have none.
    """
    present = tuple(map(len, profile.layers))
    if tuple(counts) == present:
        return profile
    if len(counts) != len(present) or sum(counts) != sum(present) or min(counts) < 1:
        raise UserError(
            f"{sum(present)} layers at {len(present)} stages cannot be {', '.join(map(str, counts))}: give each stage one or more"
        )
    sums, shares = LayerSums(profile), [share for layers in profile.layers for share in layers]
    spreads = {
        each.name: sum(getattr(stage.spread, each.name) for stage in profile.stages)
        / sum(getattr(stage, each.name) for stage in profile.stages)
        for each in fields(Spread)
    }
    ranges = [range(start, stop) for start, stop in pairwise((0, *accumulate(counts)))]
    stages = tuple(_joined_stage(profile, sums, spreads, own) for own in ranges)
    return replace(profile, stages=stages, layers=tuple(_joined_shares(sums, shares, own) for own in ranges))


def _joined_stage(profile: Profile, sums: LayerSums, spreads: dict[str, float], own: range) -> StageProfile:
    costs = {name: sums.total(name, own) for name in sums.sums}
    for name in _TIMES.values():
        costs[name] = max(1, costs[name])
    costs["fused_us"] = max(costs["fused_us"], costs["input_us"])
    costs["weight_held_bytes"] = min(costs["weight_held_bytes"], costs["activation_bytes"])
    last = next(stage for stage, bound in enumerate(sums.bounds[1:]) if own[-1] < bound)
    # The output of the last stage is the loss, if it is anything: a boundary in its middle passes what the one before it does.
    is_inside_last = last == len(profile.stages) - 1 and own.stop < sums.num_layers
    output_bytes = profile.stages[max(0, last - 1) if is_inside_last else last].output_bytes
    spread = Spread(**{name: round(share * costs[name]) for name, share in spreads.items()})
    return StageProfile(**costs, output_bytes=output_bytes, spread=spread)


def _joined_shares(sums: LayerSums, shares: Sequence[LayerShare], own: range) -> StageShares:
    """The shares of layers that come from several stages: what they cost there, or the shares there where all cost nothing."""
    columns = {}
    for each in fields(LayerShare):
        weights = [
            [float(sums.total(name, range(layer, layer + 1))) for layer in own]
            for name, of in _SHARE_OF.items()
            if of == each.name
        ]
        given = [float(getattr(shares[layer], each.name)) for layer in own]
        columns[each.name] = next((column for column in (*weights, given) if sum(column)), [1.0] * len(own))
        if len(set(columns[each.name])) == 1:
            columns[each.name] = [getattr(EQUAL, each.name)] * len(own)
    return tuple(LayerShare(**{name: column[index] for name, column in columns.items()}) for index in range(len(own)))
