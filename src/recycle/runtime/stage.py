"""A stage on a worker: forward, and backward in one pass or in two, for several micro-batches in flight.

What a micro-batch holds follows the plan's memory model: F takes its activations, I gives back all but what W needs, W the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recycle.core.errors import UserError
from recycle.runtime.gradients import Sums
from recycle.runtime.split_backward import Tape, defer_weights

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its F and its W: the graph until I, the tape from then on."""

    given: Tensor | None
    made: Tensor | None
    tape: Tape = field(default_factory=Tape)


class Stage:
    """One stage's module, and its micro-batches in flight by chain. The last stage computes the loss, too."""

    def __init__(self, module: nn.Module, sums: Sums, number: int, loss: Loss | None = None) -> None:
        self.module = module
        self.sums = sums
        self.number = number
        self._loss = loss
        self._flights: dict[int, _Flight] = {}
        self._deferral = defer_weights(module)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def forward(self, chain: int, given: Tensor, seed: int, targets: Tensor | None = None) -> Tensor:
        """Run the module on `given` and return what it makes, or the loss at the last stage; both are detached."""
        assert chain not in self._flights, f"micro-batch {chain} is in flight already"
        leaf = given.detach()
        if leaf.is_floating_point():
            leaf.requires_grad_(True)
        flight = _Flight(leaf, None)
        torch.manual_seed(seed)
        with torch.enable_grad():
            made = self.module(leaf)
            if self._loss is not None:
                assert targets is not None
                made = self._loss(made, targets)
        self._refuse_unusable(made)
        flight.made = made
        self._flights[chain] = flight
        passed_on: Tensor = made.detach()
        return passed_on

    def backward_input(self, chain: int, gradient: Tensor | None) -> Tensor | None:
        """I: return the gradient of what the stage was given, None where that has none; weights wait on the tape."""
        flight = self._flights[chain]
        assert flight.made is not None, f"micro-batch {chain} has had its I"
        if flight.made.requires_grad:
            with self._deferral.onto(flight.tape):
                torch.autograd.backward([flight.made], [gradient] if gradient is not None else None)
        given = flight.given
        assert given is not None
        passed = given.grad
        flight.given = flight.made = None
        self._collect()
        return passed

    def backward_weight(self, chain: int) -> None:
        """W: compute the gradients that I left, and forget the micro-batch."""
        flight = self._flights.pop(chain)
        assert flight.made is None, f"micro-batch {chain} has not had its I"
        flight.tape.play(self.sums.add)

    def backward(self, chain: int, gradient: Tensor | None) -> Tensor | None:
        """B: both in one."""
        passed = self.backward_input(chain, gradient)
        self.backward_weight(chain)
        return passed

    def _collect(self) -> None:
        """Take over the gradients that autograd accumulated itself."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.sums.add(parameter, parameter.grad)
                parameter.grad = None

    def _refuse_unusable(self, made: object) -> None:
        if not isinstance(made, Tensor):
            raise UserError(
                f"stage {self.number} returned {type(made).__name__}, which cannot be sent: a stage returns one tensor"
            )
        if self._loss is not None and made.dim() != 0:
            raise UserError(f"the loss has the shape {tuple(made.shape)}, but it must be a scalar: return its mean")
        if self._loss is None and not made.is_floating_point():
            raise UserError(f"stage {self.number} returned {made.dtype}, which has no gradient: a stage returns floating point")

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._parameters)
