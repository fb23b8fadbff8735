"""Learning-rate schedules: pure functions of the iteration, so that a step can be taken back and a run resumed."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from recycle.core.errors import UserError

_DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: (1.0 + math.cos(math.pi * share)) / 2,
}
NAMES = tuple(_DECAYS)


@dataclass(frozen=True, slots=True)
class WarmUpThen:
    """A linear warm-up of the learning rate, then a decay: `schedule(iteration)` is the factor of the learning rate.

    The factor rises from 1/`warm_up` to 1 in the first `warm_up` iterations, then decays until `num_steps`: `constant` stays at
    1, `linear` and `cosine` end at 0. It is a dataclass and not a closure, because it is pickled for worker processes.

    Args:
        name: The decay, one of `NAMES`.
        warm_up: The number of iterations of the warm-up; 0 for none.
        num_steps: The iteration at which the decay ends.

    Example:
        >>> WarmUpThen("linear", warm_up=2, num_steps=4)(3)
        0.5
    """

    name: str
    warm_up: int
    num_steps: int

    def __post_init__(self) -> None:
        assert self.name in _DECAYS

    def __call__(self, iteration: int) -> float:
        if iteration < self.warm_up:
            return (iteration + 1) / self.warm_up
        return _DECAYS[self.name](min(1.0, (iteration - self.warm_up) / max(1, self.num_steps - self.warm_up)))


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """The learning rates of a scheduler of torch, as a function of the iteration.

    Rates that depend on anything else, such as those of ReduceLROnPlateau, cannot be had so: a step may be taken back, and every
    worker must know the rate of any iteration by itself.

    Args:
        make: Makes the scheduler for an optimizer, such as `partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)`.
        rate: The learning rate of the optimizer. If parameter groups have several, all get the same factor.

    Raises:
        UserError: It is no such scheduler, or it changes more than the learning rate.

    Example:
        >>> schedule = TorchSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), rate=0.1)
        >>> [schedule(iteration) for iteration in range(4)]
        [1.0, 1.0, 0.5, 0.5]
    """

    make: Callable[[Optimizer], Any]
    rate: float
    _known: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float) or not 0 < self.rate < math.inf:
            raise UserError(
                f"the rate of a schedule is {self.rate!r}, but it must be the learning rate of the optimizer, above 0"
            )
        _ = self(1)

    def __call__(self, iteration: int) -> float:
        if iteration >= len(self._known):  # some more than needed: all are computed again
            self._known[:] = self._rates(2 * iteration + 2)
        return self._known[iteration] / self.rate

    def _rates(self, num: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.rate, momentum=0.5)
        scheduler, rates = self._made(optimizer), list[float]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no step of the optimizer came before
            for _ in range(num):
                rates.append(float(optimizer.param_groups[0]["lr"]))
                try:
                    scheduler.step()
                except TypeError:
                    raise UserError(
                        f"a {type(scheduler).__name__} needs more than the number of a step, but the rate of an iteration must "
                        "follow from its number: choose another scheduler"
                    ) from None
                except ValueError:  # one that knows how many steps there are, and has done them
                    break
        if optimizer.param_groups[0]["momentum"] != 0.5:
            raise UserError(
                f"a {type(scheduler).__name__} changes the momentum, but a schedule changes the rate only: give it "
                "cycle_momentum=False"
            )
        return [*rates, *rates[-1:] * (num - len(rates))]

    def _made(self, optimizer: Optimizer) -> Any:
        try:
            made = self.make(optimizer)
        except (TypeError, ValueError, AttributeError) as problem:
            raise UserError(f"the scheduler cannot be made: {problem}; give a function that takes an optimizer") from None
        if not hasattr(made, "step"):
            raise UserError(f"the scheduler is a {type(made).__name__}, but it must be one of torch.optim.lr_scheduler")
        return made
