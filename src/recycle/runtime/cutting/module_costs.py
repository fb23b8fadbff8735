"""`module_costs`: what each layer of a model costs beside the others, counted with a sample or estimated from its parameters.

Both are the same on every machine, so that all machines of a job cut its model alike; times would not be.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from recycle.runtime.boundary.nests import Nest


def module_costs(layers: Sequence[nn.Module], sample: Nest = None) -> list[float]:
    """The costs of layers that run one after the other.

    With a `sample`, the inputs of a micro-batch, they are the multiplications and additions of a forward pass; without one, the
    numbers of weights that a sample is multiplied with. A layer that costs nothing then costs a little: it is not free.
    """
    found = _counted(layers, sample) if sample is not None else [_num_weights(layer) for layer in layers]
    least = max(found) / 1000 if any(found) else 1.0
    return [max(each, least) for each in found]


def _counted(layers: Sequence[nn.Module], sample: Nest) -> list[float]:
    costs, made = list[float](), sample
    with torch.no_grad(), torch.random.fork_rng():
        for layer in copy.deepcopy(list(layers)):  # a forward pass may change buffers, and the model is to begin as it was given
            with FlopCounterMode(display=False) as counter:
                made = layer(made)
            costs.append(float(counter.get_total_flops()))
    return costs


def _num_weights(layer: nn.Module) -> float:
    """The number of weights in matrices and filters. An embedding only looks rows up."""
    return float(
        sum(
            parameter.numel()
            for part in layer.modules()
            if not isinstance(part, nn.Embedding)
            for parameter in part.parameters(recurse=False)
            if parameter.dim() >= 2
        )
    )
