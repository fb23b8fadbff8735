"""`CoordinatorService`, which connects the coordinator's decisions with server, plans, ledger and launcher.

It sends every event to its launcher as it happens, and the summary at the end. If the process is killed, another one takes over:
the journal has the members and places, the record the steps, and workers send again the reports that were not acknowledged.
"""

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from recycle.control.decide.coordinator import Coordinator
from recycle.control.decide.members import Member, Recovery, Reporters, members_at
from recycle.control.decide.messages import Ack, ControlMessage, Hello, Refused, Report, Welcome
from recycle.control.decide.new_epoch import NewEpoch
from recycle.control.decide.phases import CoordinatorPhase
from recycle.control.net.handshake import this_host
from recycle.control.net.server import ConnectionTask, Server
from recycle.control.planning.planning_process import PlanningProcess
from recycle.control.store.protocol import Store, ask_until_answered
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, LeadershipLost, PeersDiffer, PlannerFailed, UserError, WorkerFailed
from recycle.core.events.record import Event, Joining, Suspected
from recycle.core.plans.plan_source import PlanAssignment
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointIncomplete
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved
from recycle.runtime.coordinator import fencing
from recycle.runtime.coordinator.acknowledgements import Acknowledgements
from recycle.runtime.coordinator.config import (
    CoordinatorConfig,
    EventSink,
    FirstEpochFormed,
    JobDone,
    JobFailed,
    Notice,
    ReplaceWorker,
    WaitingForWorkers,
    WorkerLost,
)
from recycle.runtime.coordinator.connection_tasks import NOT_CERTAIN, preferred_place, task_of_purpose
from recycle.runtime.coordinator.forming_watch import FormingWatch
from recycle.runtime.coordinator.leadership import DecisionGate
from recycle.runtime.coordinator.ledger.peer_comparison import PeersDisagree
from recycle.runtime.coordinator.ledger.recovered_event import recovered_event
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.ledger.takeover_ledger import TakeoverLedger
from recycle.runtime.coordinator.plan_requests import PlanOutcome, PlanRequests
from recycle.runtime.coordinator.report_inbox import ReportInbox
from recycle.runtime.coordinator.run_output import RunOutput
from recycle.runtime.coordinator.speed_planning import SpeedPlanning
from recycle.runtime.execute.spans import now_us
from recycle.runtime.worker.fault_injection import death_us, kill_coordinator
from recycle.runtime.worker.worker_reports import IterationApplied, WorkerCrashed, WorkerFinished


