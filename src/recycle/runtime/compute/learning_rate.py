"""Schedules of a learning rate: pure functions of the iteration, so that a step can be taken back and a run resumed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: (1.0 + math.cos(math.pi * share)) / 2,
}
NAMES = tuple(_FALLS)


@dataclass(frozen=True, slots=True)
class WarmUpThen:
    """The factor rises from 1/n to 1 in the first n = `warm_up` iterations, and falls as `name` says until `num_steps`.

    A frozen value, not a function inside a function, because it travels to worker processes.
    """

    name: str
    warm_up: int
    num_steps: int

    def __post_init__(self) -> None:
        assert self.name in _FALLS

    def __call__(self, iteration: int) -> float:
        if iteration < self.warm_up:
            return (iteration + 1) / self.warm_up
        return _FALLS[self.name](min(1.0, (iteration - self.warm_up) / max(1, self.num_steps - self.warm_up)))
