"""What a worker needs at a seat: the stage with its weights, and the trainer that plays the seat's row of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.routes import Routes
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.compute.stage import Stage
from recycle.runtime.execute.executor import Executor, Reached
from recycle.runtime.execute.row_program import Instruction, compile_rows
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.execute.warm_up import warm_ups
from recycle.runtime.transport.gloo import GlooTransport, GroupView
from recycle.runtime.worker.worker_spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A seat's part of a plan: its turns, how many of them are its warm-up, and whether stages step on their own."""

    turns: Sequence[Instruction]
    warm_up: int
    is_staggered: bool


def worker_program(plan: Plan, worker: Worker) -> WorkerProgram:
    routes = Routes(plan)
    warm = warm_ups(plan, routes)
    return WorkerProgram(compile_rows(plan, routes, warm)[worker], warm[worker], plan.problem.techniques.staggered)


def make_stage_state(kit: WorkerSpec, stage: int, num_steps: int = 0, device: torch.device | None = None) -> StageState:
    """A stage as it is before the first step, on `device`."""
    options = kit.options
    module = kit.stages.make(stage).to(device)
    sums = make_sums(module.parameters(), kit.shape.num_chains, options.is_exact, options.sum_dtype, device)
    loss = kit.loss if stage == kit.shape.num_stages - 1 else None
    made = Stage(module, sums, stage, loss, autocast=options.autocast, device=device)
    stepper = Stepper(made.parameters(), kit.make_optimizer, options.schedule)
    return StageState(made, stepper, kit.shape, kit.ties, options.max_norm, num_steps)


def make_trainer(
    kit: WorkerSpec,
    part: WorkerProgram,
    address: GroupView,
    footing: StageState,
    links: GlooTransport,
    reached: Reached = lambda iteration, what: None,
) -> Trainer:
    """The trainer of a worker in one epoch, on its footing."""
    worker, num_stages = address.worker, kit.shape.num_stages
    executor = Executor(worker, part.turns, num_stages, footing.stage, links, kit.microbatches, kit.options.seed, reached)
    return Trainer(executor, links, footing, address, kit.shape, kit.ties, part.warm_up, part.is_staggered)
