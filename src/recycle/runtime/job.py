"""A training job: what is trained, on what, how, and by which plan. Everything that is checked before a process starts."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recycle.core.errors import ForeignPlan, UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.core.profile import StageProfile
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Schedule, constant
from recycle.runtime.compute.stage import Loss, cast, refuse_unusable
from recycle.runtime.compute.stage_costs import measure_bytes
from recycle.runtime.compute.tied_parameters import Tie, find_ties
from recycle.runtime.execute.executor import MicroBatchSource
from recycle.runtime.transport.gloo import TensorSpec


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a job trains, the same for every worker. A max_norm of None does not clip; `timeout_s` is the last net of all waits."""

    num_steps: int
    seed: int = 0
    is_exact: bool = False
    max_norm: float | None = None
    sum_dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    device: str = "cpu"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name, value, least in (("the number of steps", self.num_steps, 1), ("the seed", self.seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} is {value!r}, but it must be a whole number of at least {least}")
        if self.max_norm is not None and not (isinstance(self.max_norm, int | float) and 0 < self.max_norm < math.inf):
            raise UserError(f"max_norm is {self.max_norm!r}, but it must be a finite number above 0, or None")
        refuse_absent(self.device)


def refuse_absent(device: str) -> None:
    """Raise if there is no such device here."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"the device is {device!r}, but it must be cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("the device is cuda, but torch finds no GPU here: leave it out, or install torch with CUDA")


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Where checkpoints go, after how many steps each (0: only after the last), and how many are kept."""

    folder: Path
    every: int = 0
    keep: int = 2

    def is_due(self, num_steps: int, last: int) -> bool:
        return num_steps == last or (self.every > 0 and num_steps % self.every == 0)


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides what a run computes. The loss is the mean over a micro-batch; every micro-batch counts alike."""

    plan: Plan
    stages: Sequence[nn.Module]
    samples: MicroBatchSource
    loss: Loss
    make_optimizer: MakeOptimizer
    settings: TrainOptions
    schedule: Schedule = constant
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.plan.problem.shape
        if len(self.stages) != shape.num_stages:
            raise ForeignPlan(
                f"the plan has {shape.num_stages} stages, but the model is cut into {len(self.stages)}: make one fit the other"
            )
        for number, module in enumerate(self.stages):
            if not isinstance(module, nn.Module):
                raise UserError(f"stage {number} is a {type(module).__name__}, but it must be an nn.Module")
        if problems := check(self.plan):
            raise ForeignPlan(f"the plan is not legal, {problems[0]}: plan again")

    @property
    def samples_per_step(self) -> int:
        inputs, _ = self.samples.get(0, 0, 0)
        return self.plan.problem.shape.num_chains * len(inputs)

    def profiles(self) -> list[StageProfile]:
        """What a micro-batch holds at each stage, measured on one of them; times are not measured."""
        costs = measure_bytes(self.stages, self.samples, self.loss, self.settings.autocast, self.settings.device)
        return [StageProfile(1, 1, 1, 2, activation_bytes=activation, weight_held_bytes=held) for activation, held, _ in costs]

    @property
    def ties(self) -> list[Tie]:
        return find_ties(self.stages)

    def parcels(self) -> dict[int, TensorSpec]:
        """What each stage but the last sends on, found by sending one micro-batch through; the modules are left as they were."""
        made: dict[int, TensorSpec] = {}
        inputs, targets = self.samples.get(0, 0, 0)
        device = torch.device(self.settings.device)
        given: Tensor = inputs.to(device)
        last = len(self.stages) - 1
        # On the device, since what is cast to what differs between devices; one stage at a time, since all may not fit.
        with torch.no_grad(), torch.random.fork_rng(), cast(device, self.settings.autocast):
            for number, module in enumerate(self.stages):
                there = module if device.type == "cpu" else copy.deepcopy(module).to(device)
                given = _untouched(number, there, given)
                if number == last:
                    given = self.loss(given, targets.to(device))
                refuse_unusable(given, number, is_loss=number == last)
                if number < last:
                    made[number] = TensorSpec(tuple(given.shape), given.dtype)
        return made

    def fingerprint(self) -> Mapping[str, Any]:
        """What a checkpoint of this job says of it: whoever resumes must have the same."""
        shape, settings = self.plan.problem.shape, self.settings
        return {
            "pipelines": shape.num_pipelines,
            "stages": shape.num_stages,
            "microbatches": shape.num_microbatches,
            "seed": settings.seed,
            "exact": settings.is_exact,
            "max_norm": settings.max_norm,
            "sums": str(settings.sum_dtype).removeprefix("torch."),
            "autocast": str(settings.autocast).removeprefix("torch."),
            "data": _described(self.samples),
            "ties": [list(map(list, tie.names)) for tie in self.ties],
            "about": dict(self.about),
            "model": [
                {
                    name: [*value.shape, str(value.dtype).removeprefix("torch.")]
                    for name, value in module.state_dict().items()
                    if isinstance(value, Tensor)
                }
                for module in self.stages
            ],
        }


def _described(samples: MicroBatchSource) -> str:
    """The data in words; those that have none for themselves would give an address that the next process has not."""
    kind = type(samples)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(samples)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def _untouched(number: int, module: nn.Module, given: Tensor) -> Any:
    """What the module makes; it is refused if a forward pass changes it.

    What forward passes change belongs to whoever ran them: peers would part, and who died would matter.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    made = module(given)
    changed = [name for name, buffer in module.named_buffers() if name in before and not _is_same(buffer, before[name])]
    for name in changed:
        module.get_buffer(name).copy_(before[name])
    if changed:
        raise UserError(
            f"a forward pass of stage {number} changes its buffer {changed[0]}, which would depend on who ran which micro-batch: "
            "use modules without such state, such as LayerNorm or GroupNorm instead of BatchNorm"
        )
    return made
