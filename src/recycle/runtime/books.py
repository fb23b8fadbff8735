"""The books of a run: what workers tell, put together iteration by iteration, as events of the record and as a summary.

The record of a real run is that of a simulated one: ops, spells, steps. Its times are µs since the run began.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.plan import Plan
from recycle.core.record import Event, Held, OpRan, Saved, Spell, Stepped, Warned
from recycle.runtime.checkpoint import Checkpoints, NotSaved, StageNotSaved, StageSaved, Whole
from recycle.runtime.digest import whole_digest
from recycle.runtime.executor import Span, now_us
from recycle.runtime.step import Verdict
from recycle.runtime.worker import Applied, Finished, Told


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run. `losses` are those of all steps, also of those before it was resumed.

    Times are those of a median iteration of this run, 0 if there was none; `planned_iteration_us` is the plan's period at the
    speed at which ops really ran. Iterations are begun again after a step that was taken back.
    """

    num_steps: int
    losses: tuple[float, ...]
    weights_sha256: str
    samples_per_s: float
    iteration_us: int
    planned_iteration_us: int
    start_us: int
    peak_memory_bytes: Mapping[str, int]
    activation_bytes: Mapping[str, int]
    planned_activation_bytes: Mapping[str, int]
    dead: tuple[str, ...]
    num_begun_again: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.num_steps,
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],
            "weights_sha256": self.weights_sha256,
            "samples_per_s": round(self.samples_per_s, 3),
            "iteration_us": self.iteration_us,
            "planned_iteration_us": self.planned_iteration_us,
            "start_us": self.start_us,
            "peak_memory_bytes": dict(self.peak_memory_bytes),
            "activation_bytes": dict(self.activation_bytes),
            "planned_activation_bytes": dict(self.planned_activation_bytes),
            "workers": len(self.peak_memory_bytes),
            "dead": list(self.dead),
            "begun_again": self.num_begun_again,
            "warnings": list(self.warnings),
            "recoveries": [],
        }


@dataclass(slots=True)
class _Page:
    """An iteration of which not all workers have told yet."""

    losses: dict[int, float] = field(default_factory=dict)
    spans: dict[Worker, list[Span]] = field(default_factory=dict)


