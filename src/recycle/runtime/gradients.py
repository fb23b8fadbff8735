"""Gradients of a stage over an iteration: who adds what, and in which arithmetic.

`FloatSums` adds in floating point, in the order in which ops run. `ExactSums` adds whole numbers: every contribution is rounded
to a multiple of 2**-`bits` and summed in 64 bits. Whole numbers add up to the same in any order and in any grouping, so that the
sum over all micro-batches is the same bit for bit whoever ran which one, and when. What does not fit is noticed, not wrapped.

Both hand out the mean over the global batch, in the parameters' own precision.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

EXACT_BITS = 40
# A contribution of this size uses up a share of the 63 bits that 2**12 of its kind still fit into.
_MOST_EXACT_BITS = 50


class Sums(Protocol):
    """The gradients of one worker's stage, summed over the micro-batches it ran; then over its peers."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add one contribution."""
        ...

    def flat(self) -> list[Tensor]:
        """The sums as they travel: what is reduced over the peers by addition."""
        ...

    def means(self, num_microbatches: int) -> list[Tensor | None]:
        """The gradient of every parameter, over so many micro-batches; None for one that got no contribution anywhere."""
        ...

    def clear(self) -> None:
        """Begin a new iteration."""
        ...


class FloatSums:
    """Sums in floating point, in a precision of choice."""

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._parameters = list(parameters)
        self._place = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._sums = [torch.zeros(parameter.shape, dtype=dtype, device=parameter.device) for parameter in self._parameters]
        self._used = torch.zeros(len(self._parameters), dtype=torch.int64)

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        number = self._place[id(parameter)]
        self._sums[number] += gradient
        self._used[number] = 1

    def flat(self) -> list[Tensor]:
        return [*self._sums, self._used]

    def means(self, num_microbatches: int) -> list[Tensor | None]:
        return [
            (total / num_microbatches).to(parameter.dtype) if used else None
            for parameter, total, used in zip(self._parameters, self._sums, self._used.tolist(), strict=True)
        ]

    def clear(self) -> None:
        for total in self.flat():
            total.zero_()


class ExactSums:
    """Sums in whole multiples of 2**-bits. `overflow` counts contributions that were not finite or too large.

    A contribution counts as too large if as many of its size as there can be would not fit into 63 bits together.
    """

    def __init__(self, parameters: Iterable[Tensor], most_contributions: int, bits: int = EXACT_BITS) -> None:
        assert 1 <= bits <= _MOST_EXACT_BITS
        self._parameters = list(parameters)
        self._place = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._sums = [torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device) for parameter in self._parameters]
        # The first counts contributions that did not fit, the others whether a parameter got any.
        self._counts = torch.zeros(1 + len(self._parameters), dtype=torch.int64)
        self._scale = 2.0**bits
        self._most = 2.0**62 / most_contributions

    @property
    def num_unfit(self) -> int:
        return int(self._counts[0])

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        number = self._place[id(parameter)]
        scaled = gradient.to(torch.float64) * self._scale
        fits = scaled.abs() < self._most  # false for Inf and NaN, too
        if not bool(fits.all()):
            self._counts[0] += 1
            scaled = torch.where(fits, scaled, torch.zeros_like(scaled))
        self._sums[number] += scaled.round_().to(torch.int64)
        self._counts[1 + number] = 1

    def flat(self) -> list[Tensor]:
        return [*self._sums, self._counts]

    def means(self, num_microbatches: int) -> list[Tensor | None]:
        """The gradients, or Inf for all of them if a contribution did not fit: the step is skipped then, as for any overflow."""
        unit = 1.0 / (self._scale * num_microbatches)
        fill = float("inf") if self.num_unfit else 0.0
        return [
            (total.to(torch.float64) * unit + fill).to(parameter.dtype) if used else None
            for parameter, total, used in zip(self._parameters, self._sums, self._counts[1:].tolist(), strict=True)
        ]

    def clear(self) -> None:
        for total in self.flat():
            total.zero_()


def make_sums(parameters: Iterable[Tensor], num_microbatches: int, is_exact: bool) -> Sums:
    """Sums for the parameters that want a gradient."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    # A parameter may be used several times in a micro-batch; 64 times is more than any model does.
    return ExactSums(wanted, 64 * num_microbatches) if is_exact else FloatSums(wanted)
