"""`Evaluator`: the mean loss of the evaluation data, by the forward ops of the plan of the present epoch.

A round of an evaluation plays only the forward ops of every row, in their order, with the micro-batches of the evaluation data in
the place of those of an iteration. The dependencies of a legal plan have no cycle, so its forward ops alone have none. Every
micro-batch is computed by one worker of each stage, whoever is dead, and the losses are added in the order of the data: the mean
does not depend on the plan.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from recycle.core.cluster import Shape
from recycle.core.op import Kind
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.stage import Stage
from recycle.runtime.data.evaluation_batches import EvaluationData
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.spans import now_us
from recycle.runtime.transport.activity import Activity
from recycle.runtime.transport.protocol import Transport


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean loss of `num_microbatches` micro-batches with the weights after `num_steps` steps; it took `took_us`."""

    num_steps: int
    loss: float
    num_microbatches: int
    took_us: int


class Evaluator:
    """The evaluations of one worker in one epoch. All workers of the epoch call `evaluate` at the same step."""

    def __init__(
        self,
        stage: Stage,
        instructions: Sequence[Instruction],
        transport: Transport,
        shape: Shape,
        data: EvaluationData,
        seed: int,
        activity: Activity,
    ) -> None:
        self._stage, self._transport, self._shape, self._data, self._seed = stage, transport, shape, data, seed
        self._activity = activity
        self._forwards = [each for each in instructions if each.kind is Kind.F]
        self._is_first, self._is_last = stage.number == 0, stage.number == shape.num_stages - 1

    def is_known(self, is_known_here: bool) -> bool:
        """Whether any worker of the epoch knows the result already; all workers get the same answer."""
        values = torch.tensor([float(is_known_here)], dtype=torch.float64)
        self._transport.host.wait(self._transport.host.begin_vote(values), "all")
        return bool(values.item() > 0)

    def evaluate(self, num_steps: int) -> EvaluationResult | None:
        """Evaluate the weights, which have `num_steps` steps at every stage. Workers of the last stage get the result."""
        start_us, losses = now_us(), dict[int, Tensor]()
        messages, num_chains = self._transport.messages, self._shape.num_chains
        with _evaluating(self._stage.module):
            for first in range(0, len(self._data), num_chains):
                for instruction in self._forwards:
                    if (number := first + instruction.chain) < len(self._data):
                        self._run(instruction, number, losses)
                messages.flush()  # so that no stage is more than a round ahead, with all that it has sent
                messages.round += 1
        if not self._is_last:
            return None
        mean = fmean(self._shared(losses))
        return EvaluationResult(num_steps, mean, len(self._data), now_us() - start_us)

    def _run(self, instruction: Instruction, number: int, losses: dict[int, Tensor]) -> None:
        messages, stage = self._transport.messages, self._stage
        received = messages.receive(instruction.receives) if instruction.receives is not None else None
        self._activity.begin(instruction.label)
        targets: Any = None
        if self._is_first or self._is_last:
            inputs, targets = self._data[number]
            received = inputs if self._is_first else received
        targets, seed = targets if self._is_last else None, seed_of(self._seed, "evaluation", number)
        made = stage.evaluate(received, seed, targets, instruction.layers)
        if instruction.sends is not None:
            messages.send(instruction.sends, made, has_paths=False)
        if self._is_last:
            losses[number] = made

    def _shared(self, losses: dict[int, Tensor]) -> list[float]:
        """The losses of all micro-batches in their order, of which each peer of the last stage has some."""
        values = torch.zeros(len(self._data), dtype=torch.float64, device=self._stage.device)
        for number, loss in losses.items():
            values[number] = loss
        self._transport.reducer.all_reduce(values)
        return list(values.tolist())


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off in the block; a module that was not training stays as it was.

    torch's transformer layers have other kernels for evaluation, which round otherwise than those of training: they are not used.
    """
    training, is_fast = [each for each in module.modules() if each.training], torch.backends.mha.get_fastpath_enabled()
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for each in training:
            each.training = True
