"""Learning-rate schedules: pure functions of the iteration, so that a step can be taken back and a run resumed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

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
