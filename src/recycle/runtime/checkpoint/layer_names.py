"""`LayerNames`: which stage has which layers of the model, and under which names. A checkpoint has it in its manifest.

A layer's tensors have names of their own, in the layer. These names and the layer's number do not depend on how many stages
there are. So they say which tensor of one shape is which tensor of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from recycle.core.errors import Uncuttable
from recycle.runtime.compute.elastic_stage import held_layers, layers_of, named_tensors

LayerTensor = tuple[int, str]
"""A tensor of the model: the number of its layer, and its name in the layer. They are the same in every shape."""
TensorSource = tuple[int, str]
"""A stage, and the name of a tensor in its file."""


def name_by_layer(number: int, name: str) -> str:
    """The name of a layer's tensor in an `nn.Sequential` of all layers."""
    return f"{number}.{name}"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """For each layer of each stage, the names of its tensors in the stage by their names in the layer.

    `ties` has every tensor that several layers have, as embedding and head of GPT-2 do. `model` has,
    for each layer, the names of its tensors in the whole model. A run keeps them when it is resumed with other stages.
    """

    stages: tuple[tuple[Mapping[str, str], ...], ...]
    ties: tuple[tuple[LayerTensor, ...], ...] = ()
    model: tuple[Mapping[str, str], ...] = ()

    @property
    def ranges(self) -> list[range]:
        """The layers of each stage."""
        return [range(start, stop) for start, stop in pairwise([0, *accumulate(map(len, self.stages))])]

    def sources(self) -> dict[LayerTensor, TensorSource]:
        """The stage, and the name there, of each tensor."""
        found: dict[LayerTensor, TensorSource] = {}
        for stage, (numbers, layers) in enumerate(zip(self.ranges, self.stages, strict=True)):
            for number, names in zip(numbers, layers, strict=True):
                found |= {(number, name): (stage, there) for name, there in names.items()}
        return found

    def files(self) -> list[set[str]]:
        """The names of the tensors in the file of each stage."""
        return [{there for names in layers for there in names.values()} for layers in self.stages]

    def model_names(self) -> dict[str, TensorSource]:
        """The stage, and the name there, of each tensor of the whole model, by its name in the model."""
        sources = self.sources()
        return {there: sources[number, name] for number, names in enumerate(self.model) for name, there in names.items()}

    def with_counts(self, counts: Sequence[int]) -> "LayerNames":
        """The same layers with so many of them in each stage, whose tensors are named by layer.

        If several layers of a stage have a tensor, it has the name of the first of them, as an optimizer knows it.
        """
        layers = [names for of_stage in self.stages for names in of_stage]
        assert sum(counts) == len(layers)
        tie_of = {each: number for number, tie in enumerate(self.ties) for each in tie}
        made = []
        for start, stop in pairwise([0, *accumulate(counts)]):
            first: dict[int, str] = {}
            of_stage = []
            for number in range(start, stop):
                names = {}
                for name in layers[number]:
                    tie, own = tie_of.get((number, name)), name_by_layer(number, name)
                    names[name] = first.setdefault(tie, own) if tie is not None else own
                of_stage.append(names)
            made.append(tuple(of_stage))
        return LayerNames(tuple(made), self.ties, self.model)

    def to_json(self) -> dict[str, Any]:
        return {
            "names": [[dict(names) for names in layers] for layers in self.stages],
            "ties": [list(tie) for tie in self.ties],
            "model": [dict(names) for names in self.model],
        }

    @staticmethod
    def parse(form: Any) -> "LayerNames | None":
        """What `to_json` gave; None of anything else, such as a checkpoint of an earlier release."""
        match form:
            case {"names": [*stages], "ties": [*ties], "model": [*model]}:
                made = tuple(tuple(dict(names) for names in layers) for layers in stages)
                tied = tuple(tuple((int(number), str(name)) for number, name in tie) for tie in ties)
                return LayerNames(made, tied, tuple(dict(names) for names in model))
        return None


def find_layer_names(stages: Sequence[nn.Module]) -> LayerNames:
    """The layers of all stages.

    Raises:
        Uncuttable: A stage does not say what its layers are, or they are not all that it computes.
    """
    named: list[tuple[Mapping[str, str], ...]] = []
    found: dict[int, list[LayerTensor]] = {}
    number = 0
    for index, stage in enumerate(stages):
        layers = layers_of(stage)
        if stage._forward_hooks or stage._forward_pre_hooks or stage._backward_hooks or stage._backward_pre_hooks:
            raise Uncuttable(f"stage {index} has hooks, which its layers alone would not call: put them on its layers")
        # Of several names of a tensor its first one counts, as in an optimizer.
        names = {id(value): name for name, value in reversed(named_tensors(stage))}
        of_stage = []
        for layer in layers:
            tensors = named_tensors(layer)
            if other := [name for name, value in tensors if id(value) not in names]:
                raise Uncuttable(f"a layer of stage {index} has {other[0]}, which the stage itself does not have")
            of_stage.append({name: names[id(value)] for name, value in tensors})
            for name, value in tensors:
                found.setdefault(id(value), []).append((number, name))
            number += 1
        if other := sorted(name for value, name in names.items() if value not in found):
            raise Uncuttable(f"stage {index} has {other[0]} in none of its layers: make it part of one")
        named.append(tuple(of_stage))
    return LayerNames(tuple(named), tuple(tuple(each) for each in found.values() if len(each) > 1), _model_names(stages))


def _model_names(stages: Sequence[nn.Module]) -> tuple[Mapping[str, str], ...]:
    """The names of the tensors in the whole model: those in their stages, or, if these are not unique, layer and name there.

    The latter are the names in an `nn.Sequential` of all layers. A tensor that a stage has under several names is as
    many times in its layers, in the same order.
    """
    owners: dict[str, set[int]] = {}
    by_stage, by_number = list[dict[str, str]](), list[dict[str, str]]()
    for stage in stages:
        names: dict[int, list[str]] = {}
        for name, value in named_tensors(stage):
            names.setdefault(id(value), []).append(name)
            owners.setdefault(name, set()).add(id(value))
        for layer in layers_of(stage):
            tensors = named_tensors(layer)
            by_number.append({name: name_by_layer(len(by_number), name) for name, _ in tensors})
            by_stage.append({})
            for name, value in tensors:
                first, *others = names[id(value)]
                by_stage[-1][name] = first
                names[id(value)] = others or [first]
    return tuple(by_stage if all(len(values) == 1 for values in owners.values()) else by_number)


def layer_tensors_in(module: nn.Module, own_layers: range) -> dict[str, LayerTensor]:
    """The tensors of a stage, by their names in the stage; those of guests are of the guests' layers."""
    found: dict[int, LayerTensor] = {}
    for number, layer in held_layers(module, own_layers).items():
        for name, value in named_tensors(layer):
            found.setdefault(id(value), (number, name))
    return {name: found[id(value)] for name, value in named_tensors(module)}
