"""Sums of a stage's gradients over the micro-batches of an iteration, in floating point or exactly in whole numbers.

`FloatSums` adds in floating point, in the order in which ops run. `ExactSums` rounds every contribution to a multiple of
2**-`_EXACT_BITS` and adds 64-bit integers, whose sum is the same in any order. An overflow is detected, not wrapped. Both return
means over the global batch in the precision of the parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recycle.runtime.compute.streams import beside_ops

_EXACT_BITS = 40
_ALIGNMENT = 256  # bytes, as of every tensor on a GPU


def _aligned(num: int, dtype: torch.dtype) -> int:
    """The number of elements, rounded up so that the next part is aligned: into others a GPU adds products much more slowly."""
    each = _ALIGNMENT // dtype.itemsize
    return -(-num // each) * each


class Sums(ABC):
    """The gradients of a stage, summed over the micro-batches that one worker ran, and then over its peers.

    `flat` has a mark for each parameter that says whether it was used, then `more`, then a part for each parameter. `starts` says
    where each part begins; zeros fill the gaps. Peers reduce it by addition. `is_exact` says that the order of additions does not
    matter. Every contribution is multiplied by `factor`, which takes a scale of the loss out of it.
    """

    is_exact: bool
    factor: float = 1.0

    def __init__(
        self, parameters: Iterable[Tensor], dtype: torch.dtype, device: torch.device | None = None, num_more: int = 0
    ) -> None:
        self.parameters = list(parameters)
        num = len(self.parameters)
        *self.starts, size = accumulate(
            (_aligned(parameter.numel(), dtype) for parameter in self.parameters), initial=_aligned(num + num_more, dtype)
        )
        if device is None and self.parameters:
            device = self.parameters[0].device
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self.used, self.more = self.flat[:num], self.flat[num : num + num_more]
        parts = zip(self.parameters, self._parts(self.flat), torch.split(self.used, 1) if num else (), strict=True)
        self._views = {id(parameter): (part, mark) for parameter, part, mark in parts}
        self._marked: set[int] = set()

    @abstractmethod
    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add a contribution to each of the parameters."""

    @abstractmethod
    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the contribution `left` @ `right`, which may be a row for a vector."""

    @abstractmethod
    def _mean(self, total: Tensor, num_microbatches: int) -> Tensor:
        """The mean over so many micro-batches of a part of `flat`."""

    def means(self, num_microbatches: int, first: int = 0, end: int | None = None) -> list[Tensor | None]:
        """The mean gradient of every parameter over so many micro-batches; None for a parameter without any contribution.

        Parameters before number `first`, and from `end` on, have none. The means are new tensors: ask for a few parameters at a
        time where memory is short. The sums are complete: no op in flight adds to them.
        """
        wanted = range(*slice(first, end).indices(len(self.parameters)))
        if not wanted:
            return [None] * len(self.parameters)
        starts = [*self.starts, self.flat.numel()]
        base = starts[wanted.start]
        mean = self._mean(self.flat[base : starts[wanted.stop]], num_microbatches)
        made: list[Tensor | None] = [None] * len(self.parameters)
        with beside_ops(self.flat.device):
            marks = self.used[wanted.start : wanted.stop].tolist()
        for number, used in zip(wanted, marks, strict=True):
            if used:
                of, start = self.parameters[number], starts[number] - base
                made[number] = mean[start : start + of.numel()].view(of.shape).to(of.dtype)
        return made

    def of(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """The views of `flat` for one parameter: its sum, and a mark that is not 0 if it got any contribution."""
        return self._views[id(parameter)]

    @property
    def held_bytes(self) -> int:
        """The bytes that the parts of all parameters take as long as the sums live. The marks, a few bytes, do not count."""
        return (self.flat.numel() - self.starts[0]) * self.flat.itemsize if self.parameters else 0

    def _sum_of(self, parameter: Tensor) -> Tensor:
        """The sum of a parameter, to be added to; the parameter counts as used from now on."""
        total, mark = self._views[id(parameter)]
        if id(parameter) not in self._marked:
            mark.fill_(1)
            self._marked.add(id(parameter))
        return total

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The part of each parameter in a tensor with the layout of `flat`."""
        known = zip(self.starts, self.parameters, strict=True)
        return [flat[start : start + of.numel()].view(of.shape) for start, of in known]

    def clear(self) -> None:
        self.flat.zero_()
        self._marked.clear()


class FloatSums(Sums):
    """Sums in floating point, in a precision of choice."""

    is_exact = False

    def __init__(
        self, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        super().__init__(parameters, dtype, device)

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        if parameters:  # in one go, because there are many small ones
            torch._foreach_add_([self._sum_of(parameter) for parameter in parameters], list(gradients), alpha=self.factor)

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        total = self._sum_of(parameter)
        total = total.view(1, -1) if total.dim() == 1 else total
        if left.dtype == total.dtype:
            total.addmm_(left, right, alpha=self.factor)  # in one pass, without a temporary product
        elif total.is_cuda and total.dtype is torch.float32:
            # Likewise, and not rounded to the narrower type.
            torch.addmm(total, left, right, out_dtype=total.dtype, alpha=self.factor, out=total)
        else:
            total.add_(left @ right, alpha=self.factor)

    def _mean(self, total: Tensor, num_microbatches: int) -> Tensor:
        return total / num_microbatches


class ExactSums(Sums):
    """Sums in whole multiples of 2**-`_EXACT_BITS`. `more` counts contributions that were not finite or too large.

    A contribution is too large if the sum of `most_contributions` of its size would not fit into 63 bits.
    """

    is_exact = True

    def __init__(self, parameters: Iterable[Tensor], most_contributions: int, device: torch.device | None = None) -> None:
        super().__init__(parameters, torch.int64, device, num_more=1)
        self._scale = 2.0**_EXACT_BITS
        self._most = 2.0**62 / most_contributions

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._add(parameter, gradient)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        scale = self._scale * self.factor
        scaled = gradient.to(torch.float64).mul_(scale) if gradient.dtype != torch.float64 else gradient * scale
        # If one is NaN, the maximum is NaN, and the comparison is false.
        if scaled.is_cuda or (scaled.numel() and not bool(scaled.abs().max() < self._most)):
            scaled, has_others = below(scaled, self._most)
            self.more += has_others
        self._sum_of(parameter).add_(scaled.round_().to(torch.int64))

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        self._add(parameter, (left @ right).view(parameter.shape))

    def _mean(self, total: Tensor, num_microbatches: int) -> Tensor:
        """The mean; all of it is Inf if a contribution did not fit, so that the step is skipped as for any overflow."""
        with beside_ops(self.flat.device):
            fill = float("inf") if int(self.more) else 0.0
        return total.to(torch.float64).mul_(1.0 / (self._scale * num_microbatches)).add_(fill)


def below(numbers: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Return the numbers below `most`, with zeros for all others, and whether there are others; no host waits for its GPU."""
    fits = numbers.abs() < most
    return torch.where(fits, numbers, 0.0), ~fits.all()


def make_sums(
    parameters: Iterable[Tensor],
    num_microbatches: int,
    is_exact: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Sums:
    """Make the sums of the parameters that require a gradient, on their device or on `device`; exact sums ignore `dtype`."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    # A parameter may be used several times in a micro-batch; 64 times is more than any model does.
    return ExactSums(wanted, 64 * num_microbatches, device) if is_exact else FloatSums(wanted, dtype, device)
