"""LayerShare: the share of one layer in the costs of its stage, and its form in a profile file.

A profile may say how many layers each stage has, and how the stage's costs are divided among them. Equal layers are written as a
number; unequal ones (the first with an embedding, the last with an output layer) as a list with one object for each layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from recycle.core.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerShare:
    """The weight of a layer beside the other layers of its stage: 2.0 costs twice as much as 1.0.

    Args:
        forward, input, weight: Of the times of F, I and W. A fused backward is divided as I and W together are.
        activation: Of the bytes of activations.
        parameters: Of the bytes of parameters, states and gradients, and of the time of the optimizer step.

    Raises:
        UserError: A weight is negative or not a finite number.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    activation: float = 1.0
    parameters: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:  # faster than asdict, and there are thousands of layers
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UserError(f"a layer's share {name} is {value!r}, but it must be a number of at least 0")


EQUAL = LayerShare()
StageShares = tuple[LayerShare, ...]


def refuse_bad_shares(shares: Sequence[StageShares], num_stages: int) -> None:
    """Raise unless there are layers for every stage, and of each cost some layer of a stage has a part."""
    if len(shares) != num_stages:
        raise UserError(f"the profile has layers for {len(shares)} stages, but costs for {num_stages}: give both for every stage")
    for stage, layers in enumerate(shares):
        if not layers:
            raise UserError(f"stage {stage} has no layer: every stage has at least one")
        for field in fields(LayerShare):
            if not sum(getattr(layer, field.name) for layer in layers):
                raise UserError(f"the layers of stage {stage} have no share of its cost '{field.name}': one must be above 0")


def shares_to_json(shares: Sequence[StageShares]) -> list[Any]:
    """One entry for each stage: the number of its layers if they are equal, else a list of objects."""
    return [
        len(layers) if set(layers) == {EQUAL} else [{k: v for k, v in asdict(one).items() if v != 1} for one in layers]
        for layers in shares
    ]


def shares_from_json(data: Any) -> tuple[StageShares, ...]:
    if not isinstance(data, list | tuple):
        raise UserError("the profile's layers cannot be read: give a list with one entry for each stage")
    return tuple(_stage_from_json(stage, entry) for stage, entry in enumerate(data))


def _stage_from_json(stage: int, entry: Any) -> StageShares:
    if isinstance(entry, int) and not isinstance(entry, bool) and entry > 0:
        return (EQUAL,) * entry
    if not isinstance(entry, list | tuple) or not all(isinstance(one, Mapping) for one in entry):
        raise UserError(f"the layers of stage {stage} are {entry!r}, but they are a number of at least 1 or a list of objects")
    known = {field.name for field in fields(LayerShare)}
    if unknown := sorted({name for one in entry for name in one} - known):
        raise UserError(f"a layer of stage {stage} has unknown keys {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return tuple(LayerShare(**one) for one in entry)
