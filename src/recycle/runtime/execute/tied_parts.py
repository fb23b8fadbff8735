"""TiedPart: parameters that several stages hold and that are summed in one go, and when a worker has nothing to add any more.

A tie is summed in parts. All workers sum in one order, that of `core.plans.sum_order`, in which the stage's other layers have a
place, too: the use of parts before it ends no later by the plan; those after it may be late.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recycle.core.op import Kind
from recycle.core.plans.sum_order import OWN_SUM
from recycle.runtime.compute.elastic_stage import ElasticStage, guest_number, is_of_guest
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.row_program import Instruction


@dataclass(frozen=True, slots=True)
class TiedPart:
    """Parameters of a tie, as this worker holds them.

    `layers` are theirs; None if they are not those of shared layers, but for example of an embedding that is tied to the head.
    `complete_at` is the index of the last instruction that adds to their gradient; -1 if none does.
    """

    tie: Tie
    parameters: Sequence[Tensor]
    layers: frozenset[int] | None
    complete_at: int


def tied_parts(
    stage: Stage, ties: Sequence[Tie], instructions: Sequence[Instruction], sum_order: Sequence[Sequence[int]]
) -> tuple[list[TiedPart], list[TiedPart]]:
    """The parts that the workers of an elastic stage sum before the stage's other layers, and after them, in their order."""
    order, last, last_uses = list(map(tuple, sum_order)), len(instructions) - 1, _last_uses(stage, instructions)
    places: dict[int | None, int] = {layer: place for place, layers in enumerate(order) for layer in layers}
    found: list[tuple[int, TiedPart]] = []
    for tie in (tie for tie in ties if stage.number in tie.stages):
        by_place: dict[int, list[Tensor]] = {}
        for held, parameter in zip(tie.by_parameter(), tie.parameters(stage.number, stage.module), strict=True):
            # Parameters of no shared layer come last: they are used to the end of several stages.
            by_place.setdefault(places.get(_layer_of(held), len(order)), []).append(parameter)
        for place, parameters in by_place.items():
            layers = frozenset(order[place]) if place < len(order) else None
            complete_at = max(last_uses.get(layer, -1) for layer in layers) if layers is not None else last
            found.append((place, TiedPart(tie, parameters, layers, complete_at)))
    found.sort(key=lambda item: (item[0], item[1].tie.stages))
    own_place = order.index(OWN_SUM)
    return [part for place, part in found if place < own_place], [part for place, part in found if place > own_place]


def _layer_of(held: Sequence[tuple[int, str]]) -> int | None:
    """The number of the layer of a parameter that several stages hold; None if it is the own of several, or no guest anywhere."""
    guests = [name for _, name in held if is_of_guest(name)]
    return guest_number(guests[0]) if len(guests) == len(held) - 1 and guests else None


def _last_uses(stage: Stage, instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each layer, the index of the last instruction that adds to its gradient."""
    assert isinstance(stage.module, ElasticStage)
    own = stage.module.own_layers
    adding = (Kind.B, Kind.W)
    return {
        layer: index
        for index, each in enumerate(instructions)
        if each.kind in adding
        for layer in (own if each.layers is None else each.layers)
    }
