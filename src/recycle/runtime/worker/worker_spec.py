"""`WorkerSpec`: the part of a job that every worker process starts with, independent of its place in the plan."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from recycle.control.net.file_transfer import FileTransfer
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.host.by_value import HAS_CLOUDPICKLE, dumps_by_value
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.checkpoint.layer_names import LayerNames
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import MakeOptimizer
from recycle.runtime.compute.stage import Loss
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.data.evaluation_batches import EvaluationData
from recycle.runtime.options import TrainOptions

MakeStage = Callable[[int], nn.Module]
"""Makes a new copy of the stage of a number, as it is before the first step."""


MakeModel = Callable[[], Sequence[nn.Module]]
"""Makes all stages of the job, without shared layers, as they are before the first step."""


def copied_stage(stages: Sequence[nn.Module], number: int) -> nn.Module:
    """A copy of a stage of this process."""
    return copy.deepcopy(stages[number])


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The part of a job that every worker needs. Its options have no plan source and no script of failures.

    A worker that does not see the run folder has a `file_transfer`, and its `checkpoint_folder` is one of its own, in which files
    wait to be sent. `layers` are those of all stages, if these say what their layers are. An injected kill writes its time into
    the file `deaths`.

    If whole layers may move to other stages, `make_model` makes all of them, and `layer_specs` are the outputs of all layers but
    the last. Stages hold `shared_layers` of each neighbour. `evaluation` are the micro-batches of the evaluation data, if any.
    """

    shape: Shape
    make_stage: MakeStage
    boundaries: Mapping[int, BoundarySpec]
    ties: Sequence[Tie]
    microbatches: MicroBatchSource
    loss: Loss
    make_optimizer: MakeOptimizer
    num_steps: int
    options: TrainOptions
    checkpoint_folder: Path | None = None
    file_transfer: FileTransfer | None = None
    deaths: Path | None = None
    layers: LayerNames | None = None
    make_model: MakeModel | None = None
    layer_specs: Sequence[BoundarySpec] = ()
    shared_layers: int = 0
    evaluation: EvaluationData | None = None


_ADVICE = "open files, locks and connections where they are used, in __getitem__ or forward"
_ADVICE_WITHOUT_CLOUDPICKLE = (
    "install cloudpickle, or use functions and classes of a module's top level instead of lambdas and inner ones"
)


def pickled(value: Any) -> bytes:
    """The pickle of a value for a worker process; torch's own reductions would need a file for every tensor."""
    try:
        return dumps_by_value(value)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as problem:
        raise UserError(
            f"the model, data, loss or optimizer cannot be sent to a worker process: {str(problem).splitlines()[0]}; "
            f"{_ADVICE if HAS_CLOUDPICKLE else _ADVICE_WITHOUT_CLOUDPICKLE}"
        ) from None
