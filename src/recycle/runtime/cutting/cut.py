"""`recycle.cut`, which cuts a model into stages, and `recycle.recut`, which distributes its layers over other stages."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from recycle.core.errors import Uncuttable
from recycle.core.layers import balanced_counts, split_layers
from recycle.runtime.boundary.nests import Nest
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.compute.elastic_stage import layers_of
from recycle.runtime.cutting.causal_model import ModelPart, find_causal_model, model_parts
from recycle.runtime.cutting.module_costs import module_costs


def cut(
    model: nn.Module, cuts: Sequence[int] | None = None, *, stages: int | None = None, sample: Nest = None
) -> list[nn.Module]:
    """Cut a model into stages.

    A causal language model is cut as it is: GPT-2, Llama, Mistral, Qwen, Gemma and others that are built alike. Its layers are
    the embedding, the layers of its list, and its norm with its head; they are found by structure. Its own code runs in every
    stage, parameters keep their names, and what is tied stays tied. Its stages take token ids, or a dict of "input_ids" and
    masks, and the model's own loss is used if `train` is given none.

    Args:
        model: An `nn.Sequential`, or a causal language model such as those of Hugging Face.
        cuts: Numbers of layers in ascending order; a new stage begins with each of them.
        stages: The number of stages, in the place of `cuts`: the most expensive stage is then as cheap as possible.
        sample: The inputs of a micro-batch. With them, the cost of layers is that of a forward pass; without, it is estimated
            from the sizes of their weights, which is far off for convolutions.

    Returns:
        The stages. They share the modules of `model`.

    Raises:
        Uncuttable: The model has no structure that can be cut, or a stage would be empty.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> [len(stage) for stage in cut(model, [2])]
        [2, 1]
        >>> [len(stage) for stage in cut(model, stages=2)]
        [1, 2]
    """
    if (cuts is None) == (stages is None):
        raise Uncuttable("a model is cut at given layers, or into a number of stages: give either cuts or stages")
    layers = _layers(model)
    if stages is not None:
        if isinstance(stages, bool) or not isinstance(stages, int) or not 1 <= stages <= len(layers):
            raise Uncuttable(f"{stages!r} stages cannot be made of {len(layers)} layers: every stage needs a layer")
        bounds = [0, *accumulate(balanced_counts(module_costs(layers, sample), stages))]
    else:
        assert cuts is not None
        bounds = [0, *cuts, len(layers)]
    if any(after <= before for before, after in pairwise(bounds)):
        raise Uncuttable(
            f"cuts at {bounds[1:-1]} do not leave a layer in every stage of a model of {len(layers)}: give ascending numbers "
            f"from 1 to {len(layers) - 1}"
        )
    if isinstance(model, nn.Sequential):
        return [model[start:stop] for start, stop in pairwise(bounds)]
    at = find_causal_model(model)
    assert at is not None
    return list(model_parts(model, at, [range(start, stop) for start, stop in pairwise(bounds)]))


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, nn.Module) and (at := find_causal_model(model)) is not None:
        return ModelPart(model, at, range(at.num_layers)).split_into_layers()
    raise Uncuttable(
        f"a {type(model).__name__} cannot be cut: it is no nn.Sequential, and no causal language model, in which one module has "
        "an nn.Embedding and one nn.ModuleList of layers; make it an nn.Sequential, or give train() a list of stages"
    )


def recut(stages: Sequence[nn.Module], num_stages: int) -> list[nn.Module]:
    """Distribute the layers of a model over another number of stages.

    Args:
        stages: The stages of the model. Each is an `nn.Sequential`, or has a method `split_into_layers()`.
        num_stages: The number of stages to make.

    Returns:
        The stages, with about as many layers each. They share the layers of the given ones.

    Raises:
        Uncuttable: A stage does not say what its layers are, or there are fewer layers than stages.

    Example:
        >>> stages = cut(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), [2])
        >>> [len(stage) for stage in recut(stages, 3)]
        [1, 1, 1]
    """
    find_layer_names(stages)  # refuses stages that their layers do not make up
    layers = [layer for stage in stages for layer in layers_of(stage)]
    if not 1 <= num_stages <= len(layers):
        raise Uncuttable(f"{num_stages} stages cannot be made of {len(layers)} layers: every stage needs a layer")
    names = [str(number) for number in range(len(layers))]
    if all(isinstance(stage, nn.Sequential) for stage in stages):
        own = [name for stage in stages for name in stage._modules]
        names = own if len(set(own)) == len(layers) else names
    stops = list(accumulate(split_layers(len(layers), 1, [0] * num_stages), initial=0))
    named = list(zip(names, layers, strict=True))
    return [nn.Sequential(OrderedDict(named[start:stop])) for start, stop in pairwise(stops)]
