"""Tied parameters: those that several stages hold, such as the token matrix of GPT-2 in its embedding and its head.

Every stage has its own copies. The copies start equal and stay equal, because each steps with the sum of all copies' gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recycle.runtime.compute.elastic_stage import ElasticStage, is_of_guest
from recycle.runtime.compute.gradients import Sums


@dataclass(frozen=True, slots=True)
class Tie:
    """All parameters that the same stages hold: these stages in ascending order, each with the names of the parameters there."""

    names: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.names)

    def parameters(self, stage: int, module: nn.Module) -> list[Tensor]:
        """The copies that the module of `stage` holds, in the same order at every stage."""
        return [module.get_parameter(name) for name in dict(self.names)[stage]]

    def by_parameter(self) -> list[list[tuple[int, str]]]:
        """For each parameter, its stages with its name in each."""
        stages, names = zip(*self.names, strict=True)
        return [list(zip(stages, each, strict=True)) for each in zip(*names, strict=True)]


def find_ties(stages: Sequence[nn.Module]) -> list[Tie]:
    """Find every parameter that several stages hold as the same object, as after cutting a model into stages."""
    holders: dict[int, list[tuple[int, str]]] = {}
    for number, module in enumerate(stages):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                holders.setdefault(id(parameter), []).append((number, name))
    of_stages: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
    for found in holders.values():
        numbers, names = zip(*found, strict=True)
        if len(numbers) > 1:
            of_stages.setdefault(numbers, []).append(names)
    ties = [Tie(tuple(zip(numbers, zip(*names, strict=True), strict=True))) for numbers, names in of_stages.items()]
    return sorted(ties, key=_turn)


def _turn(tie: Tie) -> tuple[int, int, tuple[int, ...]]:
    """The order in which all workers sum ties. Neighbours come in two turns: those of one turn do not wait for each other."""
    return len(tie.stages), tie.stages[0] % 2, tie.stages


def counted_elsewhere(ties: Sequence[Tie], stage: int, module: nn.Module) -> set[int]:
    """The ids of the stage's tied parameters whose gradient counts in the norm of another stage.

    It counts where the parameter is no guest, and in the first such stage: so the norm is the same whatever layers are shared.
    """
    may_be_guest = isinstance(module, ElasticStage)
    found: set[int] = set()
    for tie in (tie for tie in ties if stage in tie.stages):
        for held, parameter in zip(tie.by_parameter(), tie.parameters(stage, module), strict=True):
            counts_at = next(number for number, name in held if not (may_be_guest and is_of_guest(name)))
            if counts_at != stage:
                found.add(id(parameter))
    return found


def gather(sums: Sums, parameters: Sequence[Tensor]) -> Tensor:
    """The sums of the parameters and their marks in one tensor, to be summed over the stages of a tie in one go."""
    return torch.cat([part.reshape(-1) for parameter in parameters for part in sums.of(parameter)])


def scatter(gathered: Tensor, sums: Sums, parameters: Sequence[Tensor]) -> None:
    """Write back what `gather` has gathered."""
    parts = [part for parameter in parameters for part in sums.of(parameter)]
    values = torch.split(gathered, [part.numel() for part in parts])
    # In one go, because there are many small ones.
    torch._foreach_copy_(parts, [value.view(part.shape) for part, value in zip(parts, values, strict=True)])
