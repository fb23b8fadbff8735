"""What would change the verdict: how much more often servers must fail, or how much longer repairs or pauses must take, until a
rival wins.

Both are simulated with the seeds of the verdict, over the same failures, at a few factors; at a factor of 1 these are the runs of
the verdict itself. Two whose throughput differs by less than `TIE` are a tie: a rival wins where it is faster by more than that.
Where that begins is found by bisection. The choices stay what they are: at another failure rate another shape of either may be
better still, which the same command answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from recycle.sim.advise.choices import SystemChoice
from recycle.sim.advise.evaluations import Evaluations
from recycle.sim.advise.question import ClusterQuestion, constants_of

FAILURES, REPAIRS, PAUSES = "failures", "repairs", "pauses"
FACTORS: Mapping[str, tuple[float, ...]] = {
    FAILURES: (1 / 8, 1, 4, 16),
    REPAIRS: (1 / 8, 1, 8),
    PAUSES: (1 / 4, 1, 8, 64),
}
# Two choices whose throughput differs by a smaller share are called a tie: estimates of op times are not as exact as that.
TIE = 0.002
_NUM_BISECTIONS = 3


@dataclass(frozen=True, slots=True)
class Crossing:
    """The factor of one quantity nearest to 1 from which on a rival wins; None if it wins at none that was tried.

    `slower` is how far the rival is behind at a factor of 1, as a share of the first choice.
    """

    axis: str
    rival: SystemChoice
    factor: float | None
    slower: float

    @property
    def is_tie(self) -> bool:
        """Whether the two are a tie as things are."""
        return self.slower <= TIE


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The crossings, and the samples a second of the first choice and of every rival at each factor of each axis."""

    crossings: Sequence[Crossing]
    curves: Mapping[str, Mapping[SystemChoice, Mapping[float, float]]]


def changed(question: ClusterQuestion, axis: str, first: str, factor: float, system: str) -> ClusterQuestion:
    """The question with one quantity changed, as `system` sees it; only pauses of `first`, the first choice, are changed."""
    if factor == 1:
        return question
    if axis == FAILURES:
        return question.with_failures(factor).no_longer_than(question)
    if axis == REPAIRS:
        return question.with_repairs(factor).no_longer_than(question)
    has_same_pauses = constants_of(system, question.constants) == constants_of(first, question.constants)
    return question.with_pauses(first, factor) if has_same_pauses else question


def sensitivity(
    question: ClusterQuestion, first: SystemChoice, rivals: Sequence[SystemChoice], known: Evaluations
) -> Sensitivity:
    """Simulate the first choice and its rivals with other failure rates, repair times and pauses."""
    rates = _Rates(question, first, known)
    grid = [(axis, factor, choice) for axis, factors in FACTORS.items() for factor in factors for choice in (first, *rivals)]
    rates.find(grid)
    spans = {(axis, rival): rates.span(axis, rival) for axis in FACTORS for rival in rivals}
    for _ in range(_NUM_BISECTIONS):
        middles = {key: sqrt(span[0] * span[1]) for key, span in spans.items() if span is not None}
        rates.find([(axis, at, choice) for (axis, rival), at in middles.items() for choice in (first, rival)])
        for (axis, rival), at in middles.items():
            spans[axis, rival] = rates.halved(axis, rival, spans[axis, rival], at)
    crossings = [
        Crossing(axis, rival, rates.crossing(axis, rival, span), rates.behind(axis, rival, 1))
        for (axis, rival), span in spans.items()
    ]
    curves = {axis: {choice: rates.curve(axis, choice) for choice in (first, *rivals)} for axis in FACTORS}
    return Sensitivity(crossings, curves)


_Span = tuple[float, float] | None


class _Rates:
    """Samples a second by axis, factor and choice."""

    def __init__(self, question: ClusterQuestion, first: SystemChoice, known: Evaluations) -> None:
        self._question, self._first, self._known = question, first, known
        self._rates: dict[tuple[str, float, SystemChoice], float] = {}

    def find(self, keys: Sequence[tuple[str, float, SystemChoice]]) -> None:
        wanted = [key for key in dict.fromkeys(keys) if key not in self._rates]
        cases = [
            (changed(self._question, axis, self._first.system, factor, choice.system), choice) for axis, factor, choice in wanted
        ]
        for key, runs in zip(wanted, self._known.simulate(cases, "asking what would change the verdict"), strict=True):
            self._rates[key] = runs.mean

    def behind(self, axis: str, rival: SystemChoice, factor: float) -> float:
        """How much slower than the first choice a rival is, as a share of the first choice; negative if it is faster."""
        first, other = self._rates[axis, factor, self._first], self._rates[axis, factor, rival]
        if not first:
            return -1.0 if other else 0.0
        return 1 - other / first

    def _wins(self, axis: str, rival: SystemChoice, factor: float) -> bool:
        return self.behind(axis, rival, factor) < -TIE

    def span(self, axis: str, rival: SystemChoice) -> _Span:
        """The two neighbouring factors nearest to 1 between which the rival begins to win, the one nearer to 1 first."""
        factors = sorted({factor for one, factor, _ in self._rates if one == axis})
        pairs = [
            *((one, two) for one, two in pairwise(factors) if one >= 1),
            *((two, one) for one, two in pairwise(factors) if two <= 1),
        ]
        found = [(near, far) for near, far in pairs if self._wins(axis, rival, far) and not self._wins(axis, rival, near)]
        return min(found, key=lambda pair: max(pair[0], 1 / pair[0]), default=None)

    def halved(self, axis: str, rival: SystemChoice, span: _Span, at: float) -> _Span:
        assert span is not None
        near, far = span
        return (near, at) if self._wins(axis, rival, at) else (at, far)

    def crossing(self, axis: str, rival: SystemChoice, span: _Span) -> float | None:
        """Where the rival is ahead by `TIE` if the difference is linear in the factor between the two ends."""
        if span is None:
            return None
        near, far = span
        here, there = self.behind(axis, rival, near) + TIE, self.behind(axis, rival, far) + TIE
        return near + (far - near) * here / (here - there)

    def curve(self, axis: str, choice: SystemChoice) -> dict[float, float]:
        return {factor: self._rates[axis, factor, choice] for factor in FACTORS[axis]}


def threshold_text(axis: str, factor: float, question: ClusterQuestion, system: str, show: Callable[[int], str]) -> str:
    """The quantity at a crossing, in words."""
    if axis == FAILURES:
        return f"a server fails every {show(round(question.mtbf_us / factor))} ({factor:.2g} times as often)"
    if axis == REPAIRS:
        return f"a repair takes {show(round(question.repair_us * factor))} ({factor:.2g} times as long)"
    return f"a recovery of {system} pauses for {show(round(question.pause_us(system) * factor))} ({factor:.2g} times as long)"
