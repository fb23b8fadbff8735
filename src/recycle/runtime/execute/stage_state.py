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
    is_applied: bool = False
    scale: float | None = None


class StageState:
    """One worker's weights and optimizer, with `num_steps` steps done."""

    def __init__(
        self, stage: Stage, stepper: Stepper, shape: Shape, ties: Sequence[Tie], max_norm: float | None, num_steps: int = 0
    ) -> None:
        self.stage, self.stepper, self.num_steps = stage, stepper, num_steps
        self._shape, self._max_norm = shape, max_norm
        self._unconfirmed: _Unconfirmed | None = None
        self._last_ballot: Ballot | None = None
        elsewhere = counted_elsewhere(ties, stage.number, stage.module)
        self._counts = [id(parameter) not in elsewhere for parameter in stage.parameters()]

    def hold(self, iteration: int, losses: Mapping[int, float], spans: list[Span]) -> None:
        """Hold the stage's sums as the gradient of an iteration, now that they are those of all peers."""
        assert self._unconfirmed is None, "a step is still to be confirmed"
        assert iteration == self.num_steps, f"iteration {iteration} is to be applied after {self.num_steps} steps"
        self._unconfirmed = _Unconfirmed(iteration, None, dict(losses), spans)

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
        assert self._unconfirmed is not None
        means = self._means(self._unconfirmed)
        return norm_squared(mean for mean, counts in zip(means, self._counts, strict=True) if counts)

    def apply(self, scale: float | None) -> None:
        """Step with the gradient that is held, times `scale`."""
        held = self._unconfirmed
        assert held is not None
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

    def _take_back(self) -> None:
        self.stepper.take_back()
        self.num_steps -= 1
        if self._unconfirmed is not None:
            self._unconfirmed.is_applied = False
