"""measure_bytes: the memory that one micro-batch holds at every stage, and the bytes that the stage sends; and those of layers.

One micro-batch goes through copies of all stages, forwards and backwards, as workers would run it. Modules, their gradients and
torch's random state are afterwards as they were before.
"""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recycle.core.errors import Uncuttable, UserError
from recycle.core.op import Kind
from recycle.runtime.boundary.nests import Nest, map_tensors, nest_bytes
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.elastic_stage import layers_of
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.microbatches import MicroBatchSource, largest_of
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Stepper
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.compute.stage import Loss, OpOptions, Stage

RunOp = Callable[[Stage, Kind, Callable[[], Nest]], Nest]
"""Runs an op of a stage, and returns its result; a caller may measure it."""
_CHAIN = 0


class StageBytes(NamedTuple):
    """The bytes that a stage stores in F, that W needs after I, and that the stage sends (the loss, at the last one).

    W may need more than F stored: the gradients of a plain MLP's layers are as large as their inputs, and the activations that
    a checkpointed block recomputes stay for its W. A plan's memory model has no I that takes memory. So F is said to take as
    much then: a plan counts on more than is held, never on less.
    """

    activation_bytes: int
    weight_held_bytes: int
    output_bytes: int


class StageCopies:
    """Copies of all stages, and one micro-batch to run through them."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        samples: MicroBatchSource,
        loss: Loss,
        num_contributions: int,
        is_exact: bool = False,
        sum_dtype: torch.dtype = torch.float32,
        how: OpOptions = OpOptions(),  # noqa: B008 (it is frozen)
        device: str | None = None,
    ) -> None:
        self.stages: list[Stage] = []
        ranges = _layer_ranges(stages) if not how.splits else [None] * len(stages)
        for number, original in enumerate(stages):
            module = copy.deepcopy(original).to(device)
            sums = make_sums(module.parameters(), num_contributions, is_exact, sum_dtype)
            own_loss = loss if number == len(stages) - 1 else None
            self.stages.append(Stage(module, sums, number, own_loss, how, own_layers=ranges[number]))
        # Storages of their own: a view would hold all of the data set that it is of.
        self._inputs, self._targets = (map_tensors(Tensor.clone, part) for part in largest_of(samples))

    def forward(self, run: RunOp = lambda stage, kind, op: op()) -> list[Nest]:
        """Run F at every stage, and return the output of each."""
        outputs: list[Nest] = []
        for stage in self.stages:
            inputs = outputs[-1] if outputs else self._inputs
            seed = seed_of("measure", stage.number)
            output = run(stage, Kind.F, partial(stage.forward, _CHAIN, inputs, seed, self._targets))
            assert output is not None
            outputs.append(output)
        return outputs

    def backward(self, kinds: Sequence[Kind], run: RunOp = lambda stage, kind, op: op()) -> None:
        """Run I, I and W, or B at every stage, from the last to the first."""
        gradient = None
        for stage in reversed(self.stages):
            for kind in kinds:
                if kind is Kind.W:
                    run(stage, kind, partial(stage.backward_weight, _CHAIN))
                else:
                    backward = stage.backward_input if kind is Kind.I else stage.backward
                    gradient = run(stage, kind, partial(backward, _CHAIN, gradient))

    def measure_bytes(self) -> list[StageBytes]:
        """The bytes that stages hold between their ops; meters are used here alone, since they take time."""
        meters = [ActivationMeter(stage.module) for stage in self.stages]
        for stage, meter in zip(self.stages, meters, strict=True):
            stage.meter = meter
        outputs = self.forward()
        after_forward = [meter.held_bytes for meter in meters]
        self.backward([Kind.I])
        after_input = [meter.held_bytes for meter in meters]
        for stage in self.stages:
            stage.backward_weight(_CHAIN)
            stage.sums.clear()
            stage.meter = None
        return [
            StageBytes(max(activation, held), held, nest_bytes(output))
            for activation, held, output in zip(after_forward, after_input, outputs, strict=True)
        ]


def _layer_ranges(stages: Sequence[nn.Module]) -> list[range] | list[None]:
    """The numbers of the layers of each stage, which workers run one by one; None for all if a stage does not name its layers."""
    try:
        bounds = [0, *accumulate(len(layers_of(stage)) for stage in stages)]
    except Uncuttable:
        return [None] * len(stages)
    return [range(*ends) for ends in pairwise(bounds)]


def measure_bytes(
    stages: Sequence[nn.Module],
    samples: MicroBatchSource,
    loss: Loss,
    how: OpOptions = OpOptions(),  # noqa: B008 (it is frozen)
    device: str | None = None,
) -> list[StageBytes]:
    """Measure what every stage holds and sends, with one micro-batch and without a clock."""
    with random_state_kept():
        return StageCopies(stages, samples, loss, 1, how=how, device=device).measure_bytes()


def measure_layer_activations(
    layers: Sequence[nn.Module],
    samples: MicroBatchSource,
    loss: Loss,
    how: OpOptions = OpOptions(),  # noqa: B008 (it is frozen)
    device: str | None = None,
) -> list[int]:
    """The bytes of activations that each layer of a model adds to its stage; equal ones if layers do not run by themselves."""
    try:
        return layer_activations(measure_bytes(layers, samples, loss, how, device))
    except (UserError, RuntimeError):
        return [1] * len(layers)


def layer_activations(sizes: Sequence[StageBytes]) -> list[int]:
    """The bytes of activations that each layer adds to its stage, from the bytes of layers that ran as stages of their own.

    The output of a layer is the input of the next one, and counts there.
    """
    return [max(0, own.activation_bytes - own.output_bytes) for own in sizes]


def state_bytes(stage: Stage, make_optimizer: MakeOptimizer, is_lean: bool) -> int:
    """The bytes of the state of a stage that has none yet but its weights, as `held_state_bytes` counts them.

    A step with gradients of zero gives it all the state of a worker, and another that is tried the copies to take it back.
    """
    parameters = list(stage.parameters())
    stepper = Stepper(parameters, make_optimizer, is_lean=is_lean)

    def zeros(first: int, end: int) -> list[Tensor | None]:
        return [torch.zeros_like(of) if first <= number < end else None for number, of in enumerate(parameters)]

    stepper.step(0, zeros, 1.0)
    stepper.try_step(1, zeros)
    return held_state_bytes(stage, stepper)


def held_state_bytes(stage: Stage, stepper: Stepper) -> int:
    """The bytes of parameters, optimizer state and gradients that a worker holds at most, whatever is in flight."""
    frozen = sum(parameter.nbytes for parameter in stage.module.parameters() if not parameter.requires_grad)
    return frozen + stepper.held_bytes + stepper.part_bytes + stage.sums.held_bytes


def random_state_kept() -> AbstractContextManager[None]:
    """Restore torch's random state at the end, that of GPUs in use, too: stages seed it for every micro-batch."""
    return torch.random.fork_rng(range(torch.cuda.device_count()) if uses_gpu() else ())


def return_gpu_memory() -> None:
    """Return to the GPU the memory that torch keeps for later in this process: others need it."""
    if uses_gpu():
        gc.collect()
        torch.cuda.empty_cache()


def uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
