"""ReCycle: pipeline-parallel training that continues when workers fail.

The names in `__all__` are the whole public interface. Planner, simulator and runtime are imported when they are first used, so
that a worker never loads the planner, and planning needs no torch.

Example:
    >>> import recycle
    >>> plan = recycle.solve(recycle.problem(3, 4, 6, fail="W1_2", costs="1,1,1", memory=6))
    >>> recycle.check(plan), plan.period_us
    ([], 27)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Trace
from recycle.core.plans.library import Library
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile
from recycle.core.release import RELEASE as __version__

if TYPE_CHECKING:
    from recycle.api.train import train
    from recycle.loggers.csv_logger import CsvLogger
    from recycle.loggers.mlflow_logger import MlflowLogger
    from recycle.loggers.tensorboard_logger import TensorBoardLogger
    from recycle.loggers.wandb_logger import WandbLogger
    from recycle.planner.build_library import build
    from recycle.planner.live_planner import Planner
    from recycle.planner.problem_from_text import problem
    from recycle.planner.profiles.estimate import estimate
    from recycle.planner.solve import solve, solve_normalized
    from recycle.report.record.metrics import measure
    from recycle.runtime.boundary.auxiliary_losses import add_loss, collect_losses
    from recycle.runtime.callbacks.protocol import Callback
    from recycle.runtime.checkpoint.export import export_model
    from recycle.runtime.checkpoint.load_model import load_model
    from recycle.runtime.checkpoint.resume import load
    from recycle.runtime.compute.learning_rate import TorchSchedule
    from recycle.runtime.compute.optimizer_step import LossScale
    from recycle.runtime.cutting.cut import cut, recut
    from recycle.runtime.data.data_options import DataOptions, Padding
    from recycle.runtime.data.packing import pack
    from recycle.runtime.job import Job
    from recycle.runtime.options import CheckpointOptions, EvaluationOptions, FailureOptions, ShowOptions, TrainOptions
    from recycle.sim.campaign.campaign import simulate
    from recycle.sim.job import simulated_job
    from recycle.sim.replay.replay import Conditions, replay

_FOUND_IN = {
    "add_loss": "runtime.boundary.auxiliary_losses",
    "build": "planner.build_library",
    "collect_losses": "runtime.boundary.auxiliary_losses",
    "cut": "runtime.cutting.cut",
    "problem": "planner.problem_from_text",
    "estimate": "planner.profiles.estimate",
    "solve": "planner.solve",
    "solve_normalized": "planner.solve",
    "measure": "report.record.metrics",
    "simulate": "sim.campaign.campaign",
    "simulated_job": "sim.job",
    "export_model": "runtime.checkpoint.export",
    "load": "runtime.checkpoint.resume",
    "load_model": "runtime.checkpoint.load_model",
    "Callback": "runtime.callbacks.protocol",
    "CheckpointOptions": "runtime.options",
    "Conditions": "sim.replay.replay",
    "CsvLogger": "loggers.csv_logger",
    "DataOptions": "runtime.data.data_options",
    "EvaluationOptions": "runtime.options",
    "FailureOptions": "runtime.options",
    "Job": "runtime.job",
    "LossScale": "runtime.compute.optimizer_step",
    "MlflowLogger": "loggers.mlflow_logger",
    "pack": "runtime.data.packing",
    "Padding": "runtime.data.data_options",
    "Planner": "planner.live_planner",
    "recut": "runtime.cutting.cut",
    "replay": "sim.replay.replay",
    "ShowOptions": "runtime.options",
    "TensorBoardLogger": "loggers.tensorboard_logger",
    "train": "api.train",
    "TorchSchedule": "runtime.compute.learning_rate",
    "TrainOptions": "runtime.options",
    "WandbLogger": "loggers.wandb_logger",
}

__all__ = [
    "Callback",
    "CheckpointOptions",
    "Cluster",
    "Conditions",
    "CsvLogger",
    "DataOptions",
    "EvaluationOptions",
    "FailureOptions",
    "Job",
    "Library",
    "LossScale",
    "Memory",
    "MlflowLogger",
    "Padding",
    "Plan",
    "Planner",
    "Problem",
    "Profile",
    "Shape",
    "ShowOptions",
    "Techniques",
    "TensorBoardLogger",
    "TorchSchedule",
    "Trace",
    "TrainOptions",
    "UserError",
    "WandbLogger",
    "Worker",
    "__version__",
    "add_loss",
    "build",
    "check",
    "collect_losses",
    "cut",
    "estimate",
    "export_model",
    "load",
    "load_model",
    "measure",
    "pack",
    "problem",
    "recut",
    "replay",
    "simulate",
    "simulated_job",
    "solve",
    "solve_normalized",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'recycle' has no attribute {name!r}")
    return getattr(import_module(f"recycle.{_FOUND_IN[name]}"), name)
