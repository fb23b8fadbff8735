"""spread_layers(): the boundaries of stages that suit elastic cuts best."""

from itertools import pairwise

from recycle.planner.profiles.catalog import GpuSpec, ModelSpec
from recycle.planner.profiles.estimate import layer_costs


def spread_layers(
    model: ModelSpec, gpu: GpuSpec, num_stages: int, tensor_parallel: int, context_parallel: int = 1
) -> tuple[int, ...]:
    """The number of layers of each stage if boundaries lie where the work is divided evenly, rounded to whole layers.

    Stages with a layer more than others are spread over the pipeline. So cuts at shared layers, which move few layers across each
    boundary, can make all stages even.
    """
    costs = layer_costs(model, gpu, tensor_parallel, context_parallel)
    embedding, layer, *_, head = (cost.forward_us + cost.backward_us for cost in costs)
    each = (embedding + model.num_layers * layer + head) / num_stages
    bounds = [0]
    for stage in range(1, num_stages):
        wanted = round((stage * each - embedding) / layer)
        bounds.append(min(max(wanted, bounds[-1] + 1), model.num_layers - num_stages + stage))
    return tuple(end - start for start, end in pairwise([*bounds, model.num_layers]))
