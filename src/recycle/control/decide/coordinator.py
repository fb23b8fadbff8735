"""The coordinator's decisions: which members take part, and when which epoch starts, pauses or stops.

An epoch runs until a member is lost or a new one joins. Then all members stop and report their progress, a plan for the live
members is requested, and the next epoch starts at an iteration that all can resume. A change of membership in between makes the
coordinator request another plan. `Coordinator` has no socket, process or clock: it acts through `CoordinatorEffects`.
"""

from collections.abc import Sequence
from dataclasses import replace

from recycle.control.decide.agreement import Resume
from recycle.control.decide.deadlines import CHECKPOINT_S, PLAN_S, late_members, suspected_members, unreachable_members
from recycle.control.decide.effects import CoordinatorEffects
from recycle.control.decide.epoch_store import EpochStore
from recycle.control.decide.failure_detection import StallWatch
from recycle.control.decide.journal import Journal, JournalEntry
from recycle.control.decide.leaving import JOINS, dismiss, farewell, release_leaving
from recycle.control.decide.members import LEAVES, Member, MemberTable, Recovery
from recycle.control.decide.messages import (
    ALIVE,
    ControlMessage,
    EpochBegun,
    EpochStopped,
    JobEnded,
    Leaving,
    PauseAtBoundary,
    Ready,
    RenewLease,
    StopEpoch,
    StoreEntry,
    StoreRequest,
)
from recycle.control.decide.new_epoch import NewEpoch, default_ops_every, journal_entry
from recycle.control.decide.phases import CoordinatorPhase, PhaseTrigger, next_phase
from recycle.control.decide.place_assignment import keep_holders, place_refusal, state_sources
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan_source import PlanAssignment


