"""with_model_layers(): an estimated profile that also says which layers its stages have, for systems that move layers or cuts.

All transformer layers are equal. The first layer of the model includes the embedding, the last one the head.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from recycle.core.layer_shares import EQUAL, LayerShare, StageShares
from recycle.core.layers import split_layers
from recycle.core.profile import Profile, StageProfile
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec
from recycle.planner.profiles.estimate import estimate, layer_costs

# The costs of a stage, in the order of the fields of LayerShare.
_COSTS = ("forward_us", "input_us", "weight_us", "activation_bytes", "static_bytes")


def base_layers(model: ModelSpec, gpu: GpuSpec, num_stages: int, tensor_parallel: int) -> tuple[int, ...]:
    """The number of transformer layers of each stage that makes the slowest stage fastest, as `estimate` divides them."""
    embedding, layer, *_, head = (cost.forward_us + cost.backward_us for cost in layer_costs(model, gpu, tensor_parallel))
    extra = [0.0] * num_stages
    extra[0] += embedding
    extra[-1] += head
    return split_layers(model.num_layers, layer, extra)


def spread_layers(model: ModelSpec, gpu: GpuSpec, num_stages: int, tensor_parallel: int) -> tuple[int, ...]:
    """The number of layers of each stage if boundaries lie where the work is divided evenly, rounded to whole layers.

    Stages with a layer more than others are spread over the pipeline. So cuts at shared layers, which move few layers across each
    boundary, can make all stages even.
    """
    embedding, layer, *_, head = (cost.forward_us + cost.backward_us for cost in layer_costs(model, gpu, tensor_parallel))
    each = (embedding + model.num_layers * layer + head) / num_stages
    bounds = [0]
    for stage in range(1, num_stages):
        wanted = round((stage * each - embedding) / layer)
        bounds.append(min(max(wanted, bounds[-1] + 1), model.num_layers - num_stages + stage))
    return tuple(end - start for start, end in pairwise([*bounds, model.num_layers]))


def with_model_layers(profile: Profile, layers: Sequence[int], model: ModelSpec, gpu: GpuSpec, tensor_parallel: int) -> Profile:
    """The profile of a model whose stages have so many `layers`, with the share of each layer in the costs of its stage."""
    one, two = (estimate(replace(model, num_layers=num), gpu, 1, tensor_parallel).stages[0] for num in (1, 2))
    layer = [getattr(two, name) - getattr(one, name) for name in _COSTS]
    shares: list[StageShares] = [(EQUAL,) * num for num in layers]
    shares[0] = (_remainder(profile.stages[0], layers[0], layer), *shares[0][1:])
    if len(layers) > 1:
        shares[-1] = (*shares[-1][:-1], _remainder(profile.stages[-1], layers[-1], layer))
    return replace(profile, layers=tuple(shares))


def _remainder(stage: StageProfile, num_layers: int, layer: Sequence[float]) -> LayerShare:
    """The share of the layer that bears what the other layers of the stage do not."""
    costs = (getattr(stage, name) for name in _COSTS)
    return LayerShare(*(max(0.0, (cost - (num_layers - 1) * each) / each) for cost, each in zip(costs, layer, strict=True)))
