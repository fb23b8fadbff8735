"""Executor: one worker that plays its row. The messages that it receives and sends follow from the plan.

An op waits for its message, runs, and sends its result; nothing waits for a time. The order of a legal plan has no cycle, so that
no two workers can wait for each other. On a GPU an op is launched while the one before it runs.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from recycle.control.decide.messages import READ
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.boundary.nests import Nest
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.stage import Play, Stage
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.span_clock import AHEAD, SpanClock
from recycle.runtime.execute.spans import Span, now_us
from recycle.runtime.transport.activity import Activity
from recycle.runtime.transport.message_queue import MessageQueue

# Receives for so many ops ahead are posted, so that their messages arrive while others compute.
_AHEAD = 3

OnProgress = Callable[[int, str], None]
"""Called when a worker is about to run something in an iteration: an op by its text, or REDUCE or OPTIMIZER."""
SpeedIn = Callable[[int], float]
"""Returns the speed to which ops of an iteration are slowed on purpose; 1 is their own."""
DeviceTime = Callable[[Instruction], int]
"""Returns the µs that an op takes at least: those of a device that is emulated."""


_Samples = tuple[Nest, Nest] | None


def _nothing(op: object) -> None:
    """Nothing is to be done before an op, or after it."""


class Executor:
    """A worker with its stage and its instructions. `losses` are those of the iteration, by chain, at the last stage.

    `activity` says what it is doing, and `clock` measures its ops. `play_last` plays the last tape of an iteration, if it is set.
    `after` is called with the index of each instruction that has run. With a `device_us` an op lasts at least that long: the
    worker waits after it.
    """

    def __init__(
        self,
        worker: Worker,
        instructions: Sequence[Instruction],
        num_stages: int,
        stage: Stage,
        messages: MessageQueue,
        samples: MicroBatchSource,
        seed: int,
        on_progress: OnProgress = lambda iteration, label: None,
        activity: Activity | None = None,
        speed_in: SpeedIn = lambda iteration: 1.0,
        device_us: DeviceTime | None = None,
    ) -> None:
        self.activity = activity or Activity()
        self.worker, self.instructions, self.stage, self.on_progress = worker, instructions, stage, on_progress
        self.clock = SpanClock(stage.device)
        self.activity.on_gpu = self.clock.running
        self.losses: dict[int, Tensor] = {}
        self.play_last: Play | None = None
        self.after: Callable[[int], None] = _nothing
        self.warm_up_error: Exception | None = None
        self._is_first, self._is_last = worker.stage == 0, worker.stage == num_stages - 1
        self._messages, self._samples, self._seed, self._speed_in = messages, samples, seed, speed_in
        self._device_us = device_us
        self._split = {each.chain for each in instructions if each.kind is Kind.I}
        # Of a warm-up, which may be discarded and run again: a reader gives each micro-batch once.
        self._kept: dict[tuple[int, int], tuple[Nest, Nest]] = {}

    def play(
        self,
        iteration: int,
        first: int,
        stop: int,
        spans: list[Span],
        is_tentative: bool = False,
        before: Callable[[Instruction], None] = _nothing,
    ) -> None:
        """Play the instructions from `first` to before `stop`; `spans` gets their spans. No receive behind them is posted.

        `before` is called with each instruction before it runs.

        While the weights are tentative, an op may fail because of them alone. The error is kept as `warm_up_error`, and from then
        on receivers get zeros: they wait for a message, and nobody will use it if the weights were wrong.
        """
        self.post_receives(first, stop)
        for index in range(first, stop):
            if index + _AHEAD < stop:
                self._post_receive(index + _AHEAD)
            before(self.instructions[index])
            self.run(iteration, index, spans, is_tentative)

    def run(self, iteration: int, index: int, spans: list[Span], is_tentative: bool = False) -> None:
        """Run one op: receive its message, compute, send its result. The span is that of the computation."""
        instruction, asked_us = self.instructions[index], now_us()
        received = self._messages.receive(instruction.receives) if instruction.receives is not None else None
        samples = self._read(iteration, instruction, is_tentative) if instruction.kind is Kind.F else None
        self.settle(AHEAD)
        self.activity.begin(instruction.label)
        start = self.clock.start()
        self.on_progress(iteration, instruction.label)
        compute = self._compute_tentatively if is_tentative else self._compute
        made = compute(iteration, instruction, received, samples)
        if self._device_us is not None:
            time.sleep(max(0, start + self._device_us(instruction) - now_us()) / 1e6)
        if (speed := self._speed_in(iteration)) < 1:
            self.clock.slowed.slow_down(start, speed, (instruction.kind, instruction.layers))
        self.clock.stop(instruction.label, start, spans, asked_us)
        if instruction.sends is not None:
            assert made is not None
            self._messages.send(instruction.sends, made)
        self.after(index)

    def pass_over(self, first: int, stop: int) -> None:
        """Take the messages of these instructions, and send zeros: others wait for messages, and nobody will use these."""
        for instruction in self.instructions[first:stop]:
            if instruction.receives is not None:
                self._messages.receive(instruction.receives)
            if instruction.sends is not None:
                self._messages.send(instruction.sends, self._messages.zeros(instruction.sends))

    def settle(self, most: int = 0) -> None:
        """Wait until the GPU has at most so many ops left."""
        if self.clock.oldest:
            self.activity.begin(self.clock.oldest)
            self.clock.settle(most)

    def _read(self, iteration: int, instruction: Instruction, is_tentative: bool) -> tuple[Nest, Nest] | None:
        """The inputs and targets of a micro-batch, at the first and the last stage; the time that this takes is no op's."""
        if not (self._is_first or self._is_last):
            return None
        key = iteration, instruction.chain
        if (samples := self._kept.pop(key, None)) is None:
            self.activity.begin(READ)
            samples = self._samples.get(iteration, instruction.microbatch.pipeline, instruction.microbatch.index)
        if is_tentative:
            self._kept[key] = samples
        elif self._kept and next(iter(self._kept))[0] < iteration:
            self._kept.clear()
        return samples

    def _compute_tentatively(self, iteration: int, instruction: Instruction, received: Nest, samples: _Samples) -> Nest:
        if self.warm_up_error is None:
            try:
                return self._compute(iteration, instruction, received, samples)
            except Exception as problem:
                self.warm_up_error = problem
        return self._messages.zeros(instruction.sends) if instruction.sends is not None else None

    def reset(self) -> None:
        """Forget all micro-batches in flight, and the error of the warm-up."""
        self.stage.forget()
        self.losses.clear()
        self.warm_up_error = None

    def post_receives(self, first: int, stop: int) -> None:
        """Let the messages of the next few of these instructions arrive."""
        for index in range(first, min(first + _AHEAD, stop)):
            self._post_receive(index)

    def _post_receive(self, index: int) -> None:
        message = self.instructions[index].receives
        if message is not None:
            self._messages.post_receive(message)

    def _compute(self, iteration: int, instruction: Instruction, received: Nest, samples: _Samples) -> Nest:
        # Every I is followed by its W: after the last op of a row nothing is added to the gradient.
        last = self.play_last if instruction is self.instructions[-1] else None
        match instruction.kind:
            case Kind.F:
                return self._forward(iteration, instruction, received, samples)
            case Kind.I:
                return self.stage.backward_input(instruction.chain, received)
            case Kind.B:
                return self.stage.backward(instruction.chain, received, last)
            case Kind.W:
                self.stage.backward_weight(instruction.chain, last)
                return None

    def _forward(self, iteration: int, instruction: Instruction, received: Nest, samples: _Samples) -> Nest:
        chain, targets = instruction.chain, None
        if samples is not None:
            inputs, targets = samples
            received = inputs if self._is_first else received
        assert received is not None
        seed = seed_of(self._seed, iteration, chain)
        targets, is_split = targets if self._is_last else None, chain in self._split
        made = self.stage.forward(chain, received, seed, targets, is_split, instruction.layers)
        if self._is_last:
            self.losses[chain] = made  # its number is asked for later: the GPU has yet to compute it
        return made
