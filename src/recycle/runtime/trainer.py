"""The trainer: iterations of one worker, one after the other, with a step that may be taken back between them.

A synchronous worker waits for the verdict on a step before it steps. A staggered one steps at once as if nothing had to be
scaled, plays the warm-up of its next iteration, and hears the verdict then. If it was wrong, it takes the step back, does the
right one, and begins the iteration again. All workers hear the same verdict, so that all begin again or none.

After a step that had to be scaled the next one probably must be, too: it is not guessed, but waited for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recycle.core.cluster import Shape
from recycle.core.record import OPTIMIZER, REDUCE
from recycle.runtime.executor import Executor, Span, now_us
from recycle.runtime.links import Address, GlooLinks
from recycle.runtime.step import Stepper, Verdict, judge, norm_squared
from recycle.runtime.ties import Tie, counted_elsewhere

Report = Callable[[int, Mapping[int, float], Sequence[Span], Verdict], None]
"""What is called when an iteration is applied for good, with its number, losses, spans and verdict."""

_GUESSED_SCALE = 1.0
# Every iteration holds the same: what it is can be measured in the first ones, at no cost for the others.
_METERED_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class _Ballot:
    """A step whose verdict is on its way: every stage's sum of squares, as soon as `work` is done."""

    iteration: int
    norms: Tensor
    work: Any
    losses: Mapping[int, float]
    spans: Sequence[Span]


class Trainer:
    """One worker's iterations."""

    def __init__(
        self,
        executor: Executor,
        links: GlooLinks,
        stepper: Stepper,
        address: Address,
        shape: Shape,
        ties: Sequence[Tie],
        warm_up: int,
        is_staggered: bool,
        max_norm: float | None,
    ) -> None:
        self.executor, self.stepper = executor, stepper
        self._links, self._address, self._shape, self._max_norm = links, address, shape, max_norm
        stage = executor.stage
        self._ties = [tie for tie in ties if address.worker.stage in tie.stages]
        elsewhere = counted_elsewhere(ties, address.worker.stage, stage.module)
        self._counts = [id(parameter) not in elsewhere for parameter in stage.parameters()]
        self._warm_up, self._is_staggered, self._was_scaled = warm_up, is_staggered, False
        self.activation_bytes = 0

    def train(self, first: int, num_steps: int, report: Report) -> None:
        """Play iterations `first` to before `num_steps`; `report` is called for each when it cannot be taken back any more."""
        ballot: _Ballot | None = None
        for iteration in range(first, num_steps):
            self.executor.losses.clear()
            spans: list[Span] = []
            if ballot is not None:
                spans += self.executor.play(iteration, 0, self._warm_up, is_guess=True)
                if not self._confirm(ballot, report):
                    spans = [replace(span, is_in_vain=True) for span in spans]
                    self._begin_again()
                elif self.executor.doubt is not None:
                    raise self.executor.doubt
            played = sum(not span.is_in_vain for span in spans)
            spans += self.executor.play(iteration, played, len(self.executor.turns))
            ballot = self._finish(iteration, spans, report)
            self._links.round += 1
            if iteration + 1 - first == _METERED_ITERATIONS:
                self._read_meter()
        self._read_meter()
        if ballot is not None:
            self._confirm(ballot, report)
        self._links.settle()

    def _read_meter(self) -> None:
        """Keep what the stage held at most, and measure no more."""
        if self.executor.stage.meter is not None:
            self.activation_bytes = self.executor.stage.meter.peak_bytes
            self.executor.stage.meter = None

    def _finish(self, iteration: int, spans: list[Span], report: Report) -> _Ballot | None:
        """Reduce and step; return the ballot if its verdict was not waited for."""
        start, sums = now_us(), self.executor.stage.sums
        self._links.add_over_peers(sums.flat)
        for tie in self._ties:
            parameter = tie.parameter(self._address.worker.stage, self.executor.stage.module)
            self._links.add_over_tie(tie, sums.of(parameter))
        spans.append(Span(REDUCE, start, now_us()))
        means = sums.means(self._shape.num_chains)
        ballot = self._call(iteration, means, spans)
        if self._is_staggered and not self._was_scaled:
            self._step(iteration, means, _GUESSED_SCALE, spans)
            return ballot
        verdict = self._verdict(ballot)
        self._step(iteration, means, verdict.scale, spans)
        self._done(ballot, verdict, report)
        return None

    def _call(self, iteration: int, means: Sequence[Tensor | None], spans: Sequence[Span]) -> _Ballot:
        """Put in what this stage has to say about the step; the first live peer of each speaks for it."""
        norms = torch.zeros(self._shape.num_stages, dtype=torch.float64)
        if self._address.is_first_peer:
            own = [mean for mean, counts in zip(means, self._counts, strict=True) if counts]
            norms[self._address.worker.stage] = norm_squared(own)
        work = self._links.start_adding_over_all(norms)
        return _Ballot(iteration, norms, work, dict(self.executor.losses), spans)

    def _verdict(self, ballot: _Ballot) -> Verdict:
        ballot.work.wait()
        return judge(ballot.norms.tolist(), self._max_norm)

    def _confirm(self, ballot: _Ballot, report: Report) -> bool:
        """Hear the verdict on a step that was guessed, and set the step right; return whether the guess was right."""
        verdict = self._verdict(ballot)
        is_right = verdict.scale == _GUESSED_SCALE
        if not is_right:
            self.stepper.take_back()
            means = self.executor.stage.sums.means(self._shape.num_chains)
            self.stepper.step(ballot.iteration, means, verdict.scale)
        self._done(ballot, verdict, report)
        return is_right

    def _done(self, ballot: _Ballot, verdict: Verdict, report: Report) -> None:
        self._was_scaled = verdict.scale not in (None, _GUESSED_SCALE)
        self.executor.stage.sums.clear()
        report(ballot.iteration, ballot.losses, ballot.spans, verdict)

    def _step(self, iteration: int, means: Sequence[Tensor | None], scale: float | None, spans: list[Span]) -> None:
        start = now_us()
        self.stepper.step(iteration, means, scale)
        spans.append(Span(OPTIMIZER, start, now_us()))

    def _begin_again(self) -> None:
        """Forget what the warm-up made, here and on its way here: what other warm-ups sent for later ops of this row."""
        self.executor.begin_again()
        for turn in self.executor.turns[self._warm_up :]:
            if turn.takes is not None and turn.takes.is_of_warm_up:
                self._links.receive(turn.takes)
        self._links.round += 1
