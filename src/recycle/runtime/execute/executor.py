"""The executor: one worker that plays its row. What to receive and to send follows from the plan.

It knows no clock. An op waits for its message, runs, and sends on; the order of a legal plan has no cycle, so that no two workers
can wait for each other.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.stage import Stage
from recycle.runtime.execute.row_program import Instruction, TensorMessage
from recycle.runtime.execute.spans import Span, now_us

# Receives for so many ops ahead are posted, so that their messages come while others compute.
_AHEAD = 3


class Transport(Protocol):
    """How workers reach each other."""

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """Send without waiting for the receiver."""
        ...

    def expect(self, message: TensorMessage) -> None:
        """Let the message come while something else runs."""
        ...

    def receive(self, message: TensorMessage) -> Tensor:
        """Return the tensor that was sent, or wait for it."""
        ...

    def blank(self, message: TensorMessage) -> Tensor:
        """Return zeros of the form that the message has."""
        ...


Reached = Callable[[int, str], None]
"""What is called when a worker is about to do something in an iteration: an op by its text, or what follows all ops."""


class Executor:
    """A worker with its stage and its turns. `losses` are those of the iteration, by chain, at the last stage.

    `busy_since_us` is when the present op began to compute, 0 while it waits for others.
    """

    def __init__(
        self,
        worker: Worker,
        turns: Sequence[Instruction],
        num_stages: int,
        stage: Stage,
        links: Transport,
        samples: MicroBatchSource,
        seed: int,
        reached: Reached = lambda iteration, what: None,
    ) -> None:
        self.worker, self.turns, self.stage, self.reached = worker, turns, stage, reached
        self.busy_since_us = 0
        self.losses: dict[int, float] = {}
        self.doubt: Exception | None = None
        self._is_first, self._is_last = worker.stage == 0, worker.stage == num_stages - 1
        self._links, self._samples, self._seed = links, samples, seed
        self._split = {turn.chain for turn in turns if turn.kind is Kind.I}

    def play(self, iteration: int, first: int, stop: int, spans: list[Span], is_guess: bool = False) -> None:
        """Play the turns from `first` to before `stop`, and add their spans; nothing behind them is looked for.

        If the weights are a guess, an op may fail for that alone. It is kept as a `doubt`, and from then on receivers get zeros
        instead of nothing: they wait for them, and nobody will use them if the guess was wrong.
        """
        for place in range(first, min(first + _AHEAD, stop)):
            self._expect(place)
        for place in range(first, stop):
            if place + _AHEAD < stop:
                self._expect(place + _AHEAD)
            spans.append(self.run(iteration, place, is_guess))

    def run(self, iteration: int, place: int, is_guess: bool = False) -> Span:
        """Run one op: receive what it needs, compute, send what it makes. The span is that of the computation."""
        turn, asked = self.turns[place], now_us()
        taken = self._links.receive(turn.takes) if turn.takes is not None else None
        self.busy_since_us = start = now_us()
        self.reached(iteration, turn.label)
        made = self._guessed(iteration, turn, taken) if is_guess else self._compute(iteration, turn, taken)
        self.stage.finish()
        span = Span(turn.label, start, now_us(), asked_us=asked)
        self.busy_since_us = 0
        if turn.gives is not None:
            assert made is not None
            self._links.send(turn.gives, made)
        return span

    def _guessed(self, iteration: int, turn: Instruction, taken: Tensor | None) -> Tensor | None:
        if self.doubt is None:
            try:
                return self._compute(iteration, turn, taken)
            except Exception as problem:
                self.doubt = problem
        return self._links.blank(turn.gives) if turn.gives is not None else None

    def begin_again(self) -> None:
        """Forget all micro-batches in flight, and what was wrong with them."""
        self.stage.forget()
        self.losses.clear()
        self.doubt = None

    def _expect(self, place: int) -> None:
        message = self.turns[place].takes
        if message is not None:
            self._links.expect(message)

    def _compute(self, iteration: int, turn: Instruction, taken: Tensor | None) -> Tensor | None:
        match turn.kind:
            case Kind.F:
                return self._forward(iteration, turn, taken)
            case Kind.I:
                return self.stage.backward_input(turn.chain, taken)
            case Kind.B:
                return self.stage.backward(turn.chain, taken)
            case Kind.W:
                self.stage.backward_weight(turn.chain)
                return None

    def _forward(self, iteration: int, turn: Instruction, taken: Tensor | None) -> Tensor:
        pipeline, index = turn.microbatch.pipeline, turn.microbatch.index
        targets = None
        if self._is_first or self._is_last:
            inputs, targets = self._samples.get(iteration, pipeline, index)
            taken = inputs if self._is_first else taken
        assert taken is not None
        seed = seed_of(self._seed, iteration, pipeline, index, self.worker.stage)
        made = self.stage.forward(turn.chain, taken, seed, targets if self._is_last else None, turn.chain in self._split)
        if self._is_last:
            self.losses[turn.chain] = float(made)
        return made
