"""Options of a training job: `TrainOptions`, and inside it those of checkpoints, of the run folder and of failures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recycle.control.decide.failure_detection import DEFAULT_LEASE_S, refuse_lease
from recycle.core.errors import UserError
from recycle.core.events.failure_script import NOTHING, Action, Script
from recycle.core.events.trace import Trace
from recycle.core.plans.plan_source import PlanSource
from recycle.runtime.compute.optimizer_step import LossScale, Schedule, constant
from recycle.runtime.compute.stage import OpOptions
from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.data_options import refuse_count as refuse_count

TRANSPORTS = AUTO, GLOO, NCCL, IPC = "auto", "gloo", "nccl", "ipc"

_HIGHEST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When checkpoints are written into the run folder, and whether the run starts from one.

    Attributes:
        every: Steps between two checkpoints; 0 writes one after the last step only. There is always one after the last step.
        keep: How many checkpoints are kept, the newest ones.
        resume: Continue the run in the folder from its newest whole checkpoint.
        about: More entries of the checkpoint's fingerprint: a run is resumed only if they are equal.
    """

    every: int = 100
    keep: int = 2
    resume: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_count("the number of steps between checkpoints", self.every, 0)
        refuse_count("the number of checkpoints to keep", self.keep, 1)

    def is_due(self, num_steps: int, last: int) -> bool:
        """Whether a checkpoint is written after `num_steps` steps of a run of `last` steps."""
        return num_steps == last or (self.every > 0 and num_steps % self.every == 0)


@dataclass(frozen=True, slots=True)
class RunFolderOptions:
    """What else the run folder holds.

    Attributes:
        name: The name of the run in its record.
        files: Texts by the name of their file.
        ops_every: The record has every op of each iteration whose number is a multiple of this; 0 is 1, or more if an iteration
            has more than 25,000 ops. The first iteration after each recovery and all sums are there in any case.
    """

    name: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    ops_every: int = 0

    def __post_init__(self) -> None:
        refuse_count("the number of iterations between those with ops in the record", self.ops_every, 0)


