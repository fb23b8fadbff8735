"""`add_loss`: a loss that a layer adds to that of its micro-batch, such as a router's; and how it goes along with a micro-batch.

Its gradient is that of the stage that computes the layer: the backward pass begins with it as well as with the gradient from
the next stage. Its number travels on with the activations, so that the last stage knows the loss of the micro-batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recycle.core.errors import LossNotScalar

# The lists that collect at present, the innermost last. Each worker process computes one micro-batch at a time.
_collecting: list[list[Tensor]] = []


class Carried(NamedTuple):
    """What passes between stages whose layers add losses: the nest of the stage, and the sum of the losses so far."""

    nest: Any
    loss: Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_loss(value: Tensor) -> None:
    """Add a number to the loss of the micro-batch that is being computed; call it in the `forward` of any module.

    Training minimizes the loss plus all that is added to it, at whatever stage that is computed, and the sum is the loss that is
    recorded. What is added while a model is evaluated (`self.training` is false) is part of the result of the evaluation. In
    plain torch, outside of `collect_losses`, it does nothing.

    Args:
        value: A scalar tensor, mean over the micro-batch like the loss itself, with its factor.

    Raises:
        LossNotScalar: The value is something else.

    Example:
        class Router(torch.nn.Linear):
            def forward(self, x):
                chances = super().forward(x).softmax(-1)
                recycle.add_loss(0.01 * chances.mean((0, 1)).square().sum())
                return chances
    """
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise LossNotScalar(f"add_loss was given {what}, but what is added to the loss must be a scalar tensor: give its mean")
    if _collecting:
        _collecting[-1].append(value)


@contextmanager
def collect_losses() -> Iterator[list[Tensor]]:
    """Collect what layers add to the loss in this block, for plain torch: the list has all of it at the end.

    Example:
        with recycle.collect_losses() as added:
            loss = loss_function(model(inputs), targets)
        (loss + sum(added)).backward()
    """
    found: list[Tensor] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting.pop()
