"""The coordinator's process: it seats workers, keeps the books, and fetches plans. It holds no weights and computes nothing.

It tells its launcher every event as it happens, and at the end what the run came to. If it is killed, another one takes its
place: the journal says who was seated, the record what was done, and workers tell again what was not heard.
"""

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from recycle.control.decide.coordinator import Coordinator, CoordinatorPhase
from recycle.control.decide.journal import FileJournal
from recycle.control.decide.members import Member, Recovery
from recycle.control.decide.messages import (
    Ack,
    ControlMessage,
    DownloadFile,
    Hello,
    Refused,
    Report,
    StartEpoch,
    UploadFile,
    Welcome,
)
from recycle.control.decide.plan_prefetch import PlanPrefetch
from recycle.control.net import file_transfer as courier
from recycle.control.net.handshake import this_host
from recycle.control.net.server import ConnectionTask, Server
from recycle.control.net.wire import encode_frame
from recycle.core.cluster import Worker
from recycle.core.errors import UserError, WorkerFailed
from recycle.core.events.failure_script import RECOVERY
from recycle.core.events.record import Event, Joining, Recovered, Suspected
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment
from recycle.host.process_lifetime import end_with_parent, process_state
from recycle.runtime.checkpoint.files import is_to_be_read, is_to_be_written
from recycle.runtime.coordinator.config import (
    CoordinatorConfig,
    EventSink,
    EventsRecorded,
    FirstEpochFormed,
    JobDone,
    JobFailed,
    Notice,
    WaitingForWorkers,
    WorkerLost,
)
from recycle.runtime.coordinator.ledger.run_folder import RunFolder
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.coordinator.ledger.worker_reports import (
    IterationApplied,
    WorkerCrashed,
    WorkerFinished,
    WorkerReport,
    report_from_json,
)
from recycle.runtime.execute.executor import now_us
from recycle.runtime.worker.fault_injection import death_us

_MOST_WAIT_US = 5_000_000
# Runs, waits for something that can be interrupted, or for a disk.
_RUNNING = ("R", "S", "D")


