"""Reduce and step: the mean gradient over the global batch, clipped, applied at every stage or at none, and taken back exactly.

Each worker keeps a copy of its parameters and optimizer state from before the step. Copying them back is exact, where undoing the
arithmetic would not be.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Schedule = Callable[[int], float]
"""From the number of an iteration to what the learning rates of its step are multiplied by."""


def constant(iteration: int) -> float:
    """The schedule of a learning rate that stays as it is."""
    return 1.0


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The norm of a whole gradient, and what it is multiplied by; a scale of None says that the step is skipped."""

    norm: float
    scale: float | None


def judge_step(norms_squared: Sequence[float], max_norm: float | None) -> StepVerdict:
    """The verdict on a step, from the stages' sums of squares in order."""
    if not all(map(math.isfinite, norms_squared)):
        return StepVerdict(math.inf, None)
    norm = math.sqrt(math.fsum(norms_squared))
    if not math.isfinite(norm):
        return StepVerdict(math.inf, None)
    return StepVerdict(norm, 1.0 if max_norm is None or norm <= max_norm else max_norm / norm)


def norm_squared(gradients: Iterable[Tensor | None]) -> float:
    """The sum of squares of a stage's gradients, in double precision; not finite if any of them is not."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given:
        return 0.0
    # Without a copy of all in double precision, which would take longer than the step: a GPU needs none, a CPU one at a time.
    return float(torch.stack(torch._foreach_norm(given, 2, dtype=torch.float64)).square().sum())


@dataclass(frozen=True, slots=True)
class _Copy:
    """Parameters and optimizer as they were: all tensors are its own."""

    values: list[Tensor]
    state: list[dict[str, Any]]
    groups: list[dict[str, Any]]


class Stepper:
    """One worker's optimizer. `step` applies gradients, `take_back` undoes the last step bit for bit."""

    def __init__(self, parameters: Iterable[Tensor], make_optimizer: MakeOptimizer, schedule: Schedule = constant) -> None:
        self._parameters = list(parameters)
        self.optimizer = make_optimizer(self._parameters) if self._parameters else _Nothing()
        self._schedule = schedule
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._before: _Copy | None = None
        # Where each tensor is copied to before a step: always the same memory, since new memory costs more to fill.
        self._places: dict[Tensor, Tensor] = {}

    def step(self, iteration: int, gradients: Sequence[Tensor | None], scale: float | None) -> None:
        """Apply gradients times `scale`; a scale of None changes nothing, but counts as a step that can be taken back."""
        self._before = self._copied()
        if scale is None:
            return
        factor = self._schedule(iteration)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def take_back(self) -> None:
        """Return parameters and optimizer state to what they were before the last step.

        The state is put there as it is: `load_state_dict` would cast it to the parameter's precision.
        """
        assert self._before is not None, "there is no step to take back"
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._before.values, strict=True):
                parameter.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update({of: state for of, state in zip(self._parameters, self._before.state, strict=True) if state})
        for group, options in zip(self.optimizer.param_groups, self._before.groups, strict=True):
            group.update(options)
        self._before = None
        self._places.clear()  # they are the optimizer's own now

    def _copied(self) -> _Copy:
        """A copy of everything. All tensors are copied in one go, because there are many small ones."""
        known = self._places
        self._places = {}
        made = _Copy(
            [self._place(parameter, known) for parameter in self._parameters],
            [self._place(self.optimizer.state.get(parameter, {}), known) for parameter in self._parameters],
            [self._place({key: group[key] for key in group if key != "params"}, known) for group in self.optimizer.param_groups],
        )
        if self._places:
            with torch.no_grad():
                torch._foreach_copy_(list(self._places.values()), list(self._places))
        return made

    def _place(self, value: Any, known: Mapping[Tensor, Tensor]) -> Any:
        """`value` with tensors of its own, which are still to be filled."""
        match value:
            case Tensor():
                place = known[value] if value in known else torch.empty_like(value, requires_grad=False)
                self._places[value] = place
                return place
            case dict():
                return {key: self._place(part, known) for key, part in value.items()}
            case list() | tuple():
                return type(value)(self._place(part, known) for part in value)
        return value


class _Nothing(Optimizer):
    """The optimizer of a stage without parameters, for which torch's own refuse to be made."""

    def __init__(self) -> None:
        super().__init__([{"params": [], "lr": 0.0}], {})

    def step(self, closure: Any = None) -> Any:
        return None
