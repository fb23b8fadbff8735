"""StageState: the weights of a worker's stage, the gradient that awaits its verdict, and the iterations that both belong to.

It outlives an epoch. A worker that is stopped reports its progress, and is told the iteration at which all workers resume: then
it confirms the gradient that it holds, or takes back its last step, so that all workers are at the same iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.messages import Ballot, ProgressReport
from recycle.core.cluster import Shape
from recycle.runtime.compute.optimizer_step import NORM_PARTS, Stepper, StepVerdict, judge_step, norm_squared
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import held_state_bytes
from recycle.runtime.compute.tied_parameters import Tie, counted_elsewhere
from recycle.runtime.execute.spans import Span

OnApplied = Callable[[int, Mapping[int, float], Sequence[Span], StepVerdict], None]
"""Called when an iteration is applied for good, with its number, losses, spans and verdict."""


@dataclass(slots=True)
class _Unconfirmed:
    """A reduced gradient without a verdict, and whether it was applied with a guessed scale.

    The stage's sums are the gradient. `means` are the gradient for a step; None after one, since an optimizer may change them.
    """

    iteration: int
    means: Sequence[Tensor | None] | None
    losses: Mapping[int, float]
    spans: list[Span]
    norm: tuple[float, ...] | None = None
    is_applied: bool = False
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class _StepAhead:
    """The step of the first `num_parameters`, with a guessed scale of 1, and the norm of the gradient of the stage."""

    num_parameters: int
    norm: tuple[float, ...]


class StageState:
    """One worker's weights and optimizer, with `num_steps` steps done."""

    def __init__(
        self,
        stage: Stage,
        stepper: Stepper,
        shape: Shape,
        ties: Sequence[Tie],
        max_norm: float | None,
        num_steps: int = 0,
        last_ballot: Ballot | None = None,
    ) -> None:
        self.stage, self.stepper, self.num_steps = stage, stepper, num_steps
        self._shape, self._max_norm = shape, max_norm
        self._unconfirmed: _Unconfirmed | None = None
        self._ahead: _StepAhead | None = None
        self._last_ballot = last_ballot
        elsewhere = counted_elsewhere(ties, stage.number, stage.module)
        self._counts = [id(parameter) not in elsewhere for parameter in stage.parameters()]

    def can_step_ahead(self, num_parameters: int) -> bool:
        """Whether the first parameters can be stepped before the gradient of the others is known."""
        return self.stepper.can_step_in_parts and not any(self._counts[num_parameters:])

    def step_ahead(self, num_parameters: int) -> None:
        """Step the first parameters with a guessed scale of 1. The gradient is held when those of the others are known, too.

        Until then the iteration does not count as reduced: a worker that is stopped takes the step back.
        """
        assert self._unconfirmed is None, "a step is still to be confirmed"
        means = self.stage.sums.means(self._shape.num_chains, 0, num_parameters)
        self._ahead = _StepAhead(num_parameters, self._norm_squared(means))
        self.stepper.step(self.num_steps, means, 1.0)

    def hold(self, iteration: int, losses: Mapping[int, float], spans: list[Span]) -> None:
        """Hold the stage's sums as the gradient of an iteration, now that they are those of all peers."""
        assert self._unconfirmed is None, "a step is still to be confirmed"
        assert iteration == self.num_steps, f"iteration {iteration} is to be applied after {self.num_steps} steps"
        norm = self._ahead.norm if self._ahead is not None else None
        self._unconfirmed = _Unconfirmed(iteration, None, dict(losses), spans, norm)

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters, optimizer state and gradients."""
        return held_state_bytes(self.stage, self.stepper)

    @property
    def held_spans(self) -> list[Span]:
        """The spans of the iteration that awaits its verdict: a list that may still get some."""
        assert self._unconfirmed is not None
        return self._unconfirmed.spans

    def _means(self, held: _Unconfirmed) -> Sequence[Tensor | None]:
        if held.means is None:
            held.means = self.stage.sums.means(self._shape.num_chains)
        return held.means

    def norm_squared(self) -> tuple[float, ...]:
        held = self._unconfirmed
        assert held is not None
        if held.norm is None:
            held.norm = self._norm_squared(self._means(held))
        return held.norm

    def _norm_squared(self, means: Sequence[Tensor | None]) -> tuple[float, ...]:
        return norm_squared(mean for mean, counts in zip(means, self._counts, strict=True) if counts)

    def apply(self, scale: float | None) -> None:
        """Step with the gradient that is held, times `scale`."""
        held, ahead = self._unconfirmed, self._ahead
        assert held is not None
        if ahead is not None and scale == 1.0:
            rest = self.stage.sums.means(self._shape.num_chains, ahead.num_parameters)
            self.stepper.step(held.iteration, rest, scale, goes_on=True)
            self._ahead = None
        else:
            self._take_back_ahead()
            self.stepper.step(held.iteration, self._means(held), scale)
        held.means = None
        self.num_steps += 1
        held.is_applied, held.scale = True, scale

    def judge(self, ballot: Ballot) -> StepVerdict:
        return judge_step(ballot.norms, self._max_norm)

    def confirm(self, ballot: Ballot, on_applied: OnApplied) -> bool:
        """Apply the step by its ballot, for good; return whether it had been applied so already."""
        held, verdict = self._unconfirmed, self.judge(ballot)
        assert held is not None
        assert held.iteration == ballot.iteration, f"a verdict on iteration {ballot.iteration}, not {held.iteration}"
        was_right = held.is_applied and held.scale == verdict.scale
        if held.is_applied and not was_right:
            self._take_back()
        if not was_right:
            self.apply(verdict.scale)
        self._unconfirmed, self._last_ballot = None, ballot
        self.stage.sums.clear()
        on_applied(held.iteration, held.losses, held.spans, verdict)
        return was_right

    def progress(self) -> ProgressReport:
        """The progress of the worker; in the ballot that it holds, the norms of other stages are absent."""
        own = None
        self._take_back_ahead()
        if self._unconfirmed is not None:
            parts = [(ABSENT,) * NORM_PARTS] * self._shape.num_stages
            parts[self.stage.number] = self.norm_squared()
            own = Ballot(self._unconfirmed.iteration, tuple(chain.from_iterable(parts)))
        return ProgressReport(self.num_steps, own, self._last_ballot)

    def resume_at(self, iteration: int, ballot: Ballot | None, on_applied: OnApplied) -> Sequence[Span]:
        """Go to the iteration at which all resume: confirm the held gradient by its ballot, or take it back.

        Nothing is in flight afterwards. Return the spans of the iteration that was held, if it is to be done again.
        """
        self.stage.forget()
        self._take_back_ahead()
        held = self._unconfirmed
        if held is not None and held.iteration == iteration - 1:
            assert ballot is not None, f"iteration {held.iteration} is settled, but without a verdict"
            self.confirm(ballot, on_applied)
        elif self.num_steps == iteration + 1:
            self._take_back()
        self._unconfirmed = None
        self.stage.sums.clear()
        assert self.num_steps == iteration, f"the weights have {self.num_steps} steps, but all go on at {iteration}"
        return held.spans if held is not None and held.iteration >= iteration else ()

    def _take_back_ahead(self) -> None:
        if self._ahead is not None:
            self.stepper.take_back()
            self._ahead = None

    def _take_back(self) -> None:
        self.stepper.take_back()
        self.num_steps -= 1
        if self._unconfirmed is not None:
            self._unconfirmed.is_applied = False
