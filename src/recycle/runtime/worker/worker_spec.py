"""What a worker process gets to start with: all that training needs, whichever seat it will have, and nothing of who is there."""

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from recycle.control.net.file_transfer import FileTransfer
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer, Schedule
from recycle.runtime.compute.stage import Loss
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.job import CheckpointOptions, Job, TrainOptions
from recycle.runtime.transport.specs import TensorSpec


class StageFactory(Protocol):
    """The modules of a job as they are before the first step."""

    def make(self, number: int) -> nn.Module:
        """The stage of this number, a new one each time."""
        ...


@dataclass(frozen=True, slots=True)
class CopiedStages:
    """Stages that are copied from modules of this process."""

    modules: Sequence[nn.Module]

    def make(self, number: int) -> nn.Module:
        return copy.deepcopy(self.modules[number])


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A job as its workers see it. `deaths` is where a worker that is to be killed for a test says when.

    A worker that does not see the run's folder has a courier, and `saving` names a folder of its own: files rest there on their
    way.
    """

    shape: Shape
    stages: StageFactory
    parcels: Mapping[int, TensorSpec]
    ties: Sequence[Tie]
    samples: MicroBatchSource
    loss: Loss
    make_optimizer: MakeOptimizer
    schedule: Schedule
    settings: TrainOptions
    saving: CheckpointOptions | None = None
    deaths: Path | None = None
    courier: FileTransfer | None = None


def worker_spec(
    job: Job,
    stages: StageFactory,
    parcels: Mapping[int, TensorSpec],
    saving: CheckpointOptions | None = None,
    deaths: Path | None = None,
) -> WorkerSpec:
    """A job as its workers see it. `parcels` are the job's: whoever has found them need not find them again."""
    return WorkerSpec(
        shape=job.plan.problem.shape,
        stages=stages,
        parcels=parcels,
        ties=job.ties,
        samples=job.samples,
        loss=job.loss,
        make_optimizer=job.make_optimizer,
        schedule=job.schedule,
        settings=job.settings,
        saving=saving,
        deaths=deaths,
    )


def pickled(given: Any) -> bytes:
    """What a worker is given, in bytes: torch's own way between processes needs a file for every tensor, and shares them."""
    try:
        return pickle.dumps(given)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as problem:
        raise UserError(
            f"the model, data, loss or optimizer cannot be sent to a worker process: {str(problem).splitlines()[0]}; use "
            "functions and classes of a module's top level instead of lambdas and inner ones"
        ) from None
