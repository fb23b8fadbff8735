"""`Stepper`: a stage's optimizer step, which can be taken back exactly, and the verdict on the step of all stages.

The verdict is known only when every stage has its gradient: all gradients are scaled by the norm over all stages, and no stage
steps if one gradient is not finite. A staggered stage does not wait for the verdict. It steps with a scale of 1, continues, and
takes the step back if the verdict, which arrives before the next backward pass, has another scale.

Such a step is tried: it may still be taken back, from copies, which is exact; undoing the arithmetic would not be. There are two
ways. By default weights and optimizer state are copied, and the step is computed once. A *lean* step copies the parameters alone,
and leaves the state as it was; when it is settled, it is computed again, on the copies, with the same result, and changes the
state, too. So little is held twice, for twice the computation, which is next to nothing on a GPU. A step that waits for its
verdict copies nothing. Means of gradients are made for a few parameters at a time.

In float16 the loss is scaled, and the scale follows the verdicts. All stages get the same verdicts, so that they have the same
scale without asking each other.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recycle.core.errors import UserError

MakeOptimizer = Callable[[list[Tensor]], Optimizer]
Schedule = Callable[[int], float]
"""From the number of an iteration to the factor of the learning rates in its step."""
Gradients = Callable[[int, int], Sequence[Tensor | None]]
"""The gradients of all parameters, of which those from the first number to the second are asked for, and the others are None."""
NORM_PARTS = 3
# Parameters of so many bytes are stepped at a time: gradients and copies of optimizer states take a few times as much.
_PART_BYTES = 64 * 2**20
LOSS_SCALE = "loss_scale"
"""The key of the loss scale in the groups of an optimizer, and of the options in a fingerprint."""
# The scale and its inverse stay normal numbers of float32.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126


def constant(iteration: int) -> float:
    """The schedule of a constant learning rate."""
    return 1.0


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The norm of the gradient over all stages, and the scale of the step; None: the step is skipped.

    `loss_scale` is what the loss was multiplied by; norm and scale are those of the gradient without it.
    """

    norm: float
    scale: float | None
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the scale of the loss changes, for ops in float16. The defaults, and the rule, are those of `torch.amp.GradScaler`.

    Attributes:
        initial: The scale of the first step.
        growth: The scale is multiplied by this after `interval` steps in a row with finite gradients.
        backoff: The scale is multiplied by this after a step whose gradient is not finite; such a step is skipped at all stages.
        interval: The number of steps with finite gradients after which the scale grows.

    Raises:
        UserError: A number cannot be used.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("initial scale", self.initial, _LEAST_SCALE, _MOST_SCALE),
            ("growth", self.growth, 1.0, _MOST_SCALE),
            ("backoff", self.backoff, _LEAST_SCALE, 1.0),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise UserError(f"the {name} of the loss scale is {value!r}, but it must be a number from {least:g} to {most:g}")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise UserError(f"the interval of the loss scale is {self.interval!r}, but it must be a whole number of at least 1")

    def after(self, scale: float, num_finite: int, is_skipped: bool) -> tuple[float, int]:
        """The next scale, and the number of steps since it changed or since an overflow, from those before a step."""
        if is_skipped:
            return max(_LEAST_SCALE, scale * self.backoff), 0
        if num_finite + 1 < self.interval:
            return scale, num_finite + 1
        return (grown if (grown := scale * self.growth) <= _MOST_SCALE else scale), 0


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
    return sum_in_parts(squares_of(gradients))


def squares_of(gradients: Iterable[Tensor | None]) -> list[float]:
    """The sum of squares of each gradient."""
    given = [gradient for gradient in gradients if gradient is not None]
    # `_foreach_norm` needs no copy of all gradients in double precision, which would take longer than the step.
    return torch.stack(torch._foreach_norm(given, 2, dtype=torch.float64)).square().tolist() if given else []


def sum_in_parts(squares: Sequence[float]) -> tuple[float, ...]:
    """The sum of squares of a stage, in `NORM_PARTS` parts."""
    if not math.isfinite(total := sum(squares)):
        return total, *[0.0] * (NORM_PARTS - 1)
    parts: list[float] = []
    for _ in range(NORM_PARTS):
        parts.append(math.fsum([*squares, *(-part for part in parts)]))
    return tuple(parts)


