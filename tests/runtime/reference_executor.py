"""All workers of a plan in one process: the same executors, with a dictionary for a network.

It is how the mathematics is tested without processes: every worker has its own copy of its stage, plays its own row, and steps
with its own optimizer, exactly as a real one. Only time is missing.
"""

import copy
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.routes import Routes
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Stepper, judge_step, norm_squared
from recycle.runtime.compute.stage import Loss, Stage
from recycle.runtime.compute.tied_parameters import counted_elsewhere, find_ties
from recycle.runtime.compute.weight_digest import digest, whole_digest
from recycle.runtime.execute.executor import Executor
from recycle.runtime.execute.row_program import TensorMessage, compile_rows
from recycle.runtime.execute.warm_up import warm_ups


class Mailbox:
    """Links within a process: what is sent lies there until it is received, once."""

    def __init__(self) -> None:
        self._letters: dict[TensorMessage, Tensor] = {}

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        assert message not in self._letters
        self._letters[message] = tensor.clone()

    def expect(self, message: TensorMessage) -> None:
        pass

    def receive(self, message: TensorMessage) -> Tensor:
        return self._letters.pop(message)

    def blank(self, message: TensorMessage) -> Tensor:
        raise AssertionError("nothing is guessed within a process")


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
    ) -> None:
        self.plan = plan
        self._max_norm, self._ties = max_norm, find_ties(stages)
        routes, mailbox, shape = Routes(plan), Mailbox(), plan.problem.shape
        turns = compile_rows(plan, routes, warm_ups(plan, routes))
        self.workers: dict[Worker, Executor] = {}
        self._steppers: dict[Worker, Stepper] = {}
        for worker in turns:
            module = copy.deepcopy(stages[worker.stage])
            sums = make_sums(module.parameters(), shape.num_chains, is_exact)
            is_last = worker.stage == shape.num_stages - 1
            stage = Stage(module, sums, worker.stage, loss if is_last else None, autocast=autocast)
            self.workers[worker] = Executor(worker, turns[worker], shape.num_stages, stage, mailbox, samples, seed)
            self._steppers[worker] = Stepper(stage.parameters(), make_optimizer)

    def iterate(self, iteration: int) -> float:
        """Play one iteration, step everywhere, and return the mean loss over the global batch."""
        for _, worker, place in sorted(self._slots()):
            self.workers[worker].run(iteration, place)
        self._step(iteration)
        losses = {chain: loss for executor in self.workers.values() for chain, loss in executor.losses.items()}
        return fmean(losses[chain] for chain in sorted(losses))

    def take_back(self) -> None:
        for stepper in self._steppers.values():
            stepper.take_back()

    def _slots(self) -> list[tuple[int, Worker, int]]:
        """Every op, by its place in its row, in the order of its start; what starts at one time does not depend on each other."""
        return [(start, row.worker, place) for row in self.plan.rows for place, start in enumerate(row.starts_us)]

    def _step(self, iteration: int) -> None:
        shape = self.plan.problem.shape
        speakers = [self._reduced(stage) for stage in range(shape.num_stages)]
        self._tie(speakers)
        means = [speaker.stage.sums.means(shape.num_chains) for speaker in speakers]
        verdict = judge_step([self._norm(speaker, own) for speaker, own in zip(speakers, means, strict=True)], self._max_norm)
        for worker, stepper in self._steppers.items():
            stepper.step(iteration, means[worker.stage], verdict.scale)
            self.workers[worker].stage.sums.clear()

    def _reduced(self, stage: int) -> Executor:
        """The first worker of a stage, with the sums of all its live peers."""
        first, *others = (executor for worker, executor in self.workers.items() if worker.stage == stage)
        for other in others:
            first.stage.sums.flat += other.stage.sums.flat
        return first

    def _tie(self, speakers: Sequence[Executor]) -> None:
        """Give every stage of a tie the sum of the gradients of all."""
        for tie in self._ties:
            stages = [speakers[number].stage for number in tie.stages]
            held = [stage.sums.of(tie.parameter(stage.number, stage.module)) for stage in stages]
            for same in zip(*held, strict=True):
                total = torch.stack(same).sum(0)
                for part in same:
                    part.copy_(total)

    def _norm(self, speaker: Executor, means: Sequence[Tensor | None]) -> float:
        stage = speaker.stage
        elsewhere = counted_elsewhere(self._ties, stage.number, stage.module)
        return norm_squared(mean for mean, of in zip(means, stage.parameters(), strict=True) if id(of) not in elsewhere)

    def weights_sha256(self) -> str:
        """The hash of every stage's parameters, which must be the same on all its peers."""
        return whole_digest({worker: digest(executor.stage.module) for worker, executor in self.workers.items()})
