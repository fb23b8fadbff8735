"""What a worker stands on: its weights, the gradient that it holds, and which iterations they are of.

It outlives an epoch. A worker that is stopped says where it stands, and is told where all go on: then it settles what it holds,
or takes back its last step, so that everybody stands at the same iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recycle.control.decide.agreement import ABSENT
from recycle.control.decide.messages import Ballot, ProgressReport
from recycle.core.cluster import Shape
from recycle.runtime.compute.optimizer_step import Stepper, StepVerdict, judge_step, norm_squared
from recycle.runtime.compute.stage import Stage
from recycle.runtime.compute.tied_parameters import Tie, counted_elsewhere
from recycle.runtime.execute.spans import Span

Report = Callable[[int, Mapping[int, float], Sequence[Span], StepVerdict], None]
"""What is called when an iteration is applied for good, with its number, losses, spans and verdict."""


@dataclass(slots=True)
class _Held:
    """A reduced gradient of which the verdict is not heard yet, and whether it was applied with a guess.

    The stage's sums are the gradient. `means` are it for a step; None after one, since an optimizer may change what it is given.
    """

    iteration: int
    means: Sequence[Tensor | None] | None
    losses: Mapping[int, float]
    spans: Sequence[Span]
    is_applied: bool = False
    scale: float | None = None


class StageState:
    """One worker's weights with all that belongs to them. `num_steps` is how many steps they have."""

    def __init__(
        self, stage: Stage, stepper: Stepper, shape: Shape, ties: Sequence[Tie], max_norm: float | None, num_steps: int = 0
    ) -> None:
        self.stage, self.stepper, self.num_steps = stage, stepper, num_steps
        self._shape, self._max_norm = shape, max_norm
        self._held: _Held | None = None
        self._whole: Ballot | None = None
        elsewhere = counted_elsewhere(ties, stage.number, stage.module)
        self._counts = [id(parameter) not in elsewhere for parameter in stage.parameters()]

    def hold(self, iteration: int, losses: Mapping[int, float], spans: Sequence[Span]) -> None:
        """The stage's sums are those of all its peers now: the iteration can be applied."""
        assert self._held is None, "a step is still to be confirmed"
        assert iteration == self.num_steps, f"iteration {iteration} is to be applied after {self.num_steps} steps"
        self._held = _Held(iteration, None, dict(losses), spans)

    def _means(self, held: _Held) -> Sequence[Tensor | None]:
        if held.means is None:
            held.means = self.stage.sums.means(self._shape.num_chains)
        return held.means

    def norm_squared(self) -> float:
        assert self._held is not None
        return norm_squared(mean for mean, counts in zip(self._means(self._held), self._counts, strict=True) if counts)

    def apply(self, scale: float | None) -> None:
        """Step with the gradient that is held, times `scale`."""
        held = self._held
        assert held is not None
        self.stepper.step(held.iteration, self._means(held), scale)
        held.means = None
        self.num_steps += 1
        held.is_applied, held.scale = True, scale

    def judge(self, ballot: Ballot) -> StepVerdict:
        return judge_step(ballot.norms, self._max_norm)

    def confirm(self, ballot: Ballot, report: Report) -> bool:
        """Set the step right by its ballot, for good; return whether nothing had to be changed."""
        held, verdict = self._held, self.judge(ballot)
        assert held is not None
        assert held.iteration == ballot.iteration, f"a verdict on iteration {ballot.iteration}, not {held.iteration}"
        was_right = held.is_applied and held.scale == verdict.scale
        if held.is_applied and not was_right:
            self._take_back()
        if not was_right:
            self.apply(verdict.scale)
        self._held, self._whole = None, ballot
        self.stage.sums.clear()
        report(held.iteration, held.losses, held.spans, verdict)
        return was_right

    def standing(self) -> ProgressReport:
        """Where the worker stands; what it holds of others' parts of the ballot is absent."""
        own = None
        if self._held is not None:
            norms = [ABSENT] * self._shape.num_stages
            norms[self.stage.number] = self.norm_squared()
            own = Ballot(self._held.iteration, tuple(norms))
        return ProgressReport(self.num_steps, own, self._whole)

    def go_to(self, iteration: int, ballot: Ballot | None, report: Report) -> Sequence[Span]:
        """Stand where all go on: confirm what is held if that is settled, or take it back. Nothing is in flight after it.

        Return what had run of the iteration that was held, if that is done again.
        """
        self.stage.forget()
        held = self._held
        if held is not None and held.iteration == iteration - 1:
            assert ballot is not None, f"iteration {held.iteration} is settled, but without a verdict"
            self.confirm(ballot, report)
        elif self.num_steps == iteration + 1:
            self._take_back()
        self._held = None
        self.stage.sums.clear()
        assert self.num_steps == iteration, f"the weights have {self.num_steps} steps, but all go on at {iteration}"
        return held.spans if held is not None and held.iteration >= iteration else ()

    def _take_back(self) -> None:
        self.stepper.take_back()
        self.num_steps -= 1
        if self._held is not None:
            self._held.is_applied = False
