"""Tied parameters: one parameter that several stages hold, such as the token matrix of GPT-2 in its embedding and its head.

Every stage has its own copy. The copies start equal and stay equal, because each steps with the sum of all copies' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Tie:
    """One tied parameter: the stages that hold it in ascending order, each with the parameter's name in that stage."""

    names: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.names)

    def parameter(self, stage: int, module: nn.Module) -> Tensor:
        """The copy that the module of `stage` holds."""
        return module.get_parameter(dict(self.names)[stage])


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """Find every parameter that several stages hold as the same object, as after cutting a model into stages."""
    names: dict[int, list[tuple[int, str]]] = {}
    for number, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append((number, name))
    return [Tie(tuple(found)) for found in names.values() if len(found) > 1]


def counted_elsewhere(ties: Sequence[Tie], stage: int, module: nn.Module) -> set[int]:
    """The ids of the stage's tied parameters whose gradient counts in the norm of an earlier stage that holds them."""
    return {id(tie.parameter(stage, module)) for tie in ties if stage in tie.stages[1:]}
