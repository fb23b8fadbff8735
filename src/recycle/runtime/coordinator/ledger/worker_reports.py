"""What workers tell for the books, as it travels: plain data that becomes JSON and comes back the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recycle.core import errors
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.runtime.checkpoint import StageNotSaved, StageSaved
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.execute.spans import Span


@dataclass(frozen=True, slots=True)
class IterationApplied:
    """A worker has applied an iteration for good: its losses by chain (last stage only), its spans, the verdict."""

    worker: Worker
    iteration: int
    losses: Mapping[int, float]
    spans: Sequence[Span]
    verdict: StepVerdict


@dataclass(frozen=True, slots=True)
class StepUndone:
    """What a worker had run of an iteration when its epoch ended: it is done again."""

    worker: Worker
    iteration: int
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class WorkerFinished:
    """A worker has done all its steps: the digest of its weights, and what it held at most."""

    worker: Worker
    digest: str
    peak_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerCrashed:
    """A worker cannot go on, and why: the error itself if it is one of the user's."""

    worker: Worker
    at_us: int
    text: str
    problem: UserError | None = None


WorkerReport = IterationApplied | StepUndone | WorkerFinished | WorkerCrashed | StageSaved | StageNotSaved


def report_to_json(told: WorkerReport) -> dict[str, Any]:
    match told:
        case IterationApplied():
            losses = [[chain, loss] for chain, loss in told.losses.items()]
            verdict = [told.verdict.norm, told.verdict.scale]
            return _named(told, iteration=told.iteration, losses=losses, spans=_spans(told.spans), verdict=verdict)
        case StepUndone():
            return _named(told, iteration=told.iteration, spans=_spans(told.spans))
        case WorkerFinished():
            return _named(told, digest=told.digest, peak_bytes=told.peak_bytes, activation_bytes=told.activation_bytes)
        case WorkerCrashed():
            problem = [type(told.problem).__name__, str(told.problem)] if told.problem is not None else None
            return _named(told, at_us=told.at_us, text=told.text, problem=problem)
        case StageSaved():
            saved = {"num_steps": told.num_steps, "stage": told.stage, "file_name": told.file_name}
            return {"told": "saved", **saved, "size_bytes": told.size_bytes, "sha256": told.sha256}
        case StageNotSaved():
            return {"told": "not saved", "num_steps": told.num_steps, "stage": told.stage, "reason": told.reason}


def report_from_json(body: Mapping[str, Any], clock_us: int = 0) -> WorkerReport:
    """What was told, by somebody whose clock is behind by `clock_us`.

    The sender has the job's token and our release, so that what is not whole is a mistake of ours.
    """
    rest = {name: value for name, value in body.items() if name not in ("told", "worker")}
    match body["told"]:
        case "saved":
            return StageSaved(**rest)
        case "not saved":
            return StageNotSaved(**rest)
    worker = Worker.parse(body["worker"])
    match body["told"]:
        case "iterationapplied":
            losses = {int(chain): float(loss) for chain, loss in body["losses"]}
            return IterationApplied(
                worker, body["iteration"], losses, _read_spans(body["spans"], clock_us), StepVerdict(*body["verdict"])
            )
        case "stepundone":
            return StepUndone(worker, body["iteration"], _read_spans(body["spans"], clock_us))
        case "workerfinished":
            return WorkerFinished(worker, **rest)
        case _:
            return WorkerCrashed(worker, body["at_us"] + clock_us, body["text"], _problem(body["problem"]))


def _named(told: IterationApplied | StepUndone | WorkerFinished | WorkerCrashed, **fields: Any) -> dict[str, Any]:
    return {"told": type(told).__name__.lower(), "worker": str(told.worker), **fields}


def _spans(spans: Sequence[Span]) -> list[list[Any]]:
    return [[span.label, span.start_us, span.end_us, span.is_discarded] for span in spans]


def _read_spans(told: Sequence[Sequence[Any]], clock_us: int) -> list[Span]:
    return [Span(label, start_us + clock_us, end_us + clock_us, is_discarded) for label, start_us, end_us, is_discarded in told]


def _problem(told: Sequence[str] | None) -> UserError | None:
    if told is None:
        return None
    kind = getattr(errors, told[0], UserError)
    return kind(told[1]) if isinstance(kind, type) and issubclass(kind, UserError) else UserError(told[1])