def run_coordinator_process(
    brief: CoordinatorConfig, listener: socket.socket, mouth: EventSink, before: Sequence[Event] | None = None
) -> None:
    """Coordinate a job to its end, as a process of a launcher. It ends with its parent whatever happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    serve_job(brief, listener, mouth, before)


def serve_job(brief: CoordinatorConfig, listener: socket.socket, mouth: EventSink, before: Sequence[Event] | None = None) -> None:
    """Coordinate a job to its end. With `before`, take the place of one that was killed: what it has told of, unless on disk."""
    try:
        if brief.plot is None:
            _Hall(brief, listener, mouth, None, before).run()
        else:
            plot, is_again = brief.plot, before is not None
            with RunFolder(plot, brief.initial.plan, brief.fingerprint, brief.num_steps, is_again) as run:
                _Hall(brief, listener, mouth, run, run.before).run()
    except UserError as problem:
        mouth.send(JobFailed(problem))


def _is_of_a_checkpoint(message: ControlMessage) -> bool:
    match message:
        case UploadFile(name=name):
            return is_to_be_written(name)
        case DownloadFile(name=name):
            return is_to_be_read(name)
    return False


class _Hall:
    """What surrounds the coordinator: connections, books, plans. It is both the server's actor and the coordinator's world."""

    def __init__(
        self,
        brief: CoordinatorConfig,
        listener: socket.socket,
        mouth: EventSink,
        run: RunFolder | None,
        before: Sequence[Event] | None,
    ) -> None:
        self._brief, self._mouth, self._run, self._is_again = brief, mouth, run, before is not None
        known = run.losses if run is not None else ()
        checkpoints, gone_us = (run.checkpoints, run.gone_us) if run is not None else (None, 0)
        self._news: list[Event] | None = None
        if not self._is_again:  # what is there is of a run that was before
            brief.journal.unlink(missing_ok=True)
        journal = FileJournal(brief.journal)
        entry = journal.last()
        plan, begin_us = brief.initial.plan, brief.begin_us
        self._books = RunLedger(plan, brief.num_samples, brief.profiles, self._write, checkpoints, begin_us, gone_us, known)
        self._books.restore(before or ())
        if entry is not None:
            self._books.go_on(Plan.parse(entry.plan), entry.epoch, entry.iteration)
            self._keep_plan(entry.iteration, entry.plan)
        for warning in run.warnings if run is not None else ():
            self._books.warn(warning)
        self._shape = plan.problem.shape
        self._server = Server(listener, brief.token, self)
        self._numbers: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._told: dict[int, deque[tuple[int, WorkerReport]]] = {}
        self._heard: dict[int, int] = {}
        self._finished: dict[Worker, WorkerFinished] = {}
        self._failed_at: set[int] = set()
        self._checkpoint = run.resumed.num_steps if run is not None and run.resumed is not None else -1
        self._ahead = PlanPrefetch(brief.source) if brief.source is not None else None
        if self._ahead is not None:  # now, since workers take a while to come
            self._ahead.prepare(plan.problem.cluster.failed, self._shape)
        self._ready_us = 0
        self._questions: SimpleQueue[frozenset[Worker] | None] = SimpleQueue()
        iteration = max(0, self._checkpoint)
        self._coordinator = Coordinator(self._shape, brief.initial, iteration, self, journal, brief.lease_s, self._checkpoint)
        self._is_over = False

    def run(self) -> None:
        threading.Thread(target=self._plan, daemon=True).start()
        try:
            self._server.run()
        finally:
            self._questions.put(None)
            if self._ahead is not None:
                self._ahead.close()

    # What the server asks.

    def admit(self, caller: int, hello: Hello) -> Welcome | Refused:
        if hello.job not in ("", self._brief.job):
            return Refused(f"this is job {self._brief.job}, not {hello.job}")
        found = self._coordinator.come_back(hello.member, caller, hello.host, hello.pid) if hello.member >= 0 else None
        if found is not None:
            member = found
        elif hello.epoch >= 0:
            return Refused("it was taken for dead, and others do its work")
        else:  # new, or one that had no seat yet, and can as well begin anew
            try:
                wish = Worker.parse(hello.seat) if hello.seat else None
            except UserError as problem:
                return Refused(str(problem))
            if reason := self._coordinator.why_not(wish):
                return Refused(reason)
            member = self._coordinator.join(caller, hello.host, hello.pid, wish)
        member.clock_us = 0 if hello.host == this_host() else now_us() - hello.clock_us
        self._numbers[caller], self._epochs[caller] = member.number, hello.epoch
        return Welcome("", member.number, self._brief.lease_s, self._brief.job, dict(self._brief.about))

    def entered(self, caller: int) -> None:
        member, epoch = self._member(caller), self._epochs.pop(caller)
        if member is not None and member.seat is not None:
            self._coordinator.welcome_back(member, epoch)
        else:
            self._coordinator.seat_newcomers()

    def receive(self, caller: int, message: ControlMessage) -> None:
        member = self._member(caller)
        if member is None:
            return
        if isinstance(message, Report):
            member.heard_s = now_us() / 1e6
            self._hear(member, message)
        else:
            self._coordinator.hear(member, message)

    def errand(self, hello: Hello) -> ConnectionTask | Refused:
        if hello.errand != courier.ERRAND or self._run is None:
            return Refused(f"nobody runs the errand {hello.errand!r} here")
        if hello.job not in ("", self._brief.job):
            return Refused(f"this is job {self._brief.job}, not {hello.job}")
        return partial(courier.serve_transfer, folder=self._run.saving.folder, may_name=_is_of_a_checkpoint)

    def lost(self, caller: int) -> None:
        number = self._numbers.pop(caller, None)
        member = self._coordinator.members.get(number) if number is not None else None
        if member is not None and not self._is_over:
            member.caller = None
            self.fence(member)
            self._coordinator.lose(member.number, "its connection closed")

    def tick(self) -> None:
        if self._coordinator.phase is CoordinatorPhase.FORMING:
            self._coordinator.seat_newcomers()
        if not self._is_over:
            self._coordinator.tick()

    def _member(self, caller: int) -> Member | None:
        number = self._numbers.get(caller)
        return self._coordinator.members.get(number) if number is not None else None

    # What the coordinator brings about.

    def is_ready(self) -> bool:
        """Not before there is a plan for a first failure: until then the planner loads. But workers are not kept for long."""
        self._ready_us = self._ready_us or now_us() + _MOST_WAIT_US
        return self._ahead is None or self._ahead.has_answers or now_us() > self._ready_us

    def now_us(self) -> int:
        return now_us()

    def send(self, caller: int, message: ControlMessage) -> None:
        self._server.send(caller, message)

    def send_all(self, callers: Iterable[int], message: ControlMessage) -> None:
        encoded = encode_frame(message)
        for caller in callers:
            self._server.send_bytes(caller, encoded)

    def hang_up(self, caller: int) -> None:
        self._numbers.pop(caller, None)
        self._server.hang_up(caller)

    def is_running(self, member: Member) -> bool:
        return member.host == this_host() and process_state(member.pid) in _RUNNING

    def fence(self, member: Member) -> None:
        """Kill it if it is on this machine; elsewhere its epoch's end is the fence: nobody listens to it any more."""
        if member.host == this_host() and member.pid > 0:
            try:
                os.kill(member.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return

    def ask(self, failed: frozenset[Worker]) -> None:
        self._kill_itself(is_recovery=True)
        if self._ahead is not None:  # without, the death has ended the job
            self._questions.put(failed)

    def checkpoint(self) -> int:
        return self._run.newest() if self._run is not None else 0

    def left(self, member: Member, reason: str) -> int:
        self._told.pop(member.number, None)  # it tells no more, and a job may lose many
        self._heard.pop(member.number, None)
        num_live = sum(other.seat is not None for other in self._coordinator.members.values())
        self._books.changed(str(member.seat), False, num_live)
        if self._brief.source is None and not self._is_over:
            self._end(WorkerLost(member.pid, f"{member.seat} is gone: {reason}"))
        return death_us(self._brief.deaths, member.pid) if self._brief.deaths is not None else 0

    def suspected(self, member: Member, reason: str) -> None:
        self._write(Suspected(self._books.now_us(), str(member.seat or member.wish), reason))

    def joining(self, member: Member, seat: Worker) -> None:
        self._write(Joining(self._books.now_us(), str(seat)))

    def waiting(self, reason: str) -> None:
        self._books.warn(f"training waits: {reason}")
        self._mouth.send(WaitingForWorkers())

    def began(self, answer: PlanAssignment, go: StartEpoch, members: Iterable[Member]) -> None:
        if go.epoch == 1:
            self._mouth.send(FirstEpochFormed())
        takers = set(go.sources)
        stays = [now for seat, now in answer.places.items() if now.stage == seat.stage and str(seat) not in takers]
        self._books.began(answer.plan, go.iteration, stays)
        self._keep_plan(go.iteration, go.plan)
        self._finished.clear()
        if self._ahead is not None:
            self._ahead.prepare(answer.plan.problem.cluster.failed, self._shape)

    def recovered(self, recovery: Recovery) -> None:
        books, end_us = self._books, recovery.begun_us or now_us()
        # Whoever asks to join lets the others train until the next boundary: nothing is lost before that.
        at_us = recovery.stopped_us if recovery.joins else recovery.at_us
        start_us = recovery.stopped_us if recovery.joins else recovery.noticed_us
        gone_us = end_us - recovery.planned_us
        transfer_us = min(recovery.transfer_us, max(0, gone_us))
        for name in recovery.joined:
            books.changed(name, True, recovery.num_live)
        books.recovered(
            Recovered(
                at_us=books.at_us(at_us),
                end_us=books.at_us(end_us),
                epoch=recovery.epoch,
                workers=tuple(recovery.joined if recovery.joins else recovery.left),
                joins=recovery.joins,
                cause=recovery.cause,
                iteration=recovery.iteration,
                detect_us=max(0, start_us - at_us),
                abort_us=max(0, recovery.stopped_us - start_us),
                plan_us=max(0, recovery.planned_us - recovery.stopped_us),
                regroup_us=max(0, gone_us - transfer_us),
                transfer_us=transfer_us,
                moves=recovery.moves,
                num_live=recovery.num_live,
            )
        )

    # Plans, in a thread of their own: a plan may take its time, and connections do not wait.

    def _plan(self) -> None:
        while (failed := self._questions.get()) is not None:
            self._server.call(self._answered(failed))

    def _answered(self, failed: frozenset[Worker]) -> Callable[[], None]:
        """What is to be done with the answer to a question."""
        assert self._ahead is not None
        try:
            answer: PlanAssignment | str = self._ahead.answer(failed)
        except NoWorkerLeft as problem:
            answer = str(problem)
        except UserError as problem:
            return partial(self._end, JobFailed(problem))
        except CancelledError:  # the job is over
            return lambda: None
        return partial(self._coordinator.answered, failed, answer)

    # The books.

    def _hear(self, member: Member, tell: Report) -> None:
        told = report_from_json(tell.body, member.clock_us)
        if tell.number <= self._heard.get(member.number, 0):
            return  # told again, because it was away when it was heard
        self._heard[member.number] = tell.number
        before = self._books.num_steps
        self._news = []
        self._books.hear(told)
        news, self._news = self._news, None
        if news:
            self._announce(news)  # at once, because one word may close a page of some hundred events
        self._told.setdefault(member.number, deque()).append((tell.number, told))
        for number in list(self._told) if self._books.num_steps != before else [member.number]:
            self._acknowledge(number)
        match told:
            case IterationApplied():
                longest_us = max((span.end_us - span.start_us for span in told.spans if span.is_op), default=0)
                self._coordinator.longest_op_s = max(self._coordinator.longest_op_s, longest_us / 1e6)
                self._kill_itself()
            case WorkerFinished():
                self._finished[told.worker] = told
                self._coordinator.finished(member)
                if all(other.has_finished for other in self._coordinator.members.values() if other.seat is not None):
                    self._finish()
            case WorkerCrashed():
                self._mourn(member, told)

    def _acknowledge(self, number: int) -> None:
        """Tell a member what is in the record for good."""
        waiting, last = self._told[number], 0
        while waiting and not self._books.is_open(waiting[0][1]):
            last, _ = waiting.popleft()
        member = self._coordinator.members.get(number)
        if last and member is not None and member.caller is not None:
            self._server.send(member.caller, Ack(last))

    def _mourn(self, member: Member, told: WorkerCrashed) -> None:
        """A worker failed by itself. If that would happen to any other, too, the job ends with its last words."""
        iteration = self._books.num_steps
        if told.problem is not None:
            self._end(JobFailed(told.problem))
        elif self._brief.source is None or iteration in self._failed_at:
            self._end(JobFailed(WorkerFailed(f"{told.worker} cannot go on:\n{told.text}")))
        else:
            self._failed_at.add(iteration)
            self._coordinator.lose(member.number, f"it failed: {told.text.strip().splitlines()[-1]}")

    def _kill_itself(self, is_recovery: bool = False) -> None:
        """Do what a test's script says; the launcher gives the next coordinator what is left of it."""
        for injection in self._brief.injections:
            if injection.iteration <= self._books.num_steps and (injection.at == RECOVERY) == is_recovery:
                os.kill(os.getpid(), signal.SIGKILL)

    def _finish(self) -> None:
        if self._is_over:
            return
        trained = self._books.trained(self._brief.num_steps, self._finished)
        if self._run is not None and (problem := self._run.close(trained)):
            self._books.warn(problem)
            trained = replace(trained, warnings=(*trained.warnings, problem))
        self._end(JobDone(trained))

    def _end(self, said: Notice) -> None:
        self._is_over = True
        self._coordinator.end("the job is over")
        self._mouth.send(said)
        self._server.stop()

    def _keep_plan(self, iteration: int, text: str) -> None:
        if self._run is not None and (problem := self._run.keep_plan(iteration, text)):
            self._books.warn(problem)

    def _write(self, event: Event) -> None:
        if self._news is not None:
            self._news.append(event)
        else:
            self._announce([event])

    def _announce(self, events: Sequence[Event]) -> None:
        problem = self._run.write(*events) if self._run is not None else None
        self._mouth.send(EventsRecorded(events))
        if problem is not None:
            self._books.warn(problem)
