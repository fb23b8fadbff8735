"""`Stepper`: a stage's optimizer step, which can be taken back exactly, and the verdict on the step of all stages.

Each worker keeps a copy of its parameters and optimizer state from before the step. Copying them back is exact; undoing the
arithmetic would not be.

The verdict is known only when every stage has its gradient: all gradients are scaled by the norm over all stages, and no stage
steps if one gradient is not finite. A staggered stage does not wait for the verdict. It steps with a scale of 1, continues, and
takes the step back if the verdict, which arrives before the next backward pass, has another scale.
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
"""From the number of an iteration to the factor of the learning rates in its step."""
NORM_PARTS = 3


def constant(iteration: int) -> float:
    """The schedule of a constant learning rate."""
    return 1.0


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The norm of the gradient over all stages, and the scale of the step; None: the step is skipped."""

    norm: float
    scale: float | None


def judge_step(norms_squared: Sequence[float], max_norm: float | None) -> StepVerdict:
    """The verdict on a step, from the parts of the sums of squares of all stages."""
    if not all(map(math.isfinite, norms_squared)):
        return StepVerdict(math.inf, None)
    norm = math.sqrt(math.fsum(norms_squared))
    if not math.isfinite(norm):
        return StepVerdict(math.inf, None)
    return StepVerdict(norm, 1.0 if max_norm is None or norm <= max_norm else max_norm / norm)


def norm_squared(gradients: Iterable[Tensor | None]) -> tuple[float, ...]:
    """The sum of squares of a stage's gradients in `NORM_PARTS` parts; the first is not finite if a gradient is not.

    The parts together have three times the digits of one number. The sum over all stages is rounded once, at the end: so it does
    not depend on which parameters are in one stage.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    # `_foreach_norm` needs no copy of all gradients in double precision, which would take longer than the step.
    squares = torch.stack(torch._foreach_norm(given, 2, dtype=torch.float64)).square().tolist() if given else []
    if not math.isfinite(total := sum(squares)):
        return total, *[0.0] * (NORM_PARTS - 1)
    parts: list[float] = []
    for _ in range(NORM_PARTS):
        parts.append(math.fsum([*squares, *(-part for part in parts)]))
    return tuple(parts)


class Stepper:
    """One worker's optimizer. `step` applies gradients, `take_back` undoes the last step bit for bit."""

    def __init__(self, parameters: Iterable[Tensor], make_optimizer: MakeOptimizer, schedule: Schedule = constant) -> None:
        self._parameters = list(parameters)
        self.optimizer = make_optimizer(self._parameters) if self._parameters else _NoOptimizer()
        self._schedule = schedule
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._before: Any = None  # copies of the parameters, of their state, and of the options of the groups
        # The tensor that each tensor is copied to before a step: reused, because fresh memory is slower to fill.
        self._copies: dict[Tensor, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters and optimizer state, and of their copies: everything is there twice after the second step."""
        states = (value for own in self.optimizer.state.values() for value in own.values() if isinstance(value, Tensor))
        return sum(tensor.nbytes for tensor in (*self._parameters, *states, *self._copies.values()))

    @property
    def can_step_in_parts(self) -> bool:
        """Whether the optimizer steps every parameter on its own, as all of torch's do; others may count their steps."""
        return type(self.optimizer).__module__.startswith("torch.optim.")

    def step(self, iteration: int, gradients: Sequence[Tensor | None], scale: float | None, goes_on: bool = False) -> None:
        """Apply gradients times `scale`; a scale of None changes nothing, but counts as a step that can be taken back.

        A step that `goes_on` is the rest of the one before, with the gradients of other parameters.
        """
        if not goes_on:
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
        """Restore parameters and optimizer state from before the last step, bit for bit.

        The state is set directly: `load_state_dict` would cast it to the parameter's precision.
        """
        assert self._before is not None, "there is no step to take back"
        values, states, groups = self._before
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update({of: state for of, state in zip(self._parameters, states, strict=True) if state})
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)
        self._before = None
        self._copies.clear()  # they belong to the optimizer now

    def _copied(self) -> Any:
        """Copy everything. One operation copies all tensors, because there are many small ones."""
        known, self._copies = self._copies, {}
        states = [self.optimizer.state.get(parameter, {}) for parameter in self._parameters]
        groups = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        made = self._copy_of((self._parameters, states, groups), known)
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), list(self._copies))
        return made

    def _copy_of(self, value: Any, known: Mapping[Tensor, Tensor]) -> Any:
        """`value` with new tensors, which are still to be filled."""
        match value:
            case Tensor():
                copy = known[value] if value in known else torch.empty_like(value, requires_grad=False)
                self._copies[value] = copy
                return copy
            case dict():
                return {key: self._copy_of(part, known) for key, part in value.items()}
            case list() | tuple():
                return type(value)(self._copy_of(part, known) for part in value)
        return value


class _NoOptimizer(Optimizer):
    """The optimizer of a stage without parameters; torch's optimizers refuse an empty list of parameters."""

    def __init__(self) -> None:
        super().__init__([{"params": [], "lr": 0.0}], {})

    def step(self, closure: Any = None) -> Any:
        return None
