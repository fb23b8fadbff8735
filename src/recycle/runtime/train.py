"""`recycle.train`: a model in stages, data, a loss, an optimizer and a plan in; trained weights, a record and checkpoints out.

A run folder holds `plan.json`, `record.jsonl` (which grows while the run goes on), `summary.json` and `checkpoints/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recycle.core.cluster import Worker
from recycle.core.errors import Uncuttable, UserError
from recycle.core.plan import Plan
from recycle.core.profile import StageProfile
from recycle.core.record import Event
from recycle.runtime.batches import Batches
from recycle.runtime.batches import Samples as Dataset
from recycle.runtime.books import Books, Trained
from recycle.runtime.executor import now_us
from recycle.runtime.job import Job, Settings
from recycle.runtime.launch import launch
from recycle.runtime.measure import measure_bytes
from recycle.runtime.memory import planned_peak_bytes
from recycle.runtime.run_folder import RunFolder
from recycle.runtime.stage import Loss
from recycle.runtime.step import MakeOptimizer, Schedule, constant

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
) -> Trained:
    """Train until `steps` steps are done, with a process for every live worker of `plan`, and return what came of it.

    `stages` are modules that each take and return one tensor; parameters that stages share stay tied. `dataset` is map-style and
    gives pairs (inputs, targets), `samples` of them make a micro-batch; `loss` takes what the last stage made and the targets,
    and returns a scalar mean. `optimizer` makes a torch optimizer from a list of parameters, `schedule` gives the factor of its
    learning rate at each iteration. With `exact`, weights are equal bit for bit whoever is dead.

    With `out`, a folder, the run is recorded there, and saved every `checkpoint_every` steps and at the end; with `resume`, it
    goes on from its last whole checkpoint. `about` is what else a run must have in common with the one that it goes on from,
    `files` are texts to put beside the record. `watch` gets every event of the record as it happens.
    """
    settings = Settings(steps, seed, exact, max_norm, sums, autocast, device)
    job = Job(plan, stages, Batches(dataset, plan.problem.shape, samples, seed), loss, optimizer, settings, schedule, about or {})
    if resume and out is None:
        raise UserError("resume goes on in a run folder: name it with out")
    begin_us, parcels, bytes_of = now_us(), job.parcels(), planned_bytes(job)
    num_samples = plan.problem.shape.num_chains * samples
    if out is None:
        books = Books(plan, num_samples, bytes_of, watch, None, begin_us)
        return books.trained(steps, launch(job, books.hear, port=port, parcels=parcels))
    with RunFolder(Path(out), job, checkpoint_every, keep, resume, name, files) as run:

        def write(event: Event) -> None:
            problem = run.write(event)
            watch(event)
            if problem is not None:
                books.warn(problem)

        books = Books(plan, num_samples, bytes_of, write, run.checkpoints, begin_us, run.gone_us, run.losses)
        for warning in run.warnings:
            books.warn(warning)
        trained = books.trained(steps, launch(job, books.hear, run.saving, run.resumed, port, parcels))
        if problem := run.close(trained):
            books.warn(problem)
            trained = replace(trained, warnings=(*trained.warnings, problem))
    return trained


def planned_bytes(job: Job) -> dict[Worker, int]:
    """The most bytes of activations that each worker should hold, by the plan's memory model and one measured micro-batch."""
    costs = measure_bytes(job.stages, job.samples, job.loss, job.settings.autocast, job.settings.device)
    profiles = [StageProfile(1, 1, 1, 2, activation_bytes=activation, weight_held_bytes=held) for activation, held, _ in costs]
    return {row.worker: planned_peak_bytes(row, profiles[row.worker.stage]) for row in job.plan.rows}