class Stepper:
    """One worker's optimizer. `step` is for good; `try_step` is followed by `settle` or by `take_back`."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make_optimizer: MakeOptimizer,
        schedule: Schedule = constant,
        is_lean: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self.optimizer = make_optimizer(self._parameters) if self._parameters else _NoOptimizer()
        self._schedule = schedule
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        # The parameters before the step that is tried, by number. The memory is reused, because fresh memory is slower to fill.
        self._copies: dict[int, Tensor] = {}
        self._tried: set[int] = set()
        self._is_trying = False
        self._states_before: list[_State] = []  # of a step that is tried and not lean
        self._most_copied_bytes = 0
        self.is_lean = is_lean and self.can_step_in_parts
        self._loss_scale = loss_scale
        if loss_scale is not None:
            self._set_loss_scale((loss_scale.initial, 0))

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by."""
        return float(self.optimizer.param_groups[0][LOSS_SCALE][0]) if self._loss_scale is not None else 1.0

    def follow_verdict(self, verdict: StepVerdict) -> None:
        """Change the scale of the loss by the verdict on a step that is done for good."""
        if self._loss_scale is not None:
            scale, num_finite = self.optimizer.param_groups[0][LOSS_SCALE]
            self._set_loss_scale(self._loss_scale.after(scale, num_finite, verdict.scale is None))

    def _set_loss_scale(self, held: tuple[float, int]) -> None:
        # Among the options of the groups it goes wherever the state of the stage goes: to checkpoints, to peers, to other stages.
        for group in self.optimizer.param_groups:
            group[LOSS_SCALE] = held

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters, optimizer state, and copies: of states as many as there were at any time."""
        states = (value for own in self.optimizer.state.values() for value in own.values() if isinstance(value, Tensor))
        held = sum(tensor.nbytes for tensor in (*self._parameters, *states, *self._copies.values()))
        return held + self._most_copied_bytes

    @property
    def part_bytes(self) -> int:
        """The bytes of the gradients of the largest part, which are made for its step."""
        sizes = (sum(self._parameters[number].nbytes for number in range(*part)) for part in self.parts())
        return max(sizes, default=0)

    @property
    def can_step_in_parts(self) -> bool:
        """Whether the optimizer steps every parameter on its own, as all of torch's do; others may count their steps."""
        return f"{type(self.optimizer).__module__}.".startswith("torch.optim.")

    def parts(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of the parameters from number `first` to `end`, stepped one after the other: so little memory is used."""
        end = len(self._parameters) if end is None else end
        if first < end and not self.can_step_in_parts:
            yield first, end
            return
        size = 0
        for number in range(first, end):
            size += self._parameters[number].nbytes
            if size >= _PART_BYTES or number == end - 1:
                yield first, number + 1
                first, size = number + 1, 0

    def step(self, iteration: int, gradients: Gradients, scale: float | None) -> None:
        """Apply gradients times `scale`, for good; a scale of None changes nothing."""
        if scale is not None:
            for part in self.parts():
                self._step(iteration, gradients(*part), scale)

    def try_step(self, iteration: int, gradients: Gradients, first: int = 0, end: int | None = None) -> None:
        """Apply the gradients of the parameters from number `first` to `end` so that `settle` or `take_back` can follow."""
        assert self.can_step_in_parts or not self._is_trying, "this optimizer steps all parameters at once"
        self._is_trying = True
        for part in self.parts(first, end):
            numbers = range(*part)
            self._keep(numbers)
            parameters = [self._parameters[number] for number in numbers]
            before = _State.of(self.optimizer, parameters)
            if self.is_lean:
                before.use_copies(self.optimizer)
                self._step(iteration, gradients(*part), 1.0)
                before.put_back(self.optimizer)
                del before  # its copies would be held beside those of the next part
            else:
                self._step(iteration, gradients(*part), 1.0)
                self._states_before.append(before)
        copied = sum(tensor.nbytes for before in self._states_before for tensor in before.copies)
        self._most_copied_bytes = max(self._most_copied_bytes, copied)

    def settle(self, iteration: int, gradients: Gradients) -> None:
        """Make the step that was tried one for good; the gradients are the same again."""
        assert self._is_trying, "there is no step to settle"
        if self.is_lean:
            self._step_copies(iteration, gradients)
        self._end_trial()

    def take_back(self) -> None:
        """Restore parameters and optimizer state from before the step that was tried, bit for bit."""
        assert self._is_trying, "there is no step to take back"
        self._put_back()
        for before in self._states_before:
            before.restore(self.optimizer)
        self._end_trial()

    def _end_trial(self) -> None:
        self._is_trying = False
        self._tried.clear()
        self._states_before.clear()

    def _step_copies(self, iteration: int, gradients: Gradients) -> None:
        """Step the copies of the parameters as if they were the parameters, which ops in flight need as they are: stepped."""
        groups, copies = self.optimizer.param_groups, [self._copies[number] for number in range(len(self._parameters))]
        of, params = dict(zip(self._parameters, copies, strict=True)), [group["params"] for group in groups]
        self._rename_states(of)
        for group in groups:
            group["params"] = [of[parameter] for parameter in group["params"]]
        try:
            for part in self.parts():
                self._step(iteration, gradients(*part), 1.0, copies)
        finally:
            for group, own in zip(groups, params, strict=True):
                group["params"] = own
            self._rename_states({copy: parameter for parameter, copy in of.items()})

    def _rename_states(self, names: Mapping[Tensor, Tensor]) -> None:
        state = self.optimizer.state
        for old, new in names.items():
            if old in state:
                state[new] = state.pop(old)

    def _step(self, iteration: int, gradients: Sequence[Tensor | None], scale: float, of: Sequence[Tensor] = ()) -> None:
        parameters = of or self._parameters
        factor = self._schedule(iteration)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self.optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def _keep(self, numbers: Sequence[int]) -> None:
        """Copy parameters."""
        for number in numbers:
            self._tried.add(number)
            if number not in self._copies:
                self._copies[number] = torch.empty_like(self._parameters[number], requires_grad=False)
        _copy_all([self._parameters[at] for at in numbers], [self._copies[at] for at in numbers])

    def _put_back(self) -> None:
        _copy_all([self._copies[at] for at in self._tried], [self._parameters[at] for at in self._tried])


@dataclass(frozen=True, slots=True)
class _State:
    """What an optimizer knew of some parameters, with copies of the tensors in it, and the options of its groups."""

    parameters: Sequence[Tensor]
    states: Sequence[dict[str, Any] | None]
    groups: Sequence[dict[str, Any]]
    tensors: list[Tensor]
    copies: list[Tensor]

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> "_State":
        tensors: list[Tensor] = []
        states = [_same(optimizer.state.get(parameter), tensors) for parameter in parameters]
        groups = [_same({key: group[key] for key in group if key != "params"}, tensors) for group in optimizer.param_groups]
        copies = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        _copy_all(tensors, copies)
        return _State(parameters, states, groups, tensors, copies)

    def use_copies(self, optimizer: Optimizer) -> None:
        """Let the optimizer change the copies, and not what it knows."""
        copies = iter(self.copies)
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if state is not None:
                optimizer.state[parameter] = _with(state, copies)
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(_with(options, copies))

    def restore(self, optimizer: Optimizer) -> None:
        """Undo what the optimizer has changed. `load_state_dict` would cast tensors to the precision of their parameter."""
        _copy_all(self.copies, self.tensors)
        self.put_back(optimizer)

    def put_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer know what it knew before: the same tensors and options."""
        for parameter, state in zip(self.parameters, self.states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = state
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(options)


def _copy_all(tensors: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Copy in one operation, because there are many small ones."""
    if tensors:
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(tensors))


def _same(value: Any, tensors: list[Tensor]) -> Any:
    """A copy of `value` with the tensors themselves, which are added to `tensors`."""
    match value:
        case Tensor():
            tensors.append(value)
            return value
        case dict():
            return {key: _same(part, tensors) for key, part in value.items()}
        case list() | tuple():
            return type(value)(_same(part, tensors) for part in value)
    return value


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A copy of `value` with the next of these tensors for each of its own, in the order of `_same`."""
    match value:
        case Tensor():
            return next(tensors)
        case dict():
            return {key: _with(part, tensors) for key, part in value.items()}
        case list() | tuple():
            return type(value)(_with(part, tensors) for part in value)
    return value


class _NoOptimizer(Optimizer):
    """The optimizer of a stage without parameters; torch's optimizers refuse an empty list of parameters."""

    def __init__(self) -> None:
        super().__init__([{"params": [], "lr": 0.0}], {})

    def step(self, closure: Any = None) -> Any:
        return None
