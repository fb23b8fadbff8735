"""Tied parameters: one parameter that several stages hold, such as the token matrix of GPT-2 in its embedding and its head.

Every stage has its own copy. The copies start equal and stay so, because each is stepped with the sum of the gradients of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Tie:
    """The places of one parameter: its name in each stage that holds it, by stage in ascending order."""

    places: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.places)

    def parameter(self, stage: int, module: nn.Module) -> Tensor:
        """The copy that the module of `stage` holds."""
        return module.get_parameter(dict(self.places)[stage])


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """Every parameter that more than one of the stages hold: the very same object, as when a model was cut into parts."""
    places: dict[int, list[tuple[int, str]]] = {}
    for number, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                places.setdefault(id(parameter), []).append((number, name))
    return [Tie(tuple(found)) for found in places.values() if len(found) > 1]


def counted_elsewhere(ties: Sequence[Tie], stage: int, module: nn.Module) -> set[int]:
    """The ids of the stage's parameters whose gradient is part of another stage's norm: a tied one counts where it is first."""
    return {id(tie.parameter(stage, module)) for tie in ties if stage in tie.stages[1:]}
