"""`recycle.train`: a model in stages, data, a loss, an optimizer and a plan in; trained weights, a record and checkpoints out.

A run folder holds `plan.json` (and in `plans/` those of later epochs), `record.jsonl` (which grows while the run goes on),
`summary.json` and `checkpoints/`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recycle.control.decide.membership import DEFAULT_LEASE_S
from recycle.core.errors import Uncuttable, UserError
from recycle.core.events.failure_script import NOTHING, Script
from recycle.core.events.record import Event
from recycle.core.events.trace import Trace
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource
from recycle.runtime.compute.microbatches import Dataset, MicroBatches
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Schedule, constant
from recycle.runtime.compute.stage import Loss
from recycle.runtime.coordinator.ledger.run_folder import RunFolderOptions
from recycle.runtime.coordinator.ledger.run_ledger import Trained
from recycle.runtime.job import Job, TrainOptions
from recycle.runtime.launch.local_launcher import FailureOptions, launch

Watch = Callable[[Event], None]


def cut(model: nn.Sequential, cuts: Sequence[int]) -> list[nn.Module]:
    """Return the stages of a model that is cut before the modules with these numbers, such as [2, 4] for three stages."""
    if not isinstance(model, nn.Sequential):
        raise Uncuttable(f"a {type(model).__name__} cannot be cut: give an nn.Sequential, or a list of stages")
    places = [0, *cuts, len(model)]
    if any(after <= before for before, after in pairwise(places)):
        raise Uncuttable(
            f"cuts at {list(cuts)} do not leave a module in every stage of a model of {len(model)}: give ascending numbers "
            f"from 1 to {len(model) - 1}"
        )
    return [model[start:stop] for start, stop in pairwise(places)]


def train(
    plan: Plan,
    stages: Sequence[nn.Module],
    dataset: Dataset,
    loss: Loss,
    optimizer: MakeOptimizer,
    *,
    steps: int,
    samples: int = 1,
    seed: int = 0,
    exact: bool = False,
    max_norm: float | None = None,
    schedule: Schedule = constant,
    sums: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    out: Path | str | None = None,
    checkpoint_every: int = 0,
    keep: int = 2,
    resume: bool = False,
    port: int = 0,
    name: str = "",
    about: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    watch: Watch = lambda event: None,
    plans: PlanSource | None = None,
    script: Script = NOTHING,
    trace: Trace | None = None,
    lease_s: float = DEFAULT_LEASE_S,
) -> Trained:
    """Train until `steps` steps are done, with a process for every live worker of `plan`, and return what came of it.

    `stages` are modules that each take and return one tensor; parameters that stages share stay tied. `dataset` is map-style and
    gives pairs (inputs, targets), `samples` of them make a micro-batch; `loss` takes what the last stage made and the targets,
    and returns a scalar mean. `optimizer` makes a torch optimizer from a list of parameters, `schedule` gives the factor of its
    learning rate at each iteration. With `exact`, weights are equal bit for bit whoever is dead.

    With `out`, a folder, the run is recorded there, and saved every `checkpoint_every` steps and at the end; with `resume`, it
    goes on from its last whole checkpoint. `about` is what else a run must have in common with the one that it goes on from,
    `files` are texts to put beside the record. `watch` gets every event of the record as it happens.

    With `plans`, a death while it runs is survived: the source is asked for a plan without the dead, such as `recycle.Planner`.
    Without, it ends the run. A worker that is silent for `lease_s` counts as dead. `script` and `trace` are failures on purpose.
    """
    job = make_job(
        plan,
        stages,
        dataset,
        loss,
        optimizer,
        steps=steps,
        samples=samples,
        seed=seed,
        exact=exact,
        max_norm=max_norm,
        schedule=schedule,
        sums=sums,
        autocast=autocast,
        device=device,
        about=about,
    )
    if resume and out is None:
        raise UserError("resume goes on in a run folder: name it with out")
    plot = RunFolderOptions(Path(out), checkpoint_every, keep, resume, name, files or {}) if out is not None else None
    return launch(job, watch, plot, FailureOptions(plans, script, trace, lease_s), port)


def make_job(
    plan: Plan,
    stages: Sequence[nn.Module],
    dataset: Dataset,
    loss: Loss,
    optimizer: MakeOptimizer,
    *,
    steps: int,
    samples: int = 1,
    seed: int = 0,
    exact: bool = False,
    max_norm: float | None = None,
    schedule: Schedule = constant,
    sums: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    about: Mapping[str, Any] | None = None,
) -> Job:
    """The job that `train` trains."""
    settings = TrainOptions(steps, seed, exact, max_norm, sums, autocast, device)
    batches = MicroBatches(dataset, plan.problem.shape, samples, seed)
    return Job(plan, stages, batches, loss, optimizer, settings, schedule, about or {})
