"""The trainer: iterations of one worker in one epoch, one after the other, with a step that may be taken back between them.

A synchronous worker waits for the verdict on a step before it steps. A staggered one steps at once as if nothing had to be
scaled, plays the warm-up of its next iteration, and hears the verdict then. If it was wrong, it takes the step back, does the
right one, and begins the iteration again. All workers hear the same ballot, so that all begin again or none. The ballot also says
whether somebody wants a pause, so that all pause at the same iteration.

After a step that had to be scaled the next one probably must be, too: it is not guessed, but waited for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recycle.control.decide.messages import Ballot
from recycle.core.cluster import Shape
from recycle.core.events.record import OPTIMIZER, REDUCE
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.executor import Executor
from recycle.runtime.execute.spans import Span, now_us
from recycle.runtime.execute.stage_state import Report, StageState
from recycle.runtime.transport.gloo import GlooTransport, GroupView

_GUESSED_SCALE = 1.0
# Every iteration holds the same: what it is can be measured in the first ones, at no cost for the others.
_METERED_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class _Vote:
    """A ballot on its way: every stage's sum of squares, and who wants a pause, when `work` is done."""

    iteration: int
    values: Tensor
    work: Any


class Trainer:
    """One worker's iterations. Any thread may set `wants_pause`: then all stop together, soon, between two iterations."""

    def __init__(
        self,
        executor: Executor,
        links: GlooTransport,
        footing: StageState,
        address: GroupView,
        shape: Shape,
        ties: Sequence[Tie],
        warm_up: int,
        is_staggered: bool,
    ) -> None:
        self.executor, self.footing = executor, footing
        self.wants_pause = False
        self.spans: list[Span] = []
        self._links, self._address, self._shape = links, address, shape
        self._ties = [tie for tie in ties if address.worker.stage in tie.stages]
        self._warm_up, self._is_staggered, self._was_scaled = warm_up, is_staggered, False
        self._vote: _Vote | None = None
        self.activation_bytes = 0

    def train(self, num_steps: int, report: Report) -> bool:
        """Play iterations until the weights have `num_steps` steps, and return True; or False if it paused before.

        `report` is called for each iteration when it cannot be taken back any more.
        """
        first = self.footing.num_steps
        for iteration in range(first, num_steps):
            self.executor.losses.clear()
            spans: list[Span] = []
            self.spans = spans
            if self._vote is not None:
                self.executor.play(iteration, 0, self._warm_up, spans, is_guess=True)
                was_right, is_pause = self._hear(report)
                if is_pause:
                    self.executor.begin_again()
                    return False
                if not was_right:
                    spans[:] = [replace(span, is_discarded=True) for span in spans]
                    self._begin_again()
                elif self.executor.doubt is not None:
                    raise self.executor.doubt
            played = sum(not span.is_discarded for span in spans)
            self.executor.play(iteration, played, len(self.executor.turns), spans)
            if self._finish(iteration, spans, report):
                return False
            self._links.round += 1
            if iteration + 1 - first == _METERED_ITERATIONS:
                self._read_meter()
        self._read_meter()
        self.spans = []
        if self._vote is not None:
            self._hear(report)
        self._links.settle()
        return True

    def _read_meter(self) -> None:
        """Keep what the stage held at most, and measure no more."""
        if self.executor.stage.meter is not None:
            self.activation_bytes = self.executor.stage.meter.peak_bytes
            self.executor.stage.meter = None

    def _finish(self, iteration: int, spans: list[Span], report: Report) -> bool:
        """Reduce and step; return whether all pause now. A staggered worker hears that later, with the verdict."""
        start, sums = now_us(), self.executor.stage.sums
        self.executor.reached(iteration, REDUCE)
        self._links.add_over_peers(sums.flat)
        losses = self._shared_losses()
        for tie in self._ties:
            parameter = tie.parameter(self._address.worker.stage, self.executor.stage.module)
            self._links.add_over_tie(tie, sums.of(parameter))
        self.footing.hold(iteration, losses, spans)
        self.spans = []  # from now on they belong to what is held
        spans.append(Span(REDUCE, start, now_us()))
        self._put_in(iteration)
        if self._is_staggered and not self._was_scaled:
            self._apply(_GUESSED_SCALE, spans)
            self.executor.reached(iteration, OPTIMIZER)
            return False
        ballot, is_pause = self._counted()
        self._apply(self.footing.judge(ballot).scale, spans)
        self.executor.reached(iteration, OPTIMIZER)
        self._confirm(ballot, report)
        return is_pause

    def _shared_losses(self) -> Mapping[int, float]:
        """The losses of all micro-batches at the last stage, whose peers have them between them: any one is enough to tell them.

        They go no further: the more numbers all workers have to add up, the longer that takes, however small they are.
        """
        if self._address.worker.stage < self._shape.num_stages - 1:
            return {}
        values = torch.zeros(self._shape.num_chains, dtype=torch.float64, device=self.executor.stage.sums.flat.device)
        for chain, loss in self.executor.losses.items():
            values[chain] = loss
        self._links.add_over_peers(values)
        return dict(enumerate(values.tolist()))

    def _put_in(self, iteration: int) -> None:
        """Say what this worker has to say about the step; the first live peer of a stage speaks for it."""
        values = torch.zeros(self._shape.num_stages + 1, dtype=torch.float64)
        if self._address.is_first_peer:
            values[self._address.worker.stage] = self.footing.norm_squared()
        values[-1] = float(self.wants_pause)
        self._vote = _Vote(iteration, values, self._links.start_adding_over_all(values))

    def _counted(self) -> tuple[Ballot, bool]:
        """Wait for the whole ballot: it, and whether somebody wants a pause."""
        vote = self._vote
        assert vote is not None
        self._links.wait(vote.work)
        self._vote = None
        *norms, pause = vote.values.tolist()
        return Ballot(vote.iteration, tuple(norms)), pause > 0

    def _hear(self, report: Report) -> tuple[bool, bool]:
        """Hear the verdict on a step that was guessed, and set the step right: whether it was right, and whether all pause."""
        ballot, is_pause = self._counted()
        return self._confirm(ballot, report), is_pause

    def _confirm(self, ballot: Ballot, report: Report) -> bool:
        self._was_scaled = self.footing.judge(ballot).scale not in (None, _GUESSED_SCALE)
        return self.footing.confirm(ballot, report)

    def _apply(self, scale: float | None, spans: list[Span]) -> None:
        start = now_us()
        self.footing.apply(scale)
        spans.append(Span(OPTIMIZER, start, now_us()))

    def _begin_again(self) -> None:
        """Forget what the warm-up made, here and on its way here: what other warm-ups sent for later ops of this row."""
        self.executor.begin_again()
        for turn in self.executor.turns[self._warm_up :]:
            if turn.takes is not None and turn.takes.is_of_warm_up:
                self._links.receive(turn.takes)
        self._links.round += 1
