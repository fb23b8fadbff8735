"""Trainer: the iterations of one worker in one epoch, with a step between them that may be taken back.

A synchronous worker waits for the verdict on a step before it steps. A staggered worker steps at once with a guessed scale of 1,
plays the warm-up of its next iteration, and then waits for the verdict; that on a lean step may come before. All workers get the
same ballot, which also says whether a worker wants a pause. Staggered workers have begun the next iteration by then: they play it
to its end, and pause after it, so that no op is redone. After a step that had to be scaled the next one probably must be, too:
its scale is not guessed.

A stage that shares layers with others steps the layers first whose sums are there when its rows end. It steps each other one when
its sum is there, at the latest before an op uses it, and votes when it has all sums.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recycle.control.decide.messages import Ballot
from recycle.core.cluster import Shape
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.runtime.compute.optimizer_step import NORM_PARTS
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.evaluation import Evaluator
from recycle.runtime.execute.executor import Executor
from recycle.runtime.execute.gradient_reduction import GradientReduction
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.spans import Span, now_us
from recycle.runtime.execute.stage_state import OnApplied, StageState
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView

# Every iteration holds the same activations: they are measured in the first ones, at no cost for the others.
_METERED_ITERATIONS = 2
# Who waits for a message looks for sums and verdicts each time when its wait is longer by an eighth: so it never looks much too
# late, and long waits take no time from others.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S, _LOOKS = 0.0005, 0.004, 8


@dataclass(frozen=True, slots=True)
class _Vote:
    """A ballot whose sum over all workers is `work`: every stage's sum of squares, and how many workers want a pause."""

    iteration: int
    values: Tensor
    work: Any


@dataclass(frozen=True, slots=True)
class _Late:
    """An iteration of which some layers are still to be stepped, its losses, and its spans."""

    iteration: int
    losses: Mapping[int, float]
    spans: list[Span]


