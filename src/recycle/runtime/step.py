"""Reduce and step: the mean gradient over the global batch, clipped, applied at every stage or at none, and taken back exactly.

Each worker keeps a copy of its parameters and optimizer state from before the step. Copying them back is exact, where undoing the
arithmetic would not be.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recycle.runtime.gradients import Sums

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def norm_squared(gradients: Iterable[Tensor | None]) -> float:
    """The sum of squares of a stage's gradients, in double precision; not finite if any of them is not."""
    return math.fsum(float((gradient.to(torch.float64) ** 2).sum()) for gradient in gradients if gradient is not None)


def clip_scale(norms_squared: Sequence[float], max_norm: float | None) -> float | None:
    """What every gradient is multiplied by, from the stages' sums of squares in order; None says that the step is skipped."""
    total = math.sqrt(math.fsum(norms_squared)) if all(map(math.isfinite, norms_squared)) else math.inf
    if not math.isfinite(total):
        return None
    return 1.0 if max_norm is None or total <= max_norm else max_norm / total


class Stepper:
    """One worker's optimizer. `step` applies gradients, `take_back` undoes the last step bit for bit."""

    def __init__(self, parameters: Iterable[Tensor], make_optimizer: MakeOptimizer) -> None:
        self._parameters = list(parameters)
        self._optimizer = make_optimizer(self._parameters)
        self._before: tuple[list[Tensor], dict[str, Any]] | None = None

    def step(self, gradients: Sequence[Tensor | None], scale: float | None) -> None:
        """Apply gradients times `scale`; a scale of None changes nothing, but counts as a step that can be taken back."""
        self._before = [parameter.detach().clone() for parameter in self._parameters], _copied(self._optimizer.state_dict())
        if scale is None:
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def take_back(self) -> None:
        """Return parameters and optimizer state to what they were before the last step."""
        assert self._before is not None, "there is no step to take back"
        values, state = self._before
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(state)
        self._before = None


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with tensors of its own; `deepcopy` takes several times as long for it."""
    own = {
        number: {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": own, "param_groups": copy.deepcopy(state["param_groups"])}


def add_sums(into: Sums, other: Sums) -> None:
    """Add the sums of a peer, in place: what a reduction does, between workers of one process."""
    for total, more in zip(into.flat(), other.flat(), strict=True):
        total += more
