"""The configurations of a job's processes, derived from the job: `worker_spec` for workers, `coordinator_config`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from recycle.control.net.file_transfer import FileTransfer
from recycle.control.net.handshake import Endpoint
from recycle.core.events.record_file import CHECKPOINTS
from recycle.core.plans.plan_source import PlanAssignment
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.checkpoint.model_formats import MODEL_CONFIG, model_config_text
from recycle.runtime.coordinator.config import JOURNAL, CoordinatorConfig
from recycle.runtime.job import Job
from recycle.runtime.options import FailureOptions, RunFolderOptions
from recycle.runtime.worker.worker_spec import MakeModel, MakeStage, WorkerSpec, copied_stage


def worker_spec(
    job: Job,
    make_stage: MakeStage | None = None,
    boundaries: Mapping[int, BoundarySpec] | None = None,
    file_transfer: FileTransfer | None = None,
    deaths: Path | None = None,
    make_model: MakeModel | None = None,
    layer_specs: Sequence[BoundarySpec] = (),
) -> WorkerSpec:
    """The part of a job that every worker needs; `boundaries` are the job's, if they are known already.

    `layer_specs` are those of `movable_layer_specs`: with them, whole layers may move.
    """
    folder = job.run_folder
    return WorkerSpec(
        shape=job.shape,
        make_stage=make_stage or partial(copied_stage, job.held_stages),
        boundaries=job.boundaries() if boundaries is None else boundaries,
        ties=job.ties,
        microbatches=job.microbatches,
        loss=job.loss_function,
        make_optimizer=job.optimizer,
        num_steps=job.steps,
        # Without the plan source: a worker must not load a planner.
        options=replace(job.options, failures=FailureOptions(compare_every=job.options.failures.compare_every)),
        checkpoint_folder=None if folder is None else folder / CHECKPOINTS,
        file_transfer=file_transfer,
        deaths=deaths,
        layers=job.layers,
        make_model=(make_model or partial(_stages_of, tuple(job.stages))) if layer_specs else None,
        layer_specs=layer_specs,
        shared_layers=job.shared_layers,
        evaluation=job.evaluation_batches,
    )


def _stages_of(stages: Sequence[nn.Module]) -> Sequence[nn.Module]:
    return stages


def _with_model_config(job: Job) -> RunFolderOptions:
    """The options of the run folder, which gets the configuration of the model, too, if the model has one."""
    options, text = job.options.run_folder, model_config_text(job.stages)
    return options if text is None else replace(options, files={**options.files, MODEL_CONFIG: text})


def coordinator_config(
    job: Job,
    endpoint: Endpoint,
    begin_us: int,
    journal_folder: Path,
    deaths: Path | None = None,
    about: Mapping[str, Any] | None = None,
    moves_layers: bool = False,
) -> CoordinatorConfig:
    """The configuration of a coordinator that starts the job with its plan; `about` is sent to every worker that joins.

    If it `moves_layers`, workers have the `layer_specs` for that.
    """
    options, plan = job.options, job.first_plan
    workers = [row.worker for row in plan.rows]
    return CoordinatorConfig(
        job=endpoint.job,
        token=endpoint.token,
        tls=endpoint.tls,
        lease_s=options.failures.lease_s,
        initial=PlanAssignment(plan, dict(zip(workers, workers, strict=True)), "the plan that the run was started with"),
        source=options.failures.plan_source,
        num_steps=job.steps,
        num_samples=job.samples_per_step,
        memory_profile=job.memory_profile(),
        fingerprint=job.fingerprint(),
        begin_us=begin_us,
        journal=(job.run_folder or journal_folder) / JOURNAL,
        folder=job.run_folder,
        run_folder=_with_model_config(job),
        checkpoint=options.checkpoint,
        patience=options.evaluation.patience,
        time_limit_s=options.time_limit_s,
        deaths=deaths,
        injections=options.failures.script.for_coordinator(),
        about=about or {},
        follows_speeds=options.failures.follow_speeds,
        moves_layers=moves_layers,
    )
