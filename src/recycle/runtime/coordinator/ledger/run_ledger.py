"""The books of a run: what workers tell, put together iteration by iteration, as events of the record and as a summary.

The record of a real run is that of a simulated one: ops, spells, steps. Its times are µs since the run began.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.events.record import OPTIMIZER, REDUCE, Changed, Event, Held, OpRan, Recovered, Saved, Spell, Stepped, Warned
from recycle.core.plans.plan import Plan
from recycle.core.profile import StageProfile
from recycle.runtime.checkpoint import CheckpointComplete, CheckpointFolder, CheckpointIncomplete, StageNotSaved, StageSaved
from recycle.runtime.compute.activation_memory import planned_peak_bytes
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.weight_digest import whole_digest
from recycle.runtime.coordinator.ledger.lost_work import LostWork
from recycle.runtime.coordinator.ledger.worker_reports import IterationApplied, StepUndone, WorkerFinished, WorkerReport
from recycle.runtime.execute.executor import Span, now_us


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
    recoveries: tuple[Recovered, ...] = ()

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
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
        }


@dataclass(slots=True)
class _Page:
    """An iteration of which not all workers have told yet: by which plan it was played, and who has to tell of it."""

    plan: Plan
    tellers: set[Worker]
    losses: dict[int, float] = field(default_factory=dict)
    spans: dict[Worker, list[Span]] = field(default_factory=dict)
    verdict: StepVerdict | None = None


class RunLedger:
    """Takes in what workers tell, and gives out events.

    The run began at `begin_us` of the clock; if it goes on from another, at `gone_us` of the record, with `losses` so far.
    """

    def __init__(
        self,
        plan: Plan,
        samples_per_step: int,
        profiles: Sequence[StageProfile],
        write: Callable[[Event], None],
        checkpoints: CheckpointFolder | None = None,
        begin_us: int | None = None,
        gone_us: int = 0,
        losses: Iterable[float] = (),
    ) -> None:
        self._plan, self._samples, self._profiles = plan, samples_per_step, profiles
        self._dead = plan.problem.cluster.failed
        self._write, self._checkpoints = write, checkpoints
        self._gone_us = gone_us
        self._begin_us = (now_us() if begin_us is None else begin_us) - gone_us
        self._pages: dict[int, _Page] = {}
        self._losses = list(losses)
        self._ends_us: list[int] = []
        self._resumed_us = self._start_us = gone_us
        self._first_us = 0
        self._has_started = False
        self._times_us: list[int] = []
        self._redo = LostWork()
        self._waiting: list[StageSaved | StageNotSaved] = []
        self._planned_us: list[int] = []
        self._num_begun_again = 0
        self._warnings: list[str] = []
        self._recoveries: list[Recovered] = []

    def restore(self, events: Iterable[Event]) -> None:
        """Know what others have written of this very run: its clock and its plan are the same."""
        ops: list[OpRan] = []
        took_us = 0
        for event in events:
            match event:
                case OpRan():
                    ops.append(event)
                case Stepped():
                    self._restore_step(event, took_us, [op for op in ops if op.iteration == event.iteration])
                    ops = [op for op in ops if op.iteration > event.iteration]
                case Spell(state="pause", cause="start"):
                    self._has_started = True
                    self._resumed_us = self._start_us = event.end_us
                case Spell(state="train"):
                    took_us = event.length_us
                case Recovered():
                    self._recoveries.append(event)
                    self._resumed_us = event.end_us
                    self._go_back(event.iteration)
                    self._redo.forget()  # the event says it
                    ops.clear()
                case Warned():
                    self._warnings.append(event.text)
                case _:
                    pass
        self._redo.undone(Span(op.op, op.start_us, op.end_us) for op in ops if op.is_in_vain)

    def _restore_step(self, step: Stepped, took_us: int, ops: Sequence[OpRan]) -> None:
        del self._losses[step.iteration :]
        self._losses.append(step.loss if step.loss is not None else math.nan)
        self._planned_us.append(step.planned_us)
        self._num_begun_again += any(op.is_in_vain for op in ops)
        self._end_step(step.iteration, step.at_us, took_us, _num_ops(op.op for op in ops if not op.is_in_vain))

    def _end_step(self, iteration: int, end_us: int, took_us: int, num_ops: int) -> None:
        if self._ends_us:
            self._times_us.append(took_us)
        else:
            self._first_us = took_us
        self._ends_us.append(end_us)
        self._redo.stepped(iteration, took_us, num_ops)

    def go_on(self, plan: Plan, epoch: int, iteration: int) -> None:
        """Go on in an epoch that began at `iteration`, before these books were taken over."""
        self._plan = plan
        # A recovery is told of when all have begun: before that, no step of its epoch can be in the record.
        if epoch > 1 and all(one.epoch != epoch for one in self._recoveries):
            self._go_back(iteration)

    @property
    def num_steps(self) -> int:
        """How many steps are in the books, for good."""
        return len(self._losses)

    def is_open(self, told: WorkerReport) -> bool:
        """Whether what was told waits for others to tell the same: until then it is not in the record."""
        match told:
            case IterationApplied():
                return told.iteration in self._pages
            case StageSaved() | StageNotSaved():
                return told in self._waiting
        return False

    def hear(self, told: WorkerReport) -> None:
        """Take in what one worker tells."""
        match told:
            case IterationApplied():
                self._turn_page(told)
            case StepUndone():
                spans = self._shifted(told.spans)
                self._redo.undone(spans)
                for span in spans:
                    self._write(OpRan(told.iteration, str(told.worker), span.label, span.start_us, span.end_us, True))
            case WorkerFinished(worker, _, peak, activations):
                self._write(Held(str(worker), peak, activations, self._planned_bytes(worker)))
            case StageSaved() | StageNotSaved():
                self._save(told)
            case _:
                pass

    def began(self, plan: Plan, iteration: int, kept: Iterable[Worker]) -> None:
        """An epoch begins at `iteration`: `kept` are those of the one before who still tell of what it had not told.

        Of its last iteration nobody may have told yet: it was settled only now. Who is new never will.
        """
        for number in [number for number in self._pages if number >= iteration]:
            del self._pages[number]
        for number in range(len(self._losses), iteration):
            self._page(number).tellers &= set(kept)
            self._close_if_whole(number)
        self._plan = plan
        self._go_back(iteration)

    def _go_back(self, iteration: int) -> None:
        """Steps from `iteration` on, if there are any, are done again."""
        del self._losses[iteration:]
        self._redo.go_back(iteration)

    def recovered(self, event: Recovered) -> None:
        """Training goes on after a failure or a join: say what is done again, as only the books know, and where the time went."""
        if not self._has_started:
            first_us = self._redo.first_us
            self._start(max(self._gone_us, event.at_us if first_us is None else min(event.at_us, first_us)), event.num_live)
        stepped_us = max(self._resumed_us, self._ends_us[-1] if self._ends_us else 0)
        if event.joins:
            # All have paused after a step: what follows it is the warm-up of the next one, and waiting for the others.
            at_us = min(event.at_us, max(stepped_us, self._redo.last_us))
            event = replace(event, at_us=at_us, abort_us=event.abort_us + event.at_us - at_us)
        redone = self._redo.settle(event.at_us, event.end_us, stepped_us, self._resumed_us)
        event = replace(event, redo_us=redone.time_us, redone_ops=redone.num_ops)
        self._write_spells(event, stepped_us, redone.num_in_flight)
        self._resumed_us = event.end_us
        self._recoveries.append(event)
        self._write(event)

    def _write_spells(self, event: Recovered, stepped_us: int, num_in_flight: int) -> None:
        """Write where the time since the last step went, in the words of a simulated run.

        Steps that a checkpoint threw away stay as they were written: a reader knows better `in_hindsight`.
        """
        if stepped_us < event.at_us:
            share = num_in_flight / max(1, self._plan.num_ops)
            discarded = min(self._samples, round(self._samples * share))
            cause = "join" if event.joins else "failure"
            self._write(Spell(stepped_us, event.at_us, "redo", cause, discarded=discarded, num_live=event.num_live))
        end_us = event.at_us
        for cause in ("detect", "abort", "plan", "regroup", "transfer"):
            start_us, end_us = end_us, end_us + getattr(event, f"{cause}_us")
            # A step in flight may have ended after the failure: its time is its own.
            if max(start_us, stepped_us) < end_us:
                self._write(Spell(max(start_us, stepped_us), end_us, "pause", cause, num_live=event.num_live))

    def changed(self, worker: str, joins: bool, num_live: int) -> None:
        self._write(Changed(self.now_us(), worker, joins, num_live))

    def write(self, event: Event) -> None:
        self._write(event)

    def _planned_bytes(self, worker: Worker) -> int:
        row = next((row for row in self._plan.rows if row.worker == worker), None)
        return planned_peak_bytes(row, self._profiles[worker.stage]) if row is not None else 0

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self._write(Warned(self.now_us(), text))

    def now_us(self) -> int:
        """The time of the record."""
        return now_us() - self._begin_us

    def at_us(self, clock_us: int) -> int:
        """A moment of the machine's clock in the time of the record."""
        return clock_us - self._begin_us

    def _save(self, told: StageSaved | StageNotSaved) -> None:
        assert self._checkpoints is not None
        if told.num_steps - 1 in self._pages:
            self._waiting.append(told)  # a slow peer has not told yet: a checkpoint is not ahead of the record
            return
        match self._checkpoints.add_report(told):
            case CheckpointComplete(num_steps, folder, size_bytes):
                self._write(Saved(self.now_us(), num_steps, folder.name, size_bytes))
            case CheckpointIncomplete(num_steps, reason):
                self.warn(f"there is no checkpoint of {num_steps} steps, but training goes on: {reason}")

    def _turn_page(self, told: IterationApplied) -> None:
        if told.iteration < len(self._losses):
            return  # told twice, because the coordinator was away when it was told first
        page = self._page(told.iteration)
        page.losses |= told.losses
        page.verdict = told.verdict
        page.spans[told.worker] = self._shifted(told.spans)
        self._close_if_whole(told.iteration)

    def _page(self, iteration: int) -> _Page:
        """The page of an iteration, which is played by the plan of now if there is none yet."""
        if iteration not in self._pages:
            self._pages[iteration] = _Page(self._plan, {row.worker for row in self._plan.rows})
        return self._pages[iteration]

    def _shifted(self, spans: Iterable[Span]) -> list[Span]:
        """Spans in the time of the record."""
        return [Span(span.label, span.start_us - self._begin_us, span.end_us - self._begin_us, span.is_in_vain) for span in spans]

    def _close_if_whole(self, iteration: int) -> None:
        page = self._pages[iteration]
        if page.tellers <= set(page.spans) and iteration == len(self._losses) and page.verdict is not None:
            del self._pages[iteration]
            self._close(iteration, page, page.verdict)
            waiting, self._waiting = self._waiting, []
            for report in waiting:
                self._save(report)

    def _close(self, iteration: int, page: _Page, verdict: StepVerdict) -> None:
        """All workers have applied an iteration: write it down."""
        spans = [(worker, span) for worker in sorted(page.spans) for span in page.spans[worker]]
        for worker, span in spans:
            self._write(OpRan(iteration, str(worker), span.label, span.start_us, span.end_us, span.is_in_vain))
        if not self._has_started:
            self._start(min(span.start_us for _, span in spans), len(page.plan.rows))
        before = max(self._ends_us[-1] if self._ends_us else 0, self._resumed_us)
        end = max(before, *(span.end_us for _, span in spans))
        busy = sum(span.end_us - span.start_us for _, span in spans)
        loss = fmean(page.losses[chain] for chain in sorted(page.losses))
        ops = sum(span.end_us - span.start_us for _, span in spans if span.is_op and not span.is_in_vain)
        self._planned_us.append(page.plan.period_at_us(ops))
        self._num_begun_again += any(span.is_in_vain for _, span in spans)
        self._losses.append(loss)
        self._end_step(iteration, end, end - before, _num_ops(span.label for _, span in spans if not span.is_in_vain))
        mean_busy = min(end - before, round(busy / len(page.plan.rows)))
        self._write(Spell(before, end, "train", samples=self._samples, busy_us=mean_busy, num_live=len(page.plan.rows)))
        self._write(Stepped(iteration, end, _finite(loss), _finite(verdict.norm), verdict.scale, self._planned_us[-1]))

    def _start(self, at_us: int, num_live: int) -> None:
        """The first op ran at `at_us`."""
        self._has_started = True
        self._resumed_us = self._start_us = at_us
        self._write(Spell(self._gone_us, at_us, "pause", "start", num_live=num_live))

    def trained(self, num_steps: int, finished: Mapping[Worker, WorkerFinished]) -> Trained:
        """What the run came to."""
        # The first iteration, in which all warm up, counts only if there is no other.
        iteration_us = round(median(self._times_us)) if self._times_us else self._first_us
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
            planned_activation_bytes={str(worker): self._planned_bytes(worker) for worker in sorted(finished)},
            dead=tuple(str(worker) for worker in sorted(self._dead)),
            num_begun_again=self._num_begun_again,
            warnings=tuple(self._warnings),
            recoveries=tuple(self._recoveries),
        )


def _num_ops(labels: Iterable[str]) -> int:
    return sum(label not in (REDUCE, OPTIMIZER) for label in labels)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