class Books:
    """Takes in what workers tell, and gives out events.

    The run began at `begin_us` of the clock; if it goes on from another, at `gone_us` of the record, with `losses` so far.
    """

    def __init__(
        self,
        plan: Plan,
        samples_per_step: int,
        planned_bytes: Mapping[Worker, int],
        write: Callable[[Event], None],
        checkpoints: Checkpoints | None = None,
        begin_us: int | None = None,
        gone_us: int = 0,
        losses: Iterable[float] = (),
    ) -> None:
        self._plan, self._samples, self._planned_bytes = plan, samples_per_step, planned_bytes
        self._write, self._checkpoints = write, checkpoints
        self._gone_us = gone_us
        self._begin_us = (now_us() if begin_us is None else begin_us) - gone_us
        self._pages: dict[int, _Page] = {}
        self._losses = list(losses)
        self._ends_us: list[int] = []
        self._start_us = gone_us
        self._waiting: list[StageSaved | StageNotSaved] = []
        self._planned_us: list[int] = []
        self._num_begun_again = 0
        self._warnings: list[str] = []

    def hear(self, told: Told) -> None:
        """Take in what one worker tells."""
        match told:
            case Applied():
                self._turn_page(told)
            case Finished(worker, _, peak, activations):
                self._write(Held(str(worker), peak, activations, self._planned_bytes[worker]))
            case StageSaved() | StageNotSaved():
                self._save(told)
            case _:
                pass

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._write(Warned(self._now(), text))

    def _now(self) -> int:
        return now_us() - self._begin_us

    def _save(self, told: StageSaved | StageNotSaved) -> None:
        assert self._checkpoints is not None
        if told.num_steps - 1 in self._pages:
            self._waiting.append(told)  # a slow peer has not told yet: a checkpoint is not ahead of the record
            return
        match self._checkpoints.hear(told):
            case Whole(num_steps, folder, size_bytes):
                self._write(Saved(self._now(), num_steps, folder.name, size_bytes))
            case NotSaved(num_steps, reason):
                self.warn(f"there is no checkpoint of {num_steps} steps, but training goes on: {reason}")

    def _turn_page(self, told: Applied) -> None:
        page = self._pages.setdefault(told.iteration, _Page())
        page.losses |= told.losses
        page.spans[told.worker] = [
            Span(span.label, span.start_us - self._begin_us, span.end_us - self._begin_us, span.is_in_vain) for span in told.spans
        ]
        if len(page.spans) == len(self._plan.rows):
            self._close(told.iteration, self._pages.pop(told.iteration), told.verdict)
            waiting, self._waiting = self._waiting, []
            for report in waiting:
                self._save(report)

    def _close(self, iteration: int, page: _Page, verdict: Verdict) -> None:
        """All workers have applied an iteration: write it down."""
        spans = [(worker, span) for worker in sorted(page.spans) for span in page.spans[worker]]
        for worker, span in spans:
            self._write(OpRan(iteration, str(worker), span.label, span.start_us, span.end_us, span.is_in_vain))
        if not self._ends_us:
            self._start_us = min(span.start_us for _, span in spans)
            self._write(Spell(self._gone_us, self._start_us, "pause", "start", num_live=len(self._plan.rows)))
        before = self._ends_us[-1] if self._ends_us else self._start_us
        end = max(span.end_us for _, span in spans)
        busy = sum(span.end_us - span.start_us for _, span in spans)
        loss = fmean(page.losses[chain] for chain in sorted(page.losses))
        ops = sum(span.end_us - span.start_us for _, span in spans if span.is_op and not span.is_in_vain)
        self._planned_us.append(self._plan.period_at_us(ops))
        self._num_begun_again += any(span.is_in_vain for _, span in spans)
        self._losses.append(loss)
        self._ends_us.append(end)
        mean_busy = min(end - before, round(busy / len(self._plan.rows)))
        self._write(Spell(before, end, "train", samples=self._samples, busy_us=mean_busy, num_live=len(self._plan.rows)))
        self._write(Stepped(iteration, end, _finite(loss), _finite(verdict.norm), verdict.scale, self._planned_us[-1]))

    def _iteration_us(self) -> int:
        """The time between the ends of two iterations; the first, in which all warm up, counts only if there is no other."""
        times = [after - before for before, after in zip(self._ends_us, self._ends_us[1:], strict=False)]
        return round(median(times)) if times else self._ends_us[0] - self._start_us

    def trained(self, num_steps: int, finished: Mapping[Worker, Finished]) -> Trained:
        """What the run came to."""
        iteration_us = self._iteration_us() if self._ends_us else 0
        return Trained(
            num_steps=num_steps,
            losses=tuple(self._losses),
            weights_sha256=whole_digest({worker: told.digest for worker, told in finished.items()}),
            samples_per_s=self._samples * 1e6 / iteration_us if iteration_us else 0.0,
            iteration_us=iteration_us,
            planned_iteration_us=round(median(self._planned_us[1:] or self._planned_us)) if self._planned_us else 0,
            start_us=self._start_us - self._gone_us,
            peak_memory_bytes={str(worker): finished[worker].peak_bytes for worker in sorted(finished)},
            activation_bytes={str(worker): finished[worker].activation_bytes for worker in sorted(finished)},
            planned_activation_bytes={str(worker): self._planned_bytes[worker] for worker in sorted(finished)},
            dead=tuple(str(worker) for worker in sorted(self._plan.problem.cluster.failed)),
            num_begun_again=self._num_begun_again,
            warnings=tuple(self._warnings),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
