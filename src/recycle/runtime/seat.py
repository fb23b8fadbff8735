"""What a worker needs at a seat: the stage with its weights, and the trainer that plays the seat's row of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.routes import Routes
from recycle.runtime.executor import Executor, Reached
from recycle.runtime.footing import Footing
from recycle.runtime.gradients import make_sums
from recycle.runtime.kit import Kit
from recycle.runtime.links import Address, GlooLinks
from recycle.runtime.stage import Stage
from recycle.runtime.step import Stepper
from recycle.runtime.trainer import Trainer
from recycle.runtime.turns import Turn, make_turns
from recycle.runtime.warm_up import warm_ups


@dataclass(frozen=True, slots=True)
class Part:
    """A seat's part of a plan: its turns, how many of them are its warm-up, and whether stages step on their own."""

    turns: Sequence[Turn]
    warm_up: int
    is_staggered: bool


def part_of(plan: Plan, worker: Worker) -> Part:
    routes = Routes(plan)
    warm = warm_ups(plan, routes)
    return Part(make_turns(plan, routes, warm)[worker], warm[worker], plan.problem.techniques.staggered)


def make_footing(kit: Kit, stage: int, num_steps: int = 0, device: torch.device | None = None) -> Footing:
    """A stage as it is before the first step, on `device`."""
    settings = kit.settings
    module = kit.stages.make(stage).to(device)
    sums = make_sums(module.parameters(), kit.shape.num_chains, settings.is_exact, settings.sum_dtype, device)
    loss = kit.loss if stage == kit.shape.num_stages - 1 else None
    made = Stage(module, sums, stage, loss, autocast=settings.autocast, device=device)
    stepper = Stepper(made.parameters(), kit.make_optimizer, kit.schedule)
    return Footing(made, stepper, kit.shape, kit.ties, settings.max_norm, num_steps)


def make_trainer(
    kit: Kit,
    part: Part,
    address: Address,
    footing: Footing,
    links: GlooLinks,
    reached: Reached = lambda iteration, what: None,
) -> Trainer:
    """The trainer of a worker in one epoch, on its footing."""
    worker, num_stages = address.worker, kit.shape.num_stages
    executor = Executor(worker, part.turns, num_stages, footing.stage, links, kit.samples, kit.settings.seed, reached)
    return Trainer(executor, links, footing, address, kit.shape, kit.ties, part.warm_up, part.is_staggered)