class Coordinator:
    """Decides for one job of a shape; `initial` is the plan of the first epoch, with its places."""

    def __init__(
        self,
        shape: Shape,
        initial: PlanAssignment,
        iteration: int,
        effects: CoordinatorEffects,
        journal: Journal,
        lease_s: float,
        checkpoint: int = -1,
        ops_every: int = 0,
    ) -> None:
        self._shape, self._initial, self._effects, self._journal, self.lease_s = shape, initial, effects, journal, lease_s
        self._iteration, self._checkpoint, self._ops_every = iteration, checkpoint, ops_every
        self.phase, self.epoch, self.origin = CoordinatorPhase.FORMING, 0, 1
        self.members, self.longest_op_s = MemberTable(), 0.0
        self._phase_since_s = self._now_s()
        self._stalls = StallWatch(self._phase_since_s, lease_s)
        self._recovery: Recovery | None = None
        self._awaits_checkpoint: PlanAssignment | None = None
        self._must_go_back = self._is_ending = self._saves_next = self._only_saves = False
        self._store, self._requested = EpochStore(0, effects.send), frozenset[Worker]()
        if (entry := journal.last()) is not None:
            self._restore(entry)

    def _restore(self, entry: JournalEntry) -> None:
        """Replace the coordinator that wrote this entry; its members have a lease to reconnect, and one to find this machine."""
        self._enter(PhaseTrigger.JOURNAL_FOUND)
        self.epoch, self.origin = entry.epoch, entry.origin
        self.members, self._only_saves = MemberTable.of(entry, self._now_s() + self._journal.lease_s), entry.only_saves
        self._store = EpochStore(len(self.members), self._effects.send)

    def _enter(self, trigger: PhaseTrigger) -> None:
        self.phase, self._phase_since_s = next_phase(self.phase, trigger), self._now_s()

    # Membership.

    def join(self, connection: int, host: str, pid: int, preferred_place: Worker | None) -> Member:
        """Add a new member; it gets a place when the next epoch starts. If no place is free, it stays as a spare."""
        return self.members.join(connection, host, pid, preferred_place, self._now_s())

    def rejoin(self, number: int, connection: int, host: str, pid: int) -> Member | None:
        """Return the member that reconnects, or None if this process is no member any more."""
        if (member := self.members.get(number)) is None or (member.pid and (host, pid) != (member.host, member.pid)):
            return None
        if member.connection is not None:  # it has given up a connection that this coordinator still takes for open
            self._effects.disconnect(member.connection)
        member.connection, member.host, member.pid, member.last_seen_s = connection, host, pid, self._now_s()
        return member

    def refusal(self, preferred: Worker | None) -> str | None:
        """Return why a worker with this preferred place cannot join, None if it can."""
        if self.phase is CoordinatorPhase.DONE:
            return "the job is done"
        members = self.members.values() if self.phase is CoordinatorPhase.FORMING else ()
        return place_refusal(self._shape, preferred, [member.preferred_place for member in members])

    def update_membership(self) -> None:
        """Act on members that wait for a place or want to leave: start the first epoch, or pause the present one."""
        match self.phase:
            case CoordinatorPhase.FORMING:
                dismiss(self.members.leaving, self._effects, None)
                self._form()
            case CoordinatorPhase.RUNNING if self._may_pause:
                self._pause_for_changes()
            case CoordinatorPhase.WAITING:
                dismiss(self.members.leaving, self._effects, self._recovery)
                self._request_plan(PhaseTrigger.MEMBERS_CHANGED)

    def _pause_for_changes(self) -> None:
        leaving, new_places = self.members.leaving, self.members.new_places(self._shape)
        if leaving or new_places:
            for member, place in new_places:
                self._effects.member_joining(member, place)
            left = (leaving[0].leaves_because, PhaseTrigger.MEMBER_LEAVES) if leaving else None
            self._pause(*(left or (JOINS, PhaseTrigger.MEMBER_JOINED)))

    def _pause(self, cause: str, trigger: PhaseTrigger) -> None:
        now_us = self._effects.now_us()
        self._recovery = Recovery(now_us, cause, at_boundary=True, noticed_us=now_us)
        self._enter(trigger)
        self._send_to_placed(PauseAtBoundary(self.epoch))

    @property
    def _may_pause(self) -> bool:
        """Whether all may be asked to pause: not during a recovery, before all have begun the epoch and it is reported."""
        is_ending = self._is_ending or self._only_saves
        return self.phase is CoordinatorPhase.RUNNING and not is_ending and self._recovery is None

    def change_plan(self, cause: str) -> bool:
        """Let all pause at an iteration boundary, and go on with the plan that is answered then; return whether they can now."""
        if may := self._may_pause:
            self._pause(cause, PhaseTrigger.PLAN_CHANGES)
        return may

    def resume_member(self, member: Member, epoch: int) -> None:
        """Continue with a member that reconnected in `epoch`: it may have missed messages."""
        assert member.connection is not None
        if member.has_left:
            self._effects.send(member.connection, farewell(member))
        if member.place is None:
            return
        if self.phase in (CoordinatorPhase.RUNNING, CoordinatorPhase.PAUSING) and epoch != self.epoch:
            self._stop_epoch(f"{member.place} missed the beginning of an epoch")
        elif self.phase is CoordinatorPhase.STOPPING:
            self._effects.send(member.connection, StopEpoch(self.epoch))
        elif self.phase is CoordinatorPhase.PAUSING:
            self._effects.send(member.connection, PauseAtBoundary(self.epoch))

    def connection_lost(self, member: Member) -> None:
        """Take a member for dead, unless this coordinator stood still: then the member may have given up, and reconnects."""
        member.connection = None
        if self._now_s() < self._stalls.patient_until_s:
            member.last_seen_s = self._now_s()
            return
        if not member.has_left:
            self._effects.fence(member)
        self.remove(member.number, "its connection closed")

    def give_up_corrupt(self, places: Sequence[Worker], reason: str) -> None:
        """Remove members whose state is wrong; their gradients are in that of the others, so all go back to a checkpoint."""
        self._must_go_back = True
        for member in [member for member in self.members.placed if member.place in places]:
            self._give_up(member, reason)

    def remove(self, number: int, reason: str, since_s: float = 0.0) -> None:
        """Remove a member that is dead, or that is treated as dead, since `since_s` if that is known."""
        if (member := self.members.pop(number, None)) is None:
            return
        if member.connection is not None:
            self._effects.disconnect(member.connection, f"it was taken for dead: {reason}")
        if member.place is None:
            return
        died_us = self._effects.member_left(member, reason) or round(since_s * 1e6)
        match self.phase:
            case CoordinatorPhase.RUNNING | CoordinatorPhase.PAUSING:
                self._stop_epoch(reason, died_us)
            case CoordinatorPhase.PLANNING | CoordinatorPhase.WAITING:
                self._request_plan(PhaseTrigger.MEMBERS_CHANGED)
            case CoordinatorPhase.STOPPING:
                self._plan_if_stopped()
        if self._recovery is not None:
            self._recovery.add_loss(str(member.place), reason, died_us)

    def tick(self) -> None:
        """Remove the members that have been silent, or busy with one op, for too long.

        The time in which this coordinator stood still does not count as silence: their messages wait to be read.
        """
        now_s = self._now_s()
        if (stalled_s := self._stalls.tick(now_s)) and self.members:
            self._phase_since_s += stalled_s
            self.members.discount(stalled_s, now_s)
            self._effects.stalled(stalled_s)
        is_running, members = self._effects.is_process_running, list(self.members.values())
        for member, reason, since_s in suspected_members(now_s, members, self.lease_s, self.longest_op_s, is_running):
            self._give_up(member, reason, since_s)
        in_phase_s = now_s - self._phase_since_s
        for member, reason, late_s in late_members(self.phase, in_phase_s, self.members.placed, self.lease_s, self.longest_op_s):
            self._give_up(member, reason, now_s - late_s)
        awaited, limit_s = ("plan", PLAN_S) if self._awaits_checkpoint is None else ("checkpoint", CHECKPOINT_S)
        if self.phase is CoordinatorPhase.PLANNING and in_phase_s > limit_s:
            self._effects.planning_failed(f"no {awaited} has come for {in_phase_s:.0f} s")

    def _give_up(self, member: Member, reason: str, since_s: float = 0.0) -> None:
        """Remove a member that lives; `since_s` is its last sign of progress, if that is known."""
        self._effects.member_suspected(member, reason)
        self._effects.fence(member)
        self.remove(member.number, reason, since_s)

    # Messages of members.

    def receive(self, member: Member, message: ControlMessage) -> None:
        """Act on a message; a message of a former epoch only renews the lease."""
        member.last_seen_s = self._now_s()
        match message:
            case RenewLease():
                member.renew(message)
                if member.connection is not None:
                    self._effects.send(member.connection, ALIVE)
            case EpochStopped(epoch=epoch) if epoch == self.epoch:
                self._member_stopped(member, message)
            case StoreEntry(epoch=epoch) | StoreRequest(epoch=epoch) if epoch == self.epoch:
                self._store.take(member.connection, message)
            case EpochBegun(epoch=epoch) if epoch == self.epoch:
                self._member_begun(member, message)
            case Ready():
                member.is_ready = True
                self.update_membership()
            case Leaving():
                member.is_leaving = True
                if member.place is None:
                    dismiss([member], self._effects, None)
                else:
                    self.update_membership()

    def member_finished(self, member: Member) -> None:
        """Note that a member has done all steps, or saved; the job ends when all have, unless they saved for those that leave."""
        member.has_finished = True
        if self.phase not in (CoordinatorPhase.RUNNING, CoordinatorPhase.PAUSING) or not self.members.have_finished:
            return
        if self._only_saves and not self._is_ending:
            self._stop_epoch(LEAVES, at_boundary=True)
            dismiss(self.members.leaving, self._effects, self._recovery)
            self._plan_if_stopped()
        else:
            self.end("the job is done")

    def end(self, reason: str) -> None:
        """End the job for all members, once."""
        if self.phase is not CoordinatorPhase.DONE:
            self._enter(PhaseTrigger.JOB_ENDED)
            self._effects.send_all([m.connection for m in self.members.values() if m.connection is not None], JobEnded(reason))

    def _member_stopped(self, member: Member, message: EpochStopped) -> None:
        if self.phase is CoordinatorPhase.RUNNING:
            self._stop_epoch(f"{member.place} lost its links: {message.reason}")
        member.stop(message, self.origin)
        for lost, reason in unreachable_members(member, message.unreachable, self.members):
            self._give_up(lost, reason)
        self._plan_if_stopped()

    def _member_begun(self, member: Member, message: EpochBegun) -> None:
        recovery = self._recovery
        if recovery is None or recovery.epoch != message.epoch:
            return
        recovery.add_begun(member.number, message.transfer_us, self._effects.now_us())
        if len(recovery.begun) >= recovery.num_live and len(recovery.begun) == len(self.members.placed):
            self._must_go_back = False
            self._report_recovery()
            if self._is_ending:
                self.stop_early()
            else:
                self.update_membership()

    def stop_early(self) -> None:
        """End the job with a checkpoint after the present iteration: the next epoch does nothing else."""
        self._is_ending = True
        match self.phase:
            case CoordinatorPhase.FORMING | CoordinatorPhase.WAITING:
                self._effects.cannot_save()
            case CoordinatorPhase.RUNNING if self._recovery is None and not self._only_saves:
                self._enter(PhaseTrigger.STOP_REQUESTED)
                self._send_to_placed(PauseAtBoundary(self.epoch))

    # From one epoch to the next.

    def _form(self) -> None:
        """Give members tentative places; start the first epoch when every row of its plan has a member."""
        if self.members.take_first_places(self._initial.places.keys()) and self._effects.is_ready():
            self._start_epoch(self._initial.with_texts(), Resume(self._iteration), self._checkpoint)

    def _stop_epoch(self, cause: str, died_us: int = 0, at_boundary: bool = False) -> None:
        """Stop all members, and begin a recovery or extend the one that has not ended."""
        last, now_us = self._recovery, self._effects.now_us()
        if last is not None and not last.at_boundary and not last.begun_us:
            self._recovery = replace(last, cause=cause, epoch=0, transfer_us=0, begun=set())
        else:
            self._report_recovery()
            self._recovery = Recovery(died_us or now_us, cause, at_boundary, noticed_us=now_us)
        self._enter(PhaseTrigger.EPOCH_BROKEN)
        self._send_to_placed(StopEpoch(self.epoch))
        self._effects.expect_request(self.members.empty_places(self._shape))
        self._plan_if_stopped()

    def _plan_if_stopped(self) -> None:
        is_stopping = self.phase in (CoordinatorPhase.STOPPING, CoordinatorPhase.PAUSING)
        if is_stopping and not self.members.has_unstopped:
            if self.phase is CoordinatorPhase.PAUSING and not self._is_ending:
                self._saves_next, self._recovery = release_leaving(self.members, self._shape, self._effects, self._recovery)
            if self._recovery is not None:
                self._recovery.stopped_us = self._effects.now_us()
            self._request_plan(PhaseTrigger.ALL_STOPPED)

    def _request_plan(self, trigger: PhaseTrigger) -> None:
        """Give new members a place, and request a plan for all members."""
        self._enter(trigger)
        self._awaits_checkpoint = None
        for member, place in self.members.new_places(self._shape):
            member.place, member.has_stopped = place, True
            if self._recovery is not None:
                self._recovery.joined.append(str(place))
        self._requested = self.members.empty_places(self._shape)
        self._effects.request_plan(self._requested)

    def plan_received(self, failed: frozenset[Worker], answer: PlanAssignment | str) -> None:
        """Start the next epoch with the plan for these dead workers; a sentence says why there is none."""
        if self.phase is not CoordinatorPhase.PLANNING or failed != self._requested:
            return  # the members have changed: the answer to another request is still to come
        if isinstance(answer, str):
            if self.members.new_places(self._shape):  # a member joined meanwhile, and may complete the stages
                self._request_plan(PhaseTrigger.MEMBERS_CHANGED)
                return
            self._enter(PhaseTrigger.NO_PLAN)
            dismiss(self.members.leaving, self._effects, self._recovery)
            self._effects.waiting(answer)
            if self._is_ending:
                self._effects.cannot_save()
            return
        if self._recovery is not None:
            self._recovery.planned_us = self._effects.now_us()
        assignment = keep_holders(answer.with_texts(), self.members.holders)
        resume = self.members.resume_with(assignment)
        if resume is not None and not self._must_go_back:
            self._start_epoch(assignment, resume, -1)
        else:
            self._awaits_checkpoint = assignment
            self._effects.find_checkpoint()

    def checkpoint_found(self, num_steps: int) -> None:
        """Start the epoch that waits for a checkpoint, from the one after `num_steps` steps; 0 is the initial state."""
        assignment, self._awaits_checkpoint = self._awaits_checkpoint, None
        if assignment is None:
            return  # the members have changed: it is looked for again if another plan needs it
        # Without a checkpoint, members that hold their state continue even after a wrong gradient: to begin again costs more.
        resume = self.members.resume_with(assignment) if num_steps == 0 else None
        if num_steps == 0:
            self._effects.no_checkpoint(begins_again=resume is None)
        self._start_epoch(assignment, resume or Resume(num_steps), -1 if resume is not None else num_steps)

    def _start_epoch(self, assignment: PlanAssignment, resume: Resume, checkpoint: int) -> None:
        """Move every member to its place of the assignment, and start the epoch."""
        copies_state = checkpoint < 0 and self.epoch > 0
        transfers = self.members.transfers_to(assignment) if copies_state else None
        sources = state_sources(assignment, self.members.holders, transfers) if copies_state else {}
        members = self.members.take_places(assignment)
        self.epoch += 1
        self.origin = self.origin if copies_state else self.epoch
        places = {str(place): member.number for place, member in members.items()}
        only_saves = self._is_ending or (self._saves_next and bool(self.members.leaving))
        self._only_saves, self._saves_next = only_saves, False
        texts, every = assignment.texts(), self._ops_every or default_ops_every(assignment.plan.num_ops)
        rest = only_saves, self.origin, every, self._journal.term, assignment.plan.problem.layer_counts, transfers
        start = NewEpoch(self.epoch, texts.packed, places, resume.iteration, resume.ballot, sources, checkpoint, *rest)
        cause = self._recovery.cause if self._recovery is not None else "all save" if only_saves else "the job began"
        reporters = self._effects.epoch_started(assignment, start)
        self._journal.append(journal_entry(start, members, f"{cause}; {assignment.reason}", self.members.last_number, reporters))
        if self._recovery is not None:
            self._recovery.set_epoch(self.epoch, resume.iteration, assignment, start.moved_layers)
        self._enter(PhaseTrigger.EPOCH_STARTED)
        self._store = EpochStore(len(members), self._effects.send)
        for place, message in start.messages(self._shape, texts.programs):
            if (connection := members[place].connection) is not None:
                self._effects.send(connection, message)
        if away := [place for place, member in members.items() if member.connection is None]:
            self._stop_epoch(f"{away[0]} is away")
        self.update_membership()

    def _report_recovery(self) -> None:
        """Hand over the facts of the last recovery, once."""
        if self._recovery is not None and self._recovery.epoch:
            self._effects.recovery_finished(self._recovery)
        self._recovery = None

    def _send_to_placed(self, message: ControlMessage) -> None:
        self._effects.send_all(self.members.connections, message)

    def _now_s(self) -> float:
        return self._effects.now_us() / 1e6