class CoordinatorService:
    """Connects a `Coordinator` with the outside: the service is the `ServerCallbacks` and the `CoordinatorEffects`."""

    def __init__(
        self,
        config: CoordinatorConfig,
        listener: socket.socket,
        sink: EventSink,
        run: RunFolder | None,
        before: Iterable[Event] | None,
        planning: PlanningProcess | None,
        store: Store,
    ) -> None:
        """`store` is led by this coordinator. Its journal is that of this very job, unless there is no `before`."""
        self._config, self._sink, self._run = config, sink, run
        if before is None:
            ask_until_answered(store.discard)
        self._server = Server(listener, config.token, self, tls=config.tls)
        self._output = RunOutput(run, sink, self._server.call_soon, lambda problem: self._ledger.warn(problem))
        self._gate = DecisionGate(store, self._server, lambda text: self._ledger.warn(text), self._step_down)
        self._journal, self._only_saves = self._gate.journal, False
        self._found: list[Callable[[], None]] = []
        plan, losses = config.initial.plan, run.losses if run is not None else ()
        self._ledger = TakeoverLedger(
            plan,
            config.num_samples,
            config.memory_profile,
            lambda events: self._output.publish(events, lambda written: self._ledger.written(written)),
            self._save,
            config.begin_us,
            run.gone_us if run is not None else 0,
            losses,
            lambda found: self._found.append(partial(self._peers_differ, found)),
            lambda problem: self._found.append(partial(self._end, JobFailed(problem))),
        )
        self._ledger.restore(before or (run.evaluations if run is not None else ()))
        self._ledger.evaluations.end_by(config.patience, config.time_limit_s, self.stop_early)
        if (entry := self._journal.last()) is not None:
            self._only_saves = entry.only_saves
            epoch_plan = self._ledger.take_over(entry, has_gap=store.lease_s > 0)  # another machine may have the record
            self._output.keep_plan(entry.iteration, epoch_plan.dumps, is_late=True)
        elif before is not None and self._ledger.num_steps:
            raise FileProblem(f"{config.journal} is missing, because it could not be written")
        for warning in run.warnings if run is not None else ():
            self._ledger.warn(warning)
        self._acks = Acknowledgements(self._output.when_recorded, self._send_ack)
        self._inbox = ReportInbox(self._ledger, self._acks.add)
        self._numbers, self._epochs, self._crashed_at = dict[int, int](), dict[int, int](), set[int]()
        self._finished, self._is_over, self._is_ending = dict[Worker, WorkerFinished](), False, False
        shape, held = plan.problem.shape, (plan.problem.shared_layers, plan.problem.layer_counts)
        self._plans = PlanRequests(config.source, shape, self._plan_made, planning, *held)
        self._speeds = SpeedPlanning(config, self._plans, self._ledger, self._server.call_soon, lambda: self._coordinator)
        saved = run.resumed.num_steps if run is not None and run.resumed is not None else -1
        options = self._journal, config.lease_s, saved, config.run_folder.ops_every
        self._coordinator = Coordinator(shape, config.initial, max(0, saved), self, *options)
        if entry is not None:
            self._speeds.start_epoch(epoch_plan, entry.iteration, entry.places)
        fail = (lambda text: self._end(JobFailed(WorkerFailed(text)))) if config.deaths is not None else None
        self._forming = FormingWatch([row.worker for row in plan.rows], now_us() / 1e6, self._ledger.warn, fail)

    def run(self) -> None:
        try:
            self._server.run()
        finally:
            self._plans.close()
            self._gate.close()
            self._output.close()

    def stop_early(self, because: str = "") -> None:
        """Have the job end after the present iteration, with a checkpoint. A signal handler may call this, without a reason."""
        self._server.call_soon(partial(self._stop_early, because))

    def _stop_early(self, because: str) -> None:
        if not self._is_over and not self._is_ending:
            self._is_ending, again = True, "" if because else "; Ctrl-C again ends it at once"
            self._ledger.warn(f"{because or 'asked to stop'}: the run ends after this step, with a checkpoint{again}")
            self._coordinator.stop_early()

    # ServerCallbacks.

    def admit(self, connection: int, hello: Hello) -> Welcome | Refused:
        if hello.job not in ("", self._config.job):
            return Refused(f"this is job {self._config.job}, not {hello.job}")
        if not self._gate.is_certain:
            return NOT_CERTAIN
        member = self._coordinator.rejoin(hello.member, connection, hello.host, hello.pid) if hello.member >= 0 else None
        if member is None:
            if hello.epoch >= 0:
                return Refused("it was taken for dead, and others do its work", may_retry=True)
            # A new worker, or a member that had no place yet and can join again.
            if isinstance(place := preferred_place(hello), Refused):
                return place
            if reason := self._coordinator.refusal(place):
                return Refused(reason)
            member = self._coordinator.join(connection, hello.host, hello.pid, place)
        member.clock_offset_us = 0 if hello.host == this_host() else now_us() - hello.clock_us
        fencing.identify(member)
        self._numbers[connection], self._epochs[connection] = member.number, hello.epoch
        return Welcome(member.number, self._config.lease_s, self._config.job, dict(self._config.about), self._journal.term)

    def admitted(self, connection: int) -> None:
        member, epoch = self._member(connection), self._epochs.pop(connection)
        if member is not None and (member.place is not None or member.has_left):
            self._coordinator.resume_member(member, epoch)

    def receive(self, connection: int, message: ControlMessage) -> None:
        if (member := self._member(connection)) is None:
            return
        if isinstance(message, Report):
            member.last_seen_s = now_us() / 1e6
            self._receive_report(member, message)
        else:
            self._coordinator.receive(member, message)

    def task_for(self, hello: Hello) -> ConnectionTask | Refused:
        return task_of_purpose(hello, self._config.job, self._run, self._gate)

    def violated(self, connection: int, reason: str) -> None:
        if (member := self._member(connection)) is not None:
            self._ledger.warn(f"the connection of {member.place or 'a worker'} was closed: {reason}")

    def disconnected(self, connection: int) -> None:
        member = self._member(connection)
        self._numbers.pop(connection, None)
        if member is not None and not self._is_over:
            member.connection = None
            self._gate.when_certain(partial(self._connection_lost, member), f"{member.place or 'a worker'} has disconnected")

    def _connection_lost(self, member: Member) -> None:
        if member.connection is None and self._coordinator.members.get(member.number) is member:
            self._coordinator.connection_lost(member)
            if member.has_left:
                self._inbox.remove(member.number)

    def tick(self) -> None:
        if self._coordinator.phase is CoordinatorPhase.FORMING:
            self._coordinator.update_membership()
            self._forming.tick(now_us() / 1e6, self._coordinator.members.values())
        if self._gate.is_certain and not self._is_over:
            self._coordinator.tick()
        is_recovery = self._coordinator.phase in (CoordinatorPhase.STOPPING, CoordinatorPhase.PLANNING)  # all wait for an epoch
        if not is_recovery or any(member.has_left for member in self._coordinator.members.values()):
            self._acks.send_due()
        if self._coordinator.members.are_connected:
            self._output.keep_late_plan()

    def _member(self, connection: int) -> Member | None:
        return self._coordinator.members.get(self._numbers.get(connection, -1))

    # CoordinatorEffects.

    def now_us(self) -> int:
        return now_us()

    def is_ready(self) -> bool:
        return self._plans.is_ready()

    def send(self, connection: int, message: ControlMessage) -> None:
        self.send_all([connection], message)

    def send_all(self, connections: Iterable[int], message: ControlMessage) -> None:
        self._gate.send_all(connections, message)

    def disconnect(self, connection: int, reason: str = "") -> None:
        self._numbers.pop(connection, None)
        if reason:
            self._server.send(connection, Refused(reason, may_retry=True))
        self._server.disconnect(connection)

    is_process_running = staticmethod(fencing.is_running)

    def fence(self, member: Member) -> None:
        if self._gate.is_certain:
            fencing.fence(member)

    def request_plan(self, failed: frozenset[Worker]) -> None:
        kill_coordinator(self._config.injections, self._ledger.num_steps, is_recovery=True)
        self._speeds.request(failed)

    def expect_request(self, failed: frozenset[Worker]) -> None:
        self._speeds.expect(failed)

    def find_checkpoint(self) -> None:
        self._ledger.checkpoints.hold()
        self._output.find_checkpoint(self._coordinator.checkpoint_found)

    def no_checkpoint(self, begins_again: bool) -> None:
        then = "training begins again with the first step" if begins_again else "the wrong gradient stays in the weights"
        self._ledger.warn(f"there is no checkpoint to go back to: {then}")

    def member_left(self, member: Member, reason: str) -> int:
        if not member.is_leaving:  # else its last reports are still to be acknowledged
            self._inbox.remove(member.number)
        self._ledger.membership_changed(str(member.place), False, len(self._coordinator.members.placed))
        if self._config.source is None and not self._is_over:
            self._end(WorkerLost(member.pid, f"{member.place} is gone: {reason}"))
        return death_us(self._config.deaths, member.pid) if self._config.deaths is not None else 0

    def member_suspected(self, member: Member, reason: str) -> None:
        if member.place is not None:  # a spare is in nobody's way
            self._ledger.write(Suspected(self._ledger.now_us(), str(member.place), reason))

    def member_joining(self, member: Member, place: Worker) -> None:
        self._ledger.processes.place(str(place), member.host, member.pid)
        self._ledger.write(Joining(self._ledger.now_us(), str(place)))

    def planning_failed(self, reason: str) -> None:
        self._end(JobFailed(PlannerFailed(reason)))

    def stalled(self, stalled_s: float) -> None:
        if stalled_s > self._config.lease_s and not self._gate.has_waited():
            self._ledger.warn(f"the coordinator stood still for {stalled_s:.1f} s; nobody counts as silent for that time")

    def cannot_save(self) -> None:
        self._end(JobFailed(WorkerFailed("asked to stop while workers were missing: the run ends without another checkpoint")))

    def waiting(self, reason: str) -> None:
        self._ledger.warn(f"training waits: {reason}")
        self._output.notify(WaitingForWorkers(reason))

    def epoch_started(self, assignment: PlanAssignment, start: NewEpoch) -> Reporters:
        if start.epoch == 1:
            self._output.notify(FirstEpochFormed())
        for place, number in start.places.items():
            member = self._coordinator.members[number]
            self._ledger.processes.place(place, member.host, member.pid)
        was_refused = self._ledger.checkpoints.allow_again(start.iteration)
        survivors = {number for place, number in start.places.items() if place not in start.sources}
        self._ledger.start_epoch(assignment.plan, start.iteration, members_at(start.places), survivors)
        if start.checkpoint >= 0 or was_refused:  # what was written of a refused checkpoint does not count
            self._output.go_back(start.checkpoint if start.checkpoint >= 0 else start.iteration - 1, start.epoch)
        self._output.keep_plan(start.iteration, lambda: assignment.texts().plan)
        self._finished, self._only_saves = {}, start.only_saves
        self._speeds.start_epoch(assignment.plan, start.iteration, start.places)
        self._server.call_soon(self._act_on_findings)  # and not now, in the middle of a decision
        return self._ledger.late_reporters()

    def recovery_finished(self, recovery: Recovery) -> None:
        for place in recovery.joined:
            self._ledger.membership_changed(place, True, recovery.num_live)
        self._ledger.add_recovery(event := recovered_event(recovery, self._ledger), recovery.at_boundary)
        self._speeds.recovered(event)

    # Plans and reports.

    def _plan_made(self, failed: frozenset[Worker], outcome: PlanOutcome) -> None:
        """Called in the thread that made the plan."""
        if isinstance(outcome, UserError):
            self._server.call_soon(partial(self._end, JobFailed(outcome)))
        else:
            self._server.call_soon(lambda: self._coordinator.plan_received(failed, self._speeds.exchanged(outcome)))

    def _act_on_findings(self) -> None:
        """Act on what the ledger has found in reports: peers that differ, or losses that are no numbers."""
        found, self._found = self._found, []
        for act in found:
            act()

    def _receive_report(self, member: Member, message: Report) -> None:
        report = self._inbox.accept(member.number, message, member.clock_offset_us, self._coordinator.origin)
        self._act_on_findings()
        match report:
            case IterationApplied():
                self._coordinator.longest_op_s = max(self._coordinator.longest_op_s, report.ran.longest_us / 1e6)
                kill_coordinator(self._config.injections, self._ledger.num_steps)
                self._speeds.add(member.number, report)
            case WorkerFinished() if report.epoch == self._coordinator.epoch:  # else a recovery has redone the last step
                self._finished[report.worker] = report
                if len(self._finished) == len(self._coordinator.members.placed):
                    self._ledger.all_finished(None if self._only_saves else self._config.num_steps)
                self._coordinator.member_finished(member)
                if self._coordinator.phase is CoordinatorPhase.DONE:  # not while a recovery redoes the last step
                    self._finish()
            case WorkerCrashed():
                self._worker_crashed(member, report)

    def _save(self, report: StageSaved | StageNotSaved) -> None:
        self._output.add_report(report, self._checkpoint_decided)

    def _checkpoint_decided(self, decided: Sequence[CheckpointComplete | CheckpointIncomplete]) -> None:
        self._ledger.checkpoints.decide(decided)
        if decided:
            self._inbox.acknowledge_recorded()

    def _peers_differ(self, found: PeersDisagree) -> None:
        """Replace the peers that differ from a majority; without one, nobody knows who is right, and the job ends."""
        if self._is_over:
            return
        if not found.odd or self._config.source is None:
            self._end(JobFailed(PeersDiffer(f"{found}: memory or a device is faulty; resume from a checkpoint")))
            return
        self._ledger.warn(str(found))
        self._coordinator.give_up_corrupt(found.odd, f"its weights after step {found.num_steps} are not those of its peers")
        for place in found.odd:
            self._output.notify(ReplaceWorker(place))

    def _send_ack(self, number: int, message: Ack) -> None:
        member = self._coordinator.members.get(number)
        if member is not None and member.connection is not None:
            self._server.send(member.connection, message)

    def _worker_crashed(self, member: Member, report: WorkerCrashed) -> None:
        """Remove a worker that failed by itself, or end the job: for a user's error, or a second crash at the same iteration."""
        iteration = self._ledger.num_steps
        if report.problem is not None or self._config.source is None or iteration in self._crashed_at:
            self._end(JobFailed(report.problem or WorkerFailed(f"{report.worker} cannot go on:\n{report.text}")))
            return
        self._crashed_at.add(iteration)
        self._coordinator.remove(member.number, f"it failed: {report.text.strip().splitlines()[-1]}")

    # The end, and the record.

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._output.when_written(self._summarize)  # the outcome of the last checkpoint belongs to the summary

    def _summarize(self) -> None:
        num_steps = self._ledger.num_steps if self._is_ending else self._config.num_steps
        saved_steps = self._ledger.checkpoints.newest if self._run is not None else None
        trained = replace(self._ledger.summary(num_steps, self._finished), saved_steps=saved_steps)

        def done(problem: str | None) -> None:
            if problem is not None:
                self._ledger.warn(problem)
            self._end(JobDone(replace(trained, warnings=self._ledger.warnings)))

        self._output.write_summary(trained, done)

    def _end(self, notice: Notice) -> None:
        """End the job; the launcher hears of it when everything is on disk, because it ends this process then."""
        self._is_over = True
        self._coordinator.end("the job is over")

        def written() -> None:
            self._acks.send_due()
            self._output.notify(notice, self._server.stop)

        self._output.when_written(written)

    def _step_down(self, problem: LeadershipLost) -> None:
        """End this process, and not the job: another coordinator leads, to which all workers go when they are disconnected."""
        self._is_over = True
        self._output.notify(JobFailed(problem, is_over=False), self._server.stop)
