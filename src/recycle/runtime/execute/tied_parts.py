"""TiedPart: parameters that several stages hold and that are summed in one go, and when a worker has nothing to add any more.

A tie is summed in parts, one for each home: the stage whose own the parameters are, and whose rows use them to the end. All
workers sum in the order of homes, because the rows of a later stage end later. So a stage steps its own layers when its own rows
have ended, and does not wait for those of the next stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recycle.core.op import Kind
from recycle.runtime.compute.elastic_stage import guest_number, is_of_guest
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.row_program import Instruction


@dataclass(frozen=True, slots=True)
class TiedPart:
    """The parameters of a tie that have the same home, as this worker holds them.

    `complete_at` is the index of the last instruction that adds to their gradient; -1 if none does.
    """

    tie: Tie
    home: int
    parameters: Sequence[Tensor]
    has_guests_only: bool
    complete_at: int


def tied_parts(stage: Stage, ties: Sequence[Tie], instructions: Sequence[Instruction]) -> list[TiedPart]:
    """The parts that the workers of an elastic stage sum, in the order in which all workers do."""
    last_uses = _last_uses(instructions)
    parts = []
    for tie in (tie for tie in ties if stage.number in tie.stages):
        by_home: dict[int, list[tuple[str, Tensor]]] = {}
        for held, parameter in zip(tie.by_parameter(), tie.parameters(stage.number, stage.module), strict=True):
            home = max(number for number, name in held if not is_of_guest(name))
            by_home.setdefault(home, []).append((dict(held)[stage.number], parameter))
        for home, named in by_home.items():
            layers = {guest_number(name) if is_of_guest(name) else None for name, _ in named}
            complete_at = max(last_uses.get(layer, -1) if layer is not None else len(instructions) - 1 for layer in layers)
            parts.append(TiedPart(tie, home, [parameter for _, parameter in named], None not in layers, complete_at))
    return sorted(parts, key=lambda part: (part.home, part.tie.stages))


def _last_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each layer, the index of the last instruction that adds to its gradient, if instructions say what they compute."""
    return {
        layer: index
        for index, each in enumerate(instructions)
        if each.kind in (Kind.B, Kind.W) and each.layers is not None
        for layer in each.layers
    }