@dataclass(frozen=True, slots=True)
class FailureOptions:
    """How a run survives failures, and which failures are injected.

    Attributes:
        plan_source: Makes plans without the dead workers, such as `recycle.Planner`. Without one, `recycle.train` and the command
            line make a planner; a job that is launched in another way ends with the first death.
        script: Failures that are injected at given steps.
        trace: Workers that leave and join at given times.
        lease_s: Seconds of silence after which a worker counts as dead.
        compare_every: Peers of a stage compare their weights after so many steps, and before each checkpoint; 0 is only then.
        restarts: How often an hour the worker of a place is started again on this machine after it died. Deaths that the script
            or the trace of the run injects are final.
        follow_speeds: Whether a plan for the measured speeds of workers replaces the present one where that pays, and a worker
            that is far too slow is left out. Slow workers are named in any case.
        recovers: Whether a run without a plan source gets one; if not, the first death ends it.
    """

    plan_source: PlanSource | None = None
    script: Script = NOTHING
    trace: Trace | None = None
    lease_s: float = DEFAULT_LEASE_S
    compare_every: int = 10
    restarts: int = 3
    follow_speeds: bool = True
    recovers: bool = True

    def __post_init__(self) -> None:
        refuse_lease(self.lease_s)
        refuse_count("the number of steps between comparisons of peers", self.compare_every, 0)
        refuse_count("the number of restarts", self.restarts, 0)

    def is_compared(self, num_steps: int) -> bool:
        """Whether peers compare their weights after `num_steps` steps."""
        return self.compare_every > 0 and num_steps % self.compare_every == 0


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """When and on what the model is evaluated, and when the run stops for that.

    Attributes:
        data: A map-style dataset or a stream, with samples like those of the training. The result is the mean loss of its
            micro-batches in their order, without dropout; samples that fill no whole micro-batch are left out. None evaluates
            nothing.
        every: Steps between two evaluations; 0 evaluates after the last step only. There is always one after the last step.
        patience: Stop when so many evaluations in a row have not brought a lower loss than the best before; 0 never stops.
        samples: How many samples each evaluation reads, the first ones; 0 reads all. A stream needs the number, and is read from
            its beginning each time.
    """

    data: Any = None
    every: int = 0
    patience: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        refuse_count("the number of steps between evaluations", self.every, 0)
        refuse_count("the patience of evaluations", self.patience, 0)
        refuse_count("the number of samples of an evaluation", self.samples, 0)
        if self.data is None and (self.every or self.patience):
            raise UserError("there is nothing to evaluate: give the evaluation data")

    def is_due(self, num_steps: int, last: int) -> bool:
        """Whether the weights after `num_steps` steps of a run of `last` steps are evaluated."""
        is_time = num_steps == last or (self.every > 0 and num_steps % self.every == 0)
        return self.data is not None and num_steps > 0 and is_time


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """How `recycle.train` shows a run, and where it sends what it knows of it.

    Attributes:
        json_lines: A line of JSON for every event but ops is printed on the error stream, instead of the live view.
        metrics_port: The port of this machine at which Prometheus is answered; 0 is none.
        metrics_host: The address for Prometheus; 0.0.0.0 is every one of this machine.
        otlp: The OpenTelemetry collector that gets metrics, epochs and recoveries, as http://HOST:4318; empty is none.
        dashboard: The port at which a page in the browser about this run is served while it goes on; 0 is any free port, None no
            page. It needs a run folder, and the extra `dashboard`.
        dashboard_host: The address on which the page is served; 0.0.0.0 is every one of this machine.
        dashboard_token_file: The file with what a browser must know to read the page; made if there is none. With None it
            is a file beside the run folder.
        dashboard_names: Names by which browsers reach the page, as that of a proxy with TLS.
        allow_injection: Whether whoever opens the page can kill, hang, slow and start workers.

    Raises:
        UserError: An option has a value that cannot be used.
    """

    json_lines: bool = False
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    otlp: str = ""
    dashboard: int | None = None
    dashboard_host: str = "127.0.0.1"
    dashboard_token_file: Path | None = None
    dashboard_names: tuple[str, ...] = ()
    allow_injection: bool = False

    def __post_init__(self) -> None:
        refuse_count("the port for Prometheus", self.metrics_port, 0)
        refuse_count("the port of the page", self.dashboard or 0, 0)
        for port in (self.metrics_port, self.dashboard or 0):
            if port > _HIGHEST_PORT:
                raise UserError(f"{port} is not a port: ports go up to {_HIGHEST_PORT}")
        names: object = self.dashboard_names
        if isinstance(names, str):  # else each letter would be a name
            raise UserError(f"dashboard_names is {names!r}, but it must be a list of names: put it into brackets")
        if self.allow_injection and self.dashboard is None:
            raise UserError("allow_injection is for the page of a run: give the port of the page with dashboard, too")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a job trains, apart from the few things that every job names itself.

    Attributes:
        seed: Seed of the order of samples and of dropout.
        is_exact: Sum gradients as whole numbers: weights are equal bit for bit, whichever workers are dead.
        max_norm: Clip the global norm of the gradient to this; None does not clip.
        schedule: The factor of the learning rate at each iteration, a pure function.
        sum_dtype: The type in which gradients are summed.
        autocast: The type in which ops compute by autocast; None switches autocast off.
        activation_checkpointing: Keep only the inputs of layers, and compute the layers again in the backward pass: less memory,
            but every forward op runs twice. Weights stay the same; with `is_exact`, bit for bit.
        compile_backend: The backend of `torch.compile` that compiles layers, such as "inductor"; empty compiles nothing.
        loss_scale: How the scale of the loss changes; it is used if `autocast` is float16.
        lean_steps: Whether a staggered step, which may be taken back, copies the parameters alone and is computed twice. Without
            that, optimizer states are copied, too. None: lean on a GPU.
        shared_layers: How many layers a stage holds of each neighbour, for a job without a plan; else the plan says that.
        device: "cpu" or "cuda".
        transport: What carries tensors: "gloo", "nccl" or "ipc" (CUDA IPC, on one GPU); "auto" is the fastest of them here.
        port: The port of the coordinator on this machine; 0 is any free one.
        timeout_s: The limit of every wait for another worker, for the case that all other detection fails.
        time_limit_s: End the run, with a checkpoint, at the first iteration boundary after so many seconds; None has no limit.
        data: How samples are read, ordered and made into micro-batches, and by how many processes.
        evaluation: When and on what the model is evaluated, and when the run stops for that.
        checkpoint: When checkpoints are written, and whether the run is resumed.
        run_folder: What else the run folder holds.
        failures: How failures are survived, and which are injected.
        quiet: `recycle.train` prints nothing; warnings of the run are then Python's warnings.
        show: What `recycle.train` shows and serves: a page in the browser, metrics, lines of JSON.

    Raises:
        UserError: An option has a value that cannot be used.
    """

    seed: int = 0
    is_exact: bool = False
    max_norm: float | None = None
    schedule: Schedule = constant
    sum_dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    activation_checkpointing: bool = False
    compile_backend: str = ""
    loss_scale: LossScale = field(default_factory=LossScale)
    lean_steps: bool | None = None
    shared_layers: int = 0
    device: str = "cpu"
    transport: str = AUTO
    port: int = 0
    timeout_s: float = 300.0
    time_limit_s: float | None = None
    data: DataOptions = field(default_factory=DataOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    run_folder: RunFolderOptions = field(default_factory=RunFolderOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    quiet: bool = False
    show: ShowOptions = field(default_factory=ShowOptions)

    @property
    def ops(self) -> OpOptions:
        """How ops compute."""
        return OpOptions(self.autocast, self.activation_checkpointing, self.compile_backend)

    @property
    def used_loss_scale(self) -> LossScale | None:
        """How the scale of the loss changes; None if the loss is not scaled."""
        return self.loss_scale if self.autocast is torch.float16 else None

    @property
    def has_lean_steps(self) -> bool:
        return self.device != "cpu" if self.lean_steps is None else self.lean_steps

    def __post_init__(self) -> None:
        refuse_count("the seed", self.seed, 0)
        refuse_count("the number of shared layers", self.shared_layers, 0)
        if self.max_norm is not None and not (isinstance(self.max_norm, int | float) and 0 < self.max_norm < math.inf):
            raise UserError(f"max_norm is {self.max_norm!r}, but it must be a finite number above 0, or None")
        if self.time_limit_s is not None and not (
            isinstance(self.time_limit_s, int | float) and 0 < self.time_limit_s < math.inf
        ):
            raise UserError(f"time_limit_s is {self.time_limit_s!r}, but it must be a finite number of seconds above 0, or None")
        if not isinstance(self.loss_scale, LossScale):
            raise UserError(
                f"loss_scale is {self.loss_scale!r}, but it must be a recycle.LossScale, such as LossScale(initial=1024)"
            )
        if self.compile_backend and self.compile_backend not in torch.compiler.list_backends(()):
            known = ", ".join(torch.compiler.list_backends())
            raise UserError(f"compile_backend is {self.compile_backend!r}, but torch has only {known} here")
        if self.sum_dtype is torch.float16:
            raise UserError("gradients cannot be summed in float16, whose numbers end at 65504: set sum_dtype to torch.float32")
        _refuse_no_schedule(self.schedule)
        evaluation: object = self.evaluation
        if not isinstance(evaluation, EvaluationOptions):
            kind = type(evaluation).__name__
            raise UserError(f"evaluation is a {kind}, but it must be recycle.EvaluationOptions: write EvaluationOptions(data)")
        refuse_absent_device(self.device)
        if self.transport not in TRANSPORTS:
            raise UserError(
                f"the transport is {self.transport!r}, but it must be {', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}"
            )
        slow_links = [one for one in self.failures.script.injections if one.action is Action.SLOW_LINK]
        if slow_links and self.device == "cuda" and self.transport != GLOO:
            raise UserError(f"only messages over gloo can be delayed: leave out --slow-link, or set the transport to {GLOO!r}")


def _refuse_no_schedule(schedule: Any) -> None:
    """Raise if the schedule is something else, such as a scheduler of torch or a function that makes one."""
    try:
        made = schedule(0)
    except Exception as problem:
        made = problem
    if isinstance(made, bool) or not isinstance(made, int | float):
        raise UserError(
            f"the schedule is a {type(schedule).__name__} and gives no number for iteration 0, but must be a function from the "
            "number of an iteration to a factor of the learning rate, such as lambda iteration: 0.99**iteration"
        )


def refuse_absent_device(device: str) -> None:
    """Raise if this machine does not have the device."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"the device is {device!r}, but it must be cpu or cuda")
    if device == "cuda" and not torch.cuda.device_count():  # `is_available` would load CUDA before its settings are made
        raise UserError("the device is cuda, but torch finds no GPU here: leave it out, or install torch with CUDA")