class Trainer:
    """One worker's iterations. Any thread may set `wants_pause`: then all workers stop soon, between the same two iterations.

    `evaluator` evaluates the weights between two iterations, if there is something to evaluate.
    """

    def __init__(
        self,
        executor: Executor,
        transport: Transport,
        state: StageState,
        view: GroupView,
        shape: Shape,
        ties: Sequence[Tie],
        warm_up: int,
        is_staggered: bool,
        sum_order: Sequence[Sequence[int]] = (),
    ) -> None:
        self.executor, self.state = executor, state
        self.evaluator: Evaluator | None = None
        self.wants_pause = False
        self._spans: list[Span] = []
        self._late: _Late | None = None
        self._transport, self._view, self._shape = transport, view, shape
        self._warm_up, self._is_staggered, self._was_scaled = warm_up, is_staggered, False
        self._pauses_next = False
        self._vote: _Vote | None = None
        self.activation_bytes = 0
        self._reduction = GradientReduction(
            executor.stage, ties, transport.reducer, view.is_first_peer, executor.instructions, warm_up, sum_order
        )
        executor.play_last, executor.after = self._reduction.play_last, self._reduction.after

    @property
    def spans(self) -> list[Span]:
        """The spans of iterations whose gradient is not reduced yet."""
        return [*(self._late.spans if self._late is not None else ()), *self._spans]

    def train(self, num_steps: int, on_applied: OnApplied, pauses_at_end: bool = False) -> bool:
        """Play iterations until the weights have `num_steps` steps, and return True; or False if all paused before.

        With `pauses_at_end`, it is also False if a worker wants a pause after the last of these steps.
        `on_applied` is called for each iteration when it cannot be taken back any more.
        """
        first = self.state.num_steps
        for iteration in range(first, num_steps):
            self.executor.losses.clear()
            spans: list[Span] = []
            self._spans, played = spans, 0
            if self._vote is not None or self._late is not None:
                played = self._wait_for_first_message()
                self.executor.play(iteration, 0, played, spans, is_tentative=True, before=self._before)
                self._step_late(self._reduction.num_late)
                ballot, self._pauses_next = self._end_vote()
                if not self._confirm(ballot, on_applied, spans):
                    self.executor.pass_over(played, self._warm_up)
                    self.executor.settle()
                    spans[:] = [replace(span, is_discarded=True) for span in spans]
                    self._discard_warm_up()
                    played = 0
                elif self.executor.warm_up_error is not None:
                    raise self.executor.warm_up_error
            self.state.scale_loss()  # no op before this one goes backward
            self.executor.play(iteration, played, len(self.executor.instructions), spans)
            self.executor.settle()
            if self._finish(iteration, spans, on_applied):
                return False
            self._transport.messages.round += 1
            if iteration + 1 - first == _METERED_ITERATIONS:
                self._read_meter()
        self._read_meter()
        self._spans = []
        self._step_late(self._reduction.num_late)
        if self._vote is not None:
            ballot, self._pauses_next = self._end_vote()
            self._confirm(ballot, on_applied, self.state.held_spans)
        self._transport.messages.flush()
        return not (pauses_at_end and self._pauses_next)

    def _wait_for_first_message(self) -> int:
        """Wait for the first message, and return how many ops to play before the verdict: those of the warm-up, or 0.

        A worker that waits steps late layers as soon as their sums are there: other stages wait for its vote. It is 0 if the
        verdict on a lean step is there before the first message. If the step was right, it is computed again while the worker
        would wait, and not between its warm-up and its first backward pass, for which other stages wait.
        """
        first = self.executor.instructions[0].receives if self._warm_up else None
        if first is None:
            return self._warm_up
        self.executor.post_receives(0, self._warm_up)
        is_lean, begun_s = self.state.stepper.is_lean, time.monotonic()
        while is_lean or self._late is not None:
            look_s = min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, (time.monotonic() - begun_s) / _LOOKS))
            if self._transport.messages.comes_within(look_s, first):
                break
            self._step_late(self._reduction.num_ready)
            if is_lean and self._vote is not None and self._vote.work.has_ended:
                return 0
            if self.executor.activity.now.waits_for != str(first.sender):
                self.executor.activity.wait_for(str(first.sender))
        self.executor.activity.go_on()
        return self._warm_up

    def _read_meter(self) -> None:
        """Keep the peak of the stage's activations, and measure no more."""
        if self.executor.stage.meter is not None:
            self.activation_bytes = self.executor.stage.meter.peak_bytes
            self.executor.stage.meter = None

    def _finish(self, iteration: int, spans: list[Span], on_applied: OnApplied) -> bool:
        """Reduce and step; return whether all pause now. A staggered worker learns that later, with the verdict."""
        start = now_us()
        self.executor.activity.begin(REDUCE)
        self.executor.on_progress(iteration, REDUCE)
        summed = self._own_losses()
        self._reduction.finish(summed)
        losses = dict(enumerate(summed.tolist())) if summed is not None else {}  # later it would wait for ops in flight
        is_guessed = self._is_staggered and not self._was_scaled and not self._pauses_next
        if self._reduction.num_late and is_guessed and self.state.can_step_ahead:
            spans.append(Span(REDUCE, start, now_us()))
            self._late, self._spans = _Late(iteration, losses, spans), []
            self._step(iteration, partial(self.state.step_ahead, self._summed_parameters()), spans)
            return False
        while self._reduction.num_late:
            self._reduction.finish_next()
        self.state.hold(iteration, losses, spans)
        self._spans = []  # from now on they belong to the gradient that is held
        spans.append(Span(REDUCE, start, now_us()))
        self._begin_vote(iteration)
        if is_guessed:
            self._step(iteration, self.state.guess, spans)
            return False
        ballot, is_pause = self._end_vote()
        self._step(iteration, partial(self.state.apply, ballot), spans)
        self._confirm(ballot, on_applied, spans)
        return is_pause or self._pauses_next

    def _summed_parameters(self) -> Sequence[Tensor]:
        late = {id(parameter) for parameter in self._reduction.late_parameters()}
        return [parameter for parameter in self.executor.stage.parameters() if id(parameter) not in late]

    def _before(self, instruction: Instruction) -> None:
        """Step the late layers as soon as their sums are there, at the latest before an op that uses one of them."""
        if self._late is not None:
            self._step_late(self._reduction.num_due(instruction))

    def _step_late(self, num: int) -> None:
        """Wait for so many of the late sums, and step their layers; vote on the step when there are no more."""
        late = self._late
        if late is None:
            return
        for _ in range(num):
            parameters = self._reduction.finish_next()
            self.executor.activity.begin(OPTIMIZER)
            if self._reduction.num_late:
                self.state.step_ahead(parameters)
            else:
                self.state.hold(late.iteration, late.losses, late.spans)
                self._late = None
                self._begin_vote(late.iteration)
                self.state.guess()

    def _own_losses(self) -> Tensor | None:
        """The losses of this worker's micro-batches, by chain, at the last stage: summed over peers, any of them can report all.

        They go to no other stage: the more numbers all workers have to add up, the longer that takes, however small they are.
        """
        if self._view.worker.stage < self._shape.num_stages - 1:
            return None
        values = torch.zeros(self._shape.num_chains, dtype=torch.float64, device=self.executor.stage.sums.flat.device)
        for chain, loss in self.executor.losses.items():
            values[chain] = loss
        return values

    def _begin_vote(self, iteration: int) -> None:
        """Put in this worker's part of the ballot; the first live peer of a stage puts in the norm of the stage."""
        values = torch.zeros(NORM_PARTS * self._shape.num_stages + 1, dtype=torch.float64)
        if self._view.is_first_peer:
            first = NORM_PARTS * self._view.worker.stage
            values[first : first + NORM_PARTS] = torch.tensor(self.state.norm_squared(), dtype=torch.float64)
        values[-1] = float(self.wants_pause)
        self._vote = _Vote(iteration, values, self._transport.host.begin_vote(values))

    def _end_vote(self) -> tuple[Ballot, bool]:
        """Wait for the whole ballot; return it, and whether any worker wants a pause."""
        vote = self._vote
        assert vote is not None
        self._transport.host.wait(vote.work, "all")
        self._vote = None
        *norms, pause = vote.values.tolist()
        return Ballot(vote.iteration, tuple(norms)), pause > 0

    def _confirm(self, ballot: Ballot, on_applied: OnApplied, spans: list[Span]) -> bool:
        """Confirm the step that is held; `spans` are those of the iteration whose time it takes to compute a lean step again."""
        scale = self.state.judge(ballot).scale
        self._was_scaled, was_right = scale not in (None, 1.0), scale == 1.0
        if self.state.is_settled_later and was_right:
            self._step(ballot.iteration, partial(self.state.apply, ballot), spans)
        self.executor.clock.settle_spans(self.state.held_spans)
        return self.state.confirm(ballot, on_applied)

    def _step(self, iteration: int, step: Callable[[], object], spans: list[Span]) -> None:
        self.executor.activity.begin(OPTIMIZER)
        start = self.executor.clock.start()
        step()
        self.executor.clock.stop(OPTIMIZER, start, spans)
        self.executor.on_progress(iteration, OPTIMIZER)

    def _discard_warm_up(self) -> None:
        """Forget the warm-up of this worker, and receive the messages that other warm-ups sent for later ops of this row."""
        self.executor.reset()
        for instruction in self.executor.instructions[self._warm_up :]:
            if instruction.receives is not None and instruction.receives.is_of_warm_up:
                self._transport.messages.receive(instruction.receives)
        self._transport.messages.round += 1
