"""`ElasticStage`: a stage that also holds layers of its neighbours, and computes any range of all of them.

A layer that a stage holds for a neighbour is a guest there. Its parameters are tied: every holder steps with the sum of all
holders' gradients. So it makes no difference to the weights which stage computes a layer of a micro-batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn

from recycle.core.errors import Uncuttable
from recycle.core.layers import held_ranges

OWN, _GUESTS = "own.", "guests."
"""The beginnings of the names of parameters and buffers."""


class ElasticStage(nn.Module):
    """A stage `own`, whose layers are `own_layers` of the model, and guests by their number in the model.

    The guests are the very modules of the neighbours, until the stage is copied: so their parameters are found as tied.
    """

    def __init__(self, own: nn.Module, own_layers: range, guests: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.own, self.own_layers = own, own_layers
        self.guests = nn.ModuleDict({str(number): module for number, module in guests.items()})
        # A tuple, so that the layers of `own` are not registered a second time.
        self._layers = tuple(layers_of(own))
        assert len(self._layers) == len(own_layers)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.own(x)
        return made

    def layer(self, number: int) -> nn.Module:
        if number in self.own_layers:
            return self._layers[number - self.own_layers.start]
        return self.guests[str(number)]


def layers_of(stage: nn.Module) -> Sequence[nn.Module]:
    """The layers of a stage, which one after the other compute what the stage does.

    They are the modules of an `nn.Sequential`, or what the stage's method `split_into_layers` returns.

    Raises:
        Uncuttable: The stage does not say what its layers are.
    """
    if isinstance(stage, nn.Sequential) and type(stage).forward is nn.Sequential.forward:
        return list(stage)
    split = getattr(stage, "split_into_layers", None)
    if split is None:
        raise Uncuttable(
            f"a stage of type {type(stage).__name__} cannot share layers: make it an nn.Sequential, or give it a method "
            "split_into_layers() that returns its layers"
        )
    return list(split())


def held_layers(stage: nn.Module, own_layers: range | None) -> dict[int, nn.Module]:
    """The layers that a stage holds, guests included, by their numbers in the model; none if nobody knows its own layers."""
    if isinstance(stage, ElasticStage):
        return {number: stage.layer(number) for number in sorted([*stage.own_layers, *map(int, stage.guests)])}
    return dict(zip(own_layers, layers_of(stage), strict=True)) if own_layers is not None else {}


def shares_parameters(layers: Iterable[nn.Module]) -> bool:
    """Whether a parameter is in two of the layers."""
    found = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    return sum(map(len, found)) > len(set().union(*found))


def elastic_stages(stages: Sequence[nn.Module], num_shared: int) -> list[ElasticStage]:
    """Return the stages with their guests: so many layers on either side of their own.

    Raises:
        Uncuttable: A stage does not say what its layers are.
    """
    of_stages = [layers_of(stage) for stage in stages]
    bounds = [0, *accumulate(map(len, of_stages))]
    layers = [layer for own in of_stages for layer in own]
    made = []
    for own, (start, stop), held in zip(stages, pairwise(bounds), held_ranges(bounds, num_shared), strict=True):
        guests = {number: layers[number] for number in held if not start <= number < stop}
        made.append(ElasticStage(own, range(start, stop), guests))
    return made


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a module's state with their names. What else it keeps there belongs to no optimizer and to no checkpoint."""
    return [(name, value) for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]


def is_of_guest(name: str) -> bool:
    """Whether a parameter of an elastic stage, by its name, is one of a guest."""
    return name.startswith(_GUESTS)


def guest_number(name: str) -> int:
    """The number of the layer that a parameter of a guest, by its name, belongs to."""
    return int(name.removeprefix(_GUESTS).partition(".")[0])


def own_module(module: nn.Module) -> nn.Module:
    """The module of the stage without its guests: what the user gave, what checkpoints have and what digests are made of."""
    return module.own if isinstance(module, ElasticStage) else module
