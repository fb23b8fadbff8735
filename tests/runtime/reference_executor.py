"""ReferenceExecutor: all workers of a plan in one process, by the same executors, with a dictionary as the transport.

It tests the mathematics without processes: every worker has its own copy of its stage, plays its own row, and steps with its own
optimizer, exactly as a real one. Only time is missing.
"""

import copy
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from recycle.core.cluster import Worker
from recycle.core.errors import Uncuttable
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.boundary.nests import Nest, map_tensors
from recycle.runtime.checkpoint.layer_names import LayerNames, find_layer_names
from recycle.runtime.compute.elastic_stage import own_module
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Stepper, judge_step, norm_squared
from recycle.runtime.compute.stage import Loss, OpOptions, Stage
from recycle.runtime.compute.state_digests import stage_digest, whole_digest
from recycle.runtime.compute.tied_parameters import counted_elsewhere, find_ties, gather, scatter
from recycle.runtime.execute.executor import Executor
from recycle.runtime.execute.row_program import compile_row
from recycle.runtime.transport.specs import TensorMessage


def layers_or_none(stages: Sequence[nn.Module]) -> LayerNames | None:
    try:
        return find_layer_names(stages)
    except Uncuttable:
        return None


class Mailbox:
    """A message queue within a process: a message is received once."""

    def __init__(self) -> None:
        self._sent: dict[TensorMessage, Nest] = {}

    def send(self, message: TensorMessage, nest: Nest) -> None:
        assert message not in self._sent
        self._sent[message] = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), nest)

    def post_receive(self, message: TensorMessage) -> None:
        pass

    def receive(self, message: TensorMessage) -> Nest:
        return self._sent.pop(message)

    def zeros(self, message: TensorMessage) -> Tensor:
        raise AssertionError("no weights are tentative within a process")


class ReferenceExecutor:
    """A training job in one process. `is_exact` makes sums that do not depend on who ran what."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[nn.Module],
        samples: MicroBatchSource,
        loss: Loss,
        make_optimizer: MakeOptimizer,
        seed: int = 0,
        is_exact: bool = False,
        max_norm: float | None = None,
        autocast: torch.dtype | None = None,
        recomputes: bool = False,
        backend: str = "",
        carries_loss: bool = False,
    ) -> None:
        self.plan = plan
        self._max_norm, self._ties = max_norm, find_ties(stages)
        self._layers = layers_or_none([own_module(stage) for stage in stages])
        mailbox, shape, how = Mailbox(), plan.problem.shape, OpOptions(autocast, recomputes, backend)
        instructions = {worker: compile_row(program, shape) for worker, program in row_programs(plan).items()}
        self.workers: dict[Worker, Executor] = {}
        self._steppers: dict[Worker, Stepper] = {}
        for worker in instructions:
            module = copy.deepcopy(stages[worker.stage])
            sums = make_sums(module.parameters(), shape.num_chains, is_exact)
            is_last = worker.stage == shape.num_stages - 1
            own_layers = self._layers.ranges[worker.stage] if self._layers is not None else None
            own_loss, carries = loss if is_last else None, carries_loss and not is_last
            stage = Stage(module, sums, worker.stage, own_loss, how, own_layers=own_layers, carries_loss=carries)
            self.workers[worker] = Executor(worker, instructions[worker], shape.num_stages, stage, mailbox, samples, seed)
            self._steppers[worker] = Stepper(stage.parameters(), make_optimizer)

    def iterate(self, iteration: int) -> float:
        """Play one iteration, step everywhere, and return the mean loss over the global batch."""
        for _, worker, index in sorted(self._slots()):
            self.workers[worker].run(iteration, index, [])
        self._step(iteration)
        losses = {chain: loss for executor in self.workers.values() for chain, loss in executor.losses.items()}
        return fmean(losses[chain] for chain in sorted(losses))

    def _slots(self) -> list[tuple[int, Worker, int]]:
        """Every op by its start, its worker and its index in the row; ops that start at one time do not depend on each other."""
        return [(start, row.worker, index) for row in self.plan.rows for index, start in enumerate(row.starts_us)]

    def _step(self, iteration: int) -> None:
        shape = self.plan.problem.shape
        firsts = [self._reduced(stage) for stage in range(shape.num_stages)]
        self._tie(firsts)
        means = [first.stage.sums.means(shape.num_chains) for first in firsts]
        parts = [part for first, own in zip(firsts, means, strict=True) for part in self._norm(first, own)]
        verdict = judge_step(parts, self._max_norm)
        for worker, stepper in self._steppers.items():
            stepper.step(iteration, partial(_between, means[worker.stage]), verdict.scale)
            self.workers[worker].stage.sums.clear()

    def _reduced(self, stage: int) -> Executor:
        """The first worker of a stage, with the sums of all its live peers."""
        first, *others = (executor for worker, executor in self.workers.items() if worker.stage == stage)
        for other in others:
            first.stage.sums.flat += other.stage.sums.flat
        return first

    def _tie(self, firsts: Sequence[Executor]) -> None:
        """Give every stage of a tie the sum of the gradients of all."""
        for tie in self._ties:
            stages = [firsts[number].stage for number in tie.stages]
            held = [(stage.sums, tie.parameters(stage.number, stage.module)) for stage in stages]
            total = torch.stack([gather(*each) for each in held]).sum(0)
            for each in held:
                scatter(total, *each)

    def _norm(self, first: Executor, means: Sequence[Tensor | None]) -> tuple[float, ...]:
        stage = first.stage
        elsewhere = counted_elsewhere(self._ties, stage.number, stage.module)
        return norm_squared(mean for mean, of in zip(means, stage.parameters(), strict=True) if id(of) not in elsewhere)

    def weights_sha256(self) -> str:
        """The hash of every stage's parameters, which must be the same on all its peers."""
        is_by_layer = self._layers is not None
        digests = {worker: stage_digest(executor.stage.module, is_by_layer) for worker, executor in self.workers.items()}
        stages = {worker.stage for worker in digests}
        assert len({(worker.stage, found) for worker, found in digests.items()}) == len(stages), "peers hold different weights"
        return whole_digest(digests)


def _between(gradients: Sequence[Tensor | None], first: int, end: int) -> list[Tensor | None]:
    return [gradient if first <= number < end else None for number, gradient in enumerate(gradients)]
