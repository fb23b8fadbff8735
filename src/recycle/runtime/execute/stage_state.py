"""StageState: the weights of a worker's stage, the gradient that awaits its verdict, and the iterations that both belong to.

It outlives an epoch. A worker that is stopped reports its progress, and is told the iteration at which all workers resume: then
it confirms the gradient that it holds, or takes back its last step, so that all workers are at the same iteration.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from torch import Tensor

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.messages import Ballot, ProgressReport
from recycle.core.cluster import Shape
from recycle.runtime.compute.optimizer_step import NORM_PARTS, Stepper, StepVerdict, judge_step, squares_of, sum_in_parts
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.stage_bytes import held_state_bytes
from recycle.runtime.compute.streams import beside_ops
from recycle.runtime.compute.tied_parameters import Tie, counted_elsewhere
from recycle.runtime.execute.spans import Span

_GUESSED_SCALE = 1.0
OnApplied = Callable[[int, Mapping[int, float], Sequence[Span], StepVerdict], None]
"""Called when an iteration is applied for good, with its number, losses, spans and verdict."""


@dataclass(slots=True)
class _Unconfirmed:
    """A reduced gradient that is not confirmed: whether its step was tried with a guessed scale of 1, or done by its verdict.

    The stage's sums are the gradient.
    """

    iteration: int
    losses: Mapping[int, float]
    spans: list[Span]
    norm: tuple[float, ...] | None = None
    is_tried: bool = False
    is_done: bool = False


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
        # The numbers of the parameters that are stepped ahead, and the squares of their gradients.
        self._ahead, self._ahead_squares = set[int](), list[float]()
        self._numbers = {id(parameter): number for number, parameter in enumerate(stage.parameters())}
        self._last_ballot = last_ballot
        elsewhere = counted_elsewhere(ties, stage.number, stage.module)
        self._counts = [id(parameter) not in elsewhere for parameter in stage.parameters()]

    def scale_loss(self) -> None:
        """Have the backward passes of the next step use the scale of the loss, now that all steps before it are confirmed."""
        self.stage.scale_loss(self.stepper.loss_scale)

    @property
    def can_step_ahead(self) -> bool:
        """Whether parameters can be stepped before the gradient of the others is known."""
        return self.stepper.can_step_in_parts

    def step_ahead(self, parameters: Sequence[Tensor]) -> None:
        """Step these parameters with a guessed scale of 1. The gradient is held when that of all others is known, too.

        Until then the iteration does not count as reduced: a worker that is stopped takes the step back.
        """
        assert self._unconfirmed is None, "a step is still to be confirmed"
        for first, end in _ranges(self._numbers[id(parameter)] for parameter in parameters):
            self._ahead.update(range(first, end))
            self._ahead_squares += self._squares(first, end)
            self.stepper.try_step(self.num_steps, self._means, first, end)

    def hold(self, iteration: int, losses: Mapping[int, float], spans: list[Span]) -> None:
        """Hold the stage's sums as the gradient of an iteration, now that they are those of all peers: also on a GPU."""
        assert self._unconfirmed is None, "a step is still to be confirmed"
        assert iteration == self.num_steps, f"iteration {iteration} is to be applied after {self.num_steps} steps"
        self._unconfirmed = _Unconfirmed(iteration, dict(losses), spans)

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters, optimizer state and gradients."""
        return held_state_bytes(self.stage, self.stepper)

    @property
    def held_spans(self) -> list[Span]:
        """The spans of the iteration that awaits its verdict: a list that may still get some."""
        assert self._unconfirmed is not None
        return self._unconfirmed.spans

    @property
    def is_settled_later(self) -> bool:
        """Whether the step that awaits its verdict was tried, and will be computed again when it is settled."""
        return self._unconfirmed is not None and self._unconfirmed.is_tried and self.stepper.is_lean

    def _means(self, first: int = 0, end: int | None = None) -> Sequence[Tensor | None]:
        return self.stage.sums.means(self._shape.num_chains, first, end)

    def norm_squared(self) -> tuple[float, ...]:
        held = self._unconfirmed
        assert held is not None
        if held.norm is None:
            squares = [self._squares(first, end) for first, end in self._not_ahead()]
            held.norm = sum_in_parts([*self._ahead_squares, *chain.from_iterable(squares)])
        return held.norm

    def _squares(self, first: int, end: int) -> list[float]:
        """The squares of the gradients of some parameters, as far as they count in the norm of this stage.

        The sums are there. A GPU may still have ops of the next iteration to run: the vote need not wait for these.
        """
        squares: list[float] = []
        with beside_ops(self.stage.device):
            for part in self.stepper.parts(first, end):
                squares += squares_of(mean for mean, counts in zip(self._means(*part), self._counts, strict=True) if counts)
        return squares

    def _not_ahead(self) -> Iterator[tuple[int, int]]:
        return _ranges(set(range(len(self._counts))) - self._ahead)

    def guess(self) -> None:
        """Step with the gradient that is held and a scale of 1; the verdict says whether that was right."""
        held = self._unconfirmed
        assert held is not None
        for first, end in [*self._not_ahead()] or [(0, 0)]:  # a stage without parameters steps, too
            self.stepper.try_step(held.iteration, self._means, first, end)
        self._forget_ahead()
        self.num_steps += 1
        held.is_tried = True

    def apply(self, ballot: Ballot) -> bool:
        """Step by the verdict with the gradient that is held, for good; return whether a guess was right."""
        held, scale = self._unconfirmed, self.judge(ballot).scale
        assert held is not None
        assert held.iteration == ballot.iteration, f"a verdict on iteration {ballot.iteration}, not {held.iteration}"
        self._take_back_ahead()
        was_right = held.is_tried and scale == _GUESSED_SCALE
        if was_right:
            self.stepper.settle(held.iteration, self._means)
        else:
            if held.is_tried:
                self._take_back()
            self.stepper.step(held.iteration, self._means, scale)
            self.num_steps += 1
        held.is_done, self._last_ballot = True, ballot
        return was_right

    def judge(self, ballot: Ballot) -> StepVerdict:
        """The verdict on the iteration that is held."""
        return replace(judge_step(ballot.norms, self._max_norm), loss_scale=self.stepper.loss_scale)

    def confirm(self, ballot: Ballot, on_applied: OnApplied) -> bool:
        """Report the iteration, after its step by the verdict if that is still to be done; return whether no guess was wrong."""
        held = self._unconfirmed
        assert held is not None
        was_right, verdict = held.is_done or self.apply(ballot), self.judge(ballot)
        self._unconfirmed = None
        self.stage.sums.clear()
        self.stepper.follow_verdict(verdict)
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
        elif held is not None and held.is_tried and self.num_steps == iteration + 1:
            self._take_back()
        self._unconfirmed = None
        self.stage.sums.clear()
        assert self.num_steps == iteration, f"the weights have {self.num_steps} steps, but all go on at {iteration}"
        return held.spans if held is not None and held.iteration >= iteration else ()

    def _take_back_ahead(self) -> None:
        if self._ahead:
            self.stepper.take_back()
            self._forget_ahead()

    def _forget_ahead(self) -> None:
        self._ahead.clear()
        self._ahead_squares.clear()

    def _take_back(self) -> None:
        self.stepper.take_back()
        self.num_steps -= 1
        assert self._unconfirmed is not None
        self._unconfirmed.is_tried = False


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive numbers, each from its first number to the one after its last."""
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda item: item[1] - item[0]):
        inside = [number for _, number in group]
        yield inside[0], inside[-1] + 1
