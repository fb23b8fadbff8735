"""All workers of a plan in one process: the same executors, with a dictionary for a network.

It is how the mathematics is tested without processes: every worker has its own copy of its stage, plays its own row, and steps
with its own optimizer, exactly as a real one. Only time is missing.
"""

import copy
from collections.abc import Sequence
from statistics import fmean

from torch import Tensor, nn

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plan import Plan
from recycle.core.routes import Routes
from recycle.runtime.digest import digest, whole_digest
from recycle.runtime.executor import Executor, Message, Samples
from recycle.runtime.gradients import make_sums
from recycle.runtime.stage import Loss, Stage
from recycle.runtime.step import MakeOptimizer, Stepper, add_sums, clip_scale, norm_squared


class Mailbox:
    """Links within a process: what is sent lies there until it is received, once."""

    def __init__(self) -> None:
        self._letters: dict[Message, Tensor] = {}

    def send(self, message: Message, tensor: Tensor, to: Worker) -> None:
        assert message not in self._letters
        self._letters[message] = tensor.clone()

    def receive(self, message: Message, sender: Worker) -> Tensor:
        return self._letters.pop(message)


class Solo:
    """A training job in one process. `is_exact` makes sums that do not depend on who ran what."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[nn.Module],
        samples: Samples,
        loss: Loss,
        make_optimizer: MakeOptimizer,
        seed: int = 0,
        is_exact: bool = False,
        max_norm: float | None = None,
    ) -> None:
        self.plan = plan
        self._max_norm = max_norm
        self._routes, self._mailbox = Routes(plan), Mailbox()
        last = plan.problem.shape.num_stages - 1
        self.workers: dict[Worker, Executor] = {}
        self._steppers: dict[Worker, Stepper] = {}
        for row in plan.rows:
            number = row.worker.stage
            module = copy.deepcopy(stages[number])
            sums = make_sums(module.parameters(), plan.problem.shape.num_chains, is_exact)
            stage = Stage(module, sums, number, loss if number == last else None)
            executor = Executor(row, plan.problem.shape, self._routes, stage, self._mailbox, samples, seed)
            self.workers[row.worker] = executor
            self._steppers[row.worker] = Stepper(stage.parameters(), make_optimizer)

    def iterate(self, iteration: int) -> float:
        """Play one iteration, step everywhere, and return the mean loss over the global batch."""
        for _, worker, kind, chain in sorted(self._slots()):
            self.workers[worker].run(iteration, Kind(kind), chain)
        self._step()
        losses = {chain: loss for executor in self.workers.values() for chain, loss in executor.losses.items()}
        return fmean(losses[chain] for chain in sorted(losses))

    def take_back(self) -> None:
        for stepper in self._steppers.values():
            stepper.take_back()

    def _slots(self) -> list[tuple[int, Worker, str, int]]:
        """Every op in the order of its start; what starts at one time does not depend on each other."""
        return [
            (start, row.worker, kind, chain)
            for row in self.plan.rows
            for kind, chain, start in zip(row.kinds, row.chains, row.starts_us, strict=True)
        ]

    def _step(self) -> None:
        shape = self.plan.problem.shape
        means = [self._reduced(stage) for stage in range(shape.num_stages)]
        scale = clip_scale([norm_squared(gradients) for gradients in means], self._max_norm)
        for worker, stepper in self._steppers.items():
            stepper.step(means[worker.stage], scale)
            self.workers[worker].stage.sums.clear()

    def _reduced(self, stage: int) -> list[Tensor | None]:
        """The mean gradients of a stage, over all its live peers."""
        first, *others = (executor.stage.sums for worker, executor in self.workers.items() if worker.stage == stage)
        for other in others:
            add_sums(first, other)
        return first.means(self.plan.problem.shape.num_chains)

    def weights_sha256(self) -> str:
        """The hash of every stage's parameters, which must be the same on all its peers."""
        return whole_digest({worker: digest(executor.stage.module) for worker, executor in self.workers.items()})
