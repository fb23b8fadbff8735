"""`RunLedger`, which turns worker reports into the events of the record and the summary of a run.

The record of a real run has the events of a simulated one: ops, spells, steps. Its times are µs since the run began.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from operator import itemgetter

from msgspec.structs import replace

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OpColumns, unpack_ops
from recycle.core.events.record import Changed, Event, Held, OpsRan, Placed, Recovered, Resumed, Saved, Spell, Stepped, Warned
from recycle.core.plans.plan import Plan
from recycle.core.profile import Profile
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.state_digests import whole_digest
from recycle.runtime.coordinator.ledger.checkpoint_reports import CheckpointReports
from recycle.runtime.coordinator.ledger.held_memory import data_wait_shares, held_memory, memory_by_worker
from recycle.runtime.coordinator.ledger.loss_watch import EvaluationLog, LossWatch
from recycle.runtime.coordinator.ledger.lost_work import LostWork
from recycle.runtime.coordinator.ledger.peer_comparison import PeersDisagree, compare_peers
from recycle.runtime.coordinator.ledger.pending_iteration import PendingIteration
from recycle.runtime.coordinator.ledger.recovery_spells import recovery_spells
from recycle.runtime.coordinator.ledger.trained import Trained, finite, usual_us
from recycle.runtime.coordinator.ledger.worker_processes import WorkerProcesses
from recycle.runtime.execute.spans import now_us
from recycle.runtime.worker.worker_reports import IterationApplied, StepUndone, WorkerFinished, WorkerReport, WorkerWarned


class RunLedger:
    """Takes worker reports, and publishes events. An iteration is written once, when all its workers have reported it.

    `differ` gets peers that hold different weights, `fail` an error that must end the run.
    `save` gets every report on a saved stage that is not ahead of the record; `checkpoints.decide` is called with the outcome.
    The run began at `begin_us` of the clock; a resumed run begins at `gone_us` of the record, with `losses` so far.
    """

    def __init__(
        self,
        plan: Plan,
        samples_per_step: int,
        memory_profile: Profile,
        publish: Callable[[Sequence[Event]], None],
        save: Callable[[StageSaved | StageNotSaved], None] | None = None,
        begin_us: int | None = None,
        gone_us: int = 0,
        losses: Iterable[float] = (),
        differ: Callable[[PeersDisagree], None] = lambda found: None,
        fail: Callable[[UserError], None] = lambda problem: None,
    ) -> None:
        self._loss_watch = LossWatch(self.warn, fail)
        self.evaluations = EvaluationLog(self._write_evaluation, lambda: len(self._losses))
        self._differ = differ
        self._agreed_steps = 0
        self._plan, self._samples, self._memory_profile = plan, samples_per_step, memory_profile
        self._members: Mapping[int, Worker] = {}
        self._dead = plan.problem.cluster.failed
        self._live = {str(row.worker) for row in plan.rows}
        self._known_undone: set[tuple[str, int]] = set()
        self._publish = publish
        self._batch: list[Event] | None = None
        self._gone_us = gone_us
        self._begin_us = (now_us() if begin_us is None else begin_us) - gone_us
        self._pending: dict[int, PendingIteration] = {}
        self._unwritten: dict[Stepped, PendingIteration] = {}  # steps that are published, and perhaps not on disk yet
        self._losses = list(losses)
        self.checkpoints = CheckpointReports(
            save, lambda step: step >= len(self._losses), self.write, self.warn, self.now_us, newest=len(self._losses)
        )
        self.processes = WorkerProcesses(self.write, self.now_us)
        self._stepped_us = 0
        self._resumed_us = self._start_us = gone_us
        self._has_started = False
        self._times_us: list[int] = []
        self._lost = LostWork()
        self._planned_us: list[int] = []
        self._num_begun_again = 0
        self._warnings: list[str] = []
        self._recoveries: list[Recovered] = []
        self._changes: list[Changed] = []  # since the last recovery, if another coordinator wrote them

    def restore(self, events: Iterable[Event]) -> None:
        """Continue from the events that another coordinator of this run has written, by the same clock and plan."""
        undone: list[OpsRan] = []
        took_us, first_live = 0, set(self._live)
        for event in events:
            match event:
                case OpsRan(is_undone=True):
                    undone.append(event)
                case Stepped():
                    self._restore_step(event, took_us)
                    undone = [ran for ran in undone if ran.iteration > event.iteration]
                case Spell(state="pause", cause="start"):
                    self._has_started = True
                    self._resumed_us = self._start_us = event.end_us
                case Spell(state="train"):
                    took_us = event.length_us
                case Recovered():
                    self._recoveries.append(event)
                    self._changes.clear()
                    self._resumed_us = event.end_us
                    self._go_back(event.iteration)
                    self._lost.forget()  # the event has counted it
                    undone.clear()
                case Warned():
                    self._warnings.append(event.text)
                case Changed():
                    (self._live.add if event.joins else self._live.discard)(event.node)
                    self._changes.append(event)
                case Resumed():
                    self._live = set(first_live)
                    self._cut_losses(event.num_steps)
                case Placed():
                    self.processes.restore(event)
                case Saved():
                    self.checkpoints.restore(event.num_steps)
                case _:
                    self.evaluations.restore(event)
        for ran in undone:
            self._lost.undone(OpColumns.of(unpack_ops(ran.ops, ran.start_us)))
        self._known_undone = {(ran.worker, ran.start_us) for ran in undone}

    def _restore_step(self, step: Stepped, took_us: int) -> None:
        self._cut_losses(step.iteration)
        self._losses.append(step.loss if step.loss is not None else math.nan)
        self._planned_us.append(step.planned_us)
        self._num_begun_again += step.has_begun_again
        self._end_step(step.iteration, step.at_us, took_us, step.num_ops)

    def _cut_losses(self, num_steps: int) -> None:
        """Have the losses of so many steps; of those that a full disk kept out of the record, the loss is unknown."""
        self._losses = [*self._losses[:num_steps], *[math.nan] * (num_steps - len(self._losses))]

    def _end_step(self, iteration: int, end_us: int, took_us: int, num_ops: int) -> None:
        self._times_us.append(took_us)
        self._stepped_us = end_us
        self._lost.stepped(iteration, took_us, num_ops)

    def resume_epoch(
        self, plan: Plan, epoch: int, iteration: int, members: Mapping[int, Worker], reporters: Mapping[int, Sequence[int]]
    ) -> None:
        """Continue in an epoch that another coordinator started at `iteration`, with its `late_reporters`."""
        self._plan, self._members = plan, members
        joined = {str(row.worker) for row in plan.rows} - self._live
        for place in sorted(joined):  # the coordinator was killed before it wrote that
            self.membership_changed(place, True, len(plan.rows))
        # A recovery is recorded when all members have begun: before that, no step of its epoch can be in the record.
        if epoch > 1 and all(one.epoch != epoch for one in self._recoveries):
            self._go_back(iteration)
            self._add_unrecorded(epoch, iteration, joined)
        for number in reporters.keys() - range(len(self._losses)):
            self._pending[number] = PendingIteration(plan, {*reporters[number]})

    def _add_unrecorded(self, epoch: int, iteration: int, joined: AbstractSet[str]) -> None:
        """Write a recovery of which the coordinator was killed before it could: later steps are not to be dropped again."""
        now_us = self.now_us()
        at_us = min((event.at_us for event in self._changes), default=now_us)
        workers = sorted({event.node for event in self._changes if not event.joins} or joined)
        cause = "the coordinator was replaced in this recovery, so that its parts are not known"
        event = Recovered(at_us, now_us, epoch, tuple(workers), not self._changes, cause, iteration, regroup_us=now_us - at_us)
        self.add_recovery(replace(event, num_live=len(self._plan.rows)))

    def late_reporters(self) -> dict[int, AbstractSet[int]]:
        """The members that must still report iterations when an epoch starts, also iterations that are not on disk yet."""
        unwritten = {step.iteration: pending.reporters for step, pending in self._unwritten.items()}
        return unwritten | {number: pending.reporters for number, pending in self._pending.items()}

    def written(self, events: Iterable[Event]) -> None:
        """Note that events are on disk, or with the launcher of a run without a folder."""
        for event in events:
            if isinstance(event, Stepped):
                self._unwritten.pop(event, None)

    @property
    def recent_us(self) -> int:
        """The median time of the last iterations."""
        return usual_us(self._times_us[-4:])

    @property
    def num_steps(self) -> int:
        """The number of steps that are in the record for good."""
        return len(self._losses)

    def is_pending(self, report: WorkerReport) -> bool:
        """Whether a report waits for reports of other workers, and is not in the record yet."""
        match report:
            case IterationApplied():
                return report.iteration in self._pending
            case StageSaved() | StageNotSaved():
                return self.checkpoints.is_pending(report)
        return self.evaluations.is_pending(report)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def write(self, event: Event) -> None:
        if self._batch is not None:
            self._batch.append(event)
        else:
            self._publish([event])

    def add(self, member: int, report: WorkerReport) -> None:
        """Take a member's report. Its events are published together: one may complete an iteration of some hundred events."""
        with self._publishing_together():
            self._take(member, report)

    @contextmanager
    def _publishing_together(self) -> Iterator[None]:
        self._batch = []
        yield
        events, self._batch = self._batch, None
        if events:
            self._publish(events)
            self.checkpoints.release()  # not before: a checkpoint must not be on disk before its last step

    def _take(self, member: int, report: WorkerReport) -> None:
        match report:
            case IterationApplied():
                self._add_iteration(member, report)
            case StepUndone():
                place, ran = str(report.worker), report.ran.shifted(-self._begin_us)
                if (place, ran.start_us) not in self._known_undone:
                    self._lost.undone(ran)
                    self._write_ops(report.iteration, place, ran, is_undone=True)
            case WorkerFinished():
                self.write(self._held(report))
            case StageSaved() | StageNotSaved():
                self.checkpoints.add(report)
            case WorkerWarned(_, text) if text not in self._warnings:
                self.warn(text)
            case _:
                self.evaluations.add(report, self._begin_us)

    def start_epoch(self, plan: Plan, iteration: int, members: Mapping[int, Worker], survivors: AbstractSet[int]) -> None:
        """Start an epoch at `iteration` with `members` at these places. Only `survivors` still report earlier iterations.

        The last one may have no report yet, if it is settled only now: it was run in an earlier epoch. New members never do.
        """
        self._members = members
        for number in [number for number in self._pending if number >= iteration]:
            del self._pending[number]
        for number in range(len(self._losses), iteration):
            self._pending_iteration(number).reporters &= survivors
            self._write_if_complete(number)
        for pending in self._unwritten.values():
            pending.reporters &= survivors
        self._plan = plan
        self._go_back(iteration)

    def _go_back(self, iteration: int) -> None:
        """Drop the steps from `iteration` on: they are redone."""
        del self._losses[iteration:]
        self.checkpoints.go_back(iteration)
        self.evaluations.go_back(iteration)
        self._lost.go_back(iteration)

    def add_recovery(self, event: Recovered, at_boundary: bool = False) -> None:
        """Write a recovery, with the work that is redone, and the spells since the last step; `at_boundary`, all paused."""
        with self._publishing_together():
            self._add_recovery(event, at_boundary)

    def _add_recovery(self, event: Recovered, at_boundary: bool) -> None:
        if not self._has_started:
            first_us = self._lost.first_us
            self._start(max(self._gone_us, event.at_us if first_us is None else min(event.at_us, first_us)), event.num_live)
        stepped_us = max(self._resumed_us, self._stepped_us)
        if at_boundary:  # waiting for others to pause, too, follows the last step
            at_us = min(event.at_us, max(stepped_us, self._lost.last_us))
            event = replace(event, at_us=at_us, abort_us=event.abort_us + event.at_us - at_us)
        redone = self._lost.settle(event.at_us, event.end_us, stepped_us, self._resumed_us)
        event = replace(event, redo_us=redone.time_us, redone_ops=redone.num_ops)
        share = redone.num_in_flight / max(1, self._plan.num_ops)
        for spell in recovery_spells(event, stepped_us, min(self._samples, round(self._samples * share))):
            self.write(spell)
        self._resumed_us = event.end_us
        self._recoveries.append(event)
        self.write(event)

    def membership_changed(self, worker: str, joins: bool, num_live: int) -> None:
        (self._live.add if joins else self._live.discard)(worker)
        self.write(Changed(self.now_us(), worker, joins, num_live))

    def _held(self, report: WorkerFinished) -> Held:
        return held_memory(report, self._plan, self._memory_profile)

    def warn(self, text: str) -> None:
        self._warnings.append(text)
        self.write(Warned(self.now_us(), text))

    def now_us(self) -> int:
        """The present time of the record."""
        return now_us() - self._begin_us

    def to_record_us(self, clock_us: int) -> int:
        """Convert a time of the machine's clock to the time of the record."""
        return clock_us - self._begin_us

    def _add_iteration(self, member: int, report: IterationApplied) -> None:
        if report.iteration < len(self._losses):
            return  # sent again, because the coordinator went away before it acknowledged the report
        pending = self._pending_iteration(report.iteration)
        pending.losses |= report.losses
        pending.verdict = report.verdict
        pending.checksums[member] = report.checksum
        self.checkpoints.keep_positions(report.iteration + 1, report.positions)
        pending.ran[member] = report.worker, report.ran.shifted(-self._begin_us)
        self._write_if_complete(report.iteration)

    def _pending_iteration(self, iteration: int) -> PendingIteration:
        if iteration not in self._pending:
            self._pending[iteration] = PendingIteration(self._plan, self._members.keys())
        return self._pending[iteration]

    def _write_ops(self, iteration: int, place: str, ran: OpColumns, is_undone: bool = False) -> None:
        if ran.text:
            self.write(OpsRan(iteration, place, ran.start_us, ran.end_us, ran.num_ops, ran.text, is_undone))

    def _write_if_complete(self, iteration: int) -> None:
        pending = self._pending[iteration]
        if pending.is_complete() and iteration == len(self._losses) and pending.verdict is not None:
            del self._pending[iteration]
            self._unwritten[self._write_iteration(iteration, pending, pending.verdict)] = pending
            self._compare(iteration + 1, pending.checksums_by_place(self._members))
            if self._batch is None:
                self.checkpoints.release()
            if iteration + 1 in self._pending:
                self._write_if_complete(iteration + 1)

    def _compare(self, num_steps: int, checksums: Mapping[Worker, str]) -> None:
        if found := compare_peers(num_steps, self._agreed_steps, checksums):
            self.checkpoints.refuse(num_steps)
            self._differ(found)
        elif any(checksums.values()):
            self._agreed_steps = num_steps

    def _write_iteration(self, iteration: int, pending: PendingIteration, verdict: StepVerdict) -> Stepped:
        for place, ran in sorted(pending.ran.values(), key=itemgetter(0)):
            self._write_ops(iteration, str(place), ran)
        all_ran = [ran for _, ran in pending.ran.values()]
        if not self._has_started:
            self._start(min(ran.start_us for ran in all_ran), len(pending.plan.rows))
        before = max(self._stepped_us, self._resumed_us)
        end = max(before, *(ran.end_us for ran in all_ran))
        busy = sum(ran.busy_us for ran in all_ran)
        loss = pending.mean_loss()
        num_ops, has_begun_again = sum(ran.num_ops for ran in all_ran), any(ran.has_vain for ran in all_ran)
        self._planned_us.append(pending.plan.period_at_us(sum(ran.ops_us for ran in all_ran)))
        self._num_begun_again += has_begun_again
        self._losses.append(loss)
        if pending.losses:
            self._loss_watch.add(iteration + 1, loss)
        self._end_step(iteration, end, end - before, num_ops)
        mean_busy = min(end - before, round(busy / len(pending.plan.rows)))
        self.write(Spell(before, end, "train", samples=self._samples, busy_us=mean_busy, num_live=len(pending.plan.rows)))
        planned_us, norm, scales = self._planned_us[-1], finite(verdict.norm), (verdict.scale, verdict.loss_scale)
        step = Stepped(iteration, end, finite(loss), norm, scales[0], planned_us, num_ops, has_begun_again, scales[1])
        self.write(step)
        self.evaluations.stepped(self.now_us() - self._gone_us)
        return step

    def _write_evaluation(self, event: Event, at_us: int) -> None:
        """Write an evaluation, which ended at `at_us`, and that training paused for it since the last step."""
        before = max(self._stepped_us, self._resumed_us)
        self._resumed_us = max(before, at_us)
        self.write(Spell(before, self._resumed_us, "pause", "evaluation", num_live=len(self._plan.rows)))
        self.write(event)

    def _start(self, at_us: int, num_live: int) -> None:
        """Write the start of the run, which ends with the first op."""
        self._has_started = True
        self._resumed_us = self._start_us = at_us
        self.write(Spell(self._gone_us, at_us, "pause", "start", num_live=num_live))

    def summary(self, num_steps: int, finished: Mapping[Worker, WorkerFinished]) -> Trained:
        iteration_us = usual_us(self._times_us)
        held = {str(worker): self._held(finished[worker]) for worker in sorted(finished)}
        return Trained(
            num_steps=num_steps,
            losses=tuple(self._losses),
            weights_sha256=whole_digest({worker: report.digest for worker, report in finished.items()}),
            samples_per_s=self._samples * 1e6 / iteration_us if iteration_us else 0.0,
            iteration_us=iteration_us,
            planned_iteration_us=usual_us(self._planned_us),
            start_us=self._start_us - self._gone_us,
            **memory_by_worker(held),
            dead=tuple(str(worker) for worker in sorted(self._dead)),
            num_begun_again=self._num_begun_again,
            warnings=self.warnings,
            recoveries=tuple(self._recoveries),
            data_wait_shares=data_wait_shares(finished),
            **self.evaluations.summary(),
        )
