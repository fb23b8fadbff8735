"""The reports that workers send for the ledger (`IterationApplied`, `WorkerFinished`, ...), and their JSON form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, get_args

from recycle.control.decide.messages import wire_name
from recycle.control.drift.message_times import LinkLag
from recycle.control.drift.op_pace import Pace
from recycle.core import errors
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OpColumns
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.compute.optimizer_step import StepVerdict


@dataclass(frozen=True, slots=True)
class IterationApplied:
    """A worker has applied an iteration for good: its losses by chain (last stage only), what it ran, the verdict.

    `checksum` is that of its weights and optimizer state, if peers compare them after this iteration. `pace` says how long its
    ops took, and `lags`, by sender, how long messages were on their way, in a few numbers. `positions` are those in the streams
    that it reads, if a checkpoint is due.
    """

    worker: Worker
    iteration: int
    losses: Mapping[int, float]
    ran: OpColumns
    verdict: StepVerdict
    checksum: str = ""
    pace: Pace = field(default_factory=dict)
    lags: Mapping[str, LinkLag] = field(default_factory=dict)
    positions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepUndone:
    """What a worker had run of an iteration when its epoch ended. The iteration is redone."""

    worker: Worker
    iteration: int
    ran: OpColumns


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """The mean loss over the evaluation data, with the weights after `num_steps` steps, as a worker of the last stage has it."""

    worker: Worker
    num_steps: int
    loss: float
    num_microbatches: int
    at_us: int
    took_us: int


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """A worker has done all its steps in an epoch: the digest of its weights, its peak memory, and the memory of its state.

    In `trained_us` of all its epochs its ops waited `data_wait_us` for data.
    """

    worker: Worker
    digest: str
    peak_bytes: int
    activation_bytes: int
    epoch: int
    static_bytes: int = 0
    data_wait_us: int = 0
    trained_us: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCrashed:
    """A worker cannot go on, and why. `problem` is the error itself if it is a `UserError`."""

    worker: Worker
    at_us: int
    text: str
    problem: UserError | None = None


@dataclass(frozen=True, slots=True)
class WorkerWarned:
    """A worker goes on, but its user should know of something: why it could not load its stage, or why tensors go slowly."""

    worker: Worker
    text: str


WorkerReport = (
    IterationApplied | StepUndone | EvaluationDone | WorkerFinished | WorkerCrashed | StageSaved | StageNotSaved | WorkerWarned
)
_KINDS: dict[str, Callable[..., WorkerReport]] = {wire_name(kind): kind for kind in get_args(WorkerReport)}

# Fields whose values JSON does not know.
_TO_JSON: dict[str, Callable[[Any], Any]] = {
    "worker": str,
    "losses": lambda losses: [[chain, loss] for chain, loss in losses.items()],
    "ran": astuple,
    "verdict": astuple,
    "problem": lambda problem: [type(problem).__name__, str(problem)] if problem is not None else None,
}


def report_to_json(report: WorkerReport) -> dict[str, Any]:
    values = {each.name: getattr(report, each.name) for each in fields(report)}
    encoded = {name: _TO_JSON[name](value) if name in _TO_JSON else value for name, value in values.items()}
    return {"type": wire_name(type(report)), **encoded}


def report_from_json(body: Mapping[str, Any], clock_offset_us: int = 0) -> WorkerReport:
    """Return the report in `body`, with `clock_offset_us` added to its times: the sender's clock is behind by that much.

    The sender has the job's token and this release, so an incomplete body is a mistake of this code, not of a user.
    """
    from_json: dict[str, Callable[[Any], Any]] = {
        "worker": Worker.parse,
        "losses": lambda losses: {int(chain): float(loss) for chain, loss in losses},
        "ran": lambda ran: OpColumns(*ran).shifted(clock_offset_us),
        "verdict": lambda verdict: StepVerdict(*verdict),
        "pace": lambda pace: {each: (num, median_us) for each, (num, median_us) in pace.items()},
        "lags": lambda lags: {each: LinkLag(num, least_us, is_one) for each, (num, least_us, is_one) in lags.items()},
        "problem": _problem,
        "layer_counts": tuple,
        "at_us": lambda at_us: at_us + clock_offset_us,
    }
    values = {name: from_json[name](value) if name in from_json else value for name, value in body.items() if name != "type"}
    return _KINDS[body["type"]](**values)


def _problem(encoded: Sequence[str] | None) -> UserError | None:
    if encoded is None:
        return None
    name, text = encoded
    kind = getattr(errors, name, UserError)
    return kind(text) if isinstance(kind, type) and issubclass(kind, UserError) else UserError(text)
