"""The coordinator: it knows who is there, and decides what happens next. It computes nothing and carries no tensor.

An epoch runs until somebody is lost or asks to join. Then all are stopped, survivors say where they stand, a plan for those who
are there is fetched, and a new epoch begins where all can go on. Whatever happens in between only changes who is there: the next
answer counts. It knows neither sockets nor processes: those are its `CoordinatorEffects`.
"""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from itertools import cycle

from recycle.control.decide.agreement import NoAgreement, Resume, agree
from recycle.control.decide.journal import Journal, JournalEntry
from recycle.control.decide.members import CoordinatorEffects, Member, Recovery
from recycle.control.decide.membership import Liveness, MemberFacts, judge_liveness
from recycle.control.decide.messages import (
    ControlMessage,
    EpochBegun,
    EpochStopped,
    JobEnded,
    PauseAtBoundary,
    RenewLease,
    StartEpoch,
    StopEpoch,
    StoreEntry,
)
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan_source import PlanAssignment


class CoordinatorPhase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    PAUSING = "pausing"
    STOPPING = "stopping"
    PLANNING = "planning"
    WAITING = "waiting"
    DONE = "done"


class Coordinator:
    """Decides for one job of a shape; `initial` is the answer that the first epoch plays."""

    def __init__(
        self,
        shape: Shape,
        initial: PlanAssignment,
        iteration: int,
        world: CoordinatorEffects,
        journal: Journal,
        lease_s: float,
        checkpoint: int = -1,
    ) -> None:
        self._shape, self._initial, self._world, self._journal, self.lease_s = shape, initial, world, journal, lease_s
        self._iteration, self._checkpoint = iteration, checkpoint
        self.phase, self.epoch = CoordinatorPhase.FORMING, 0
        self.members: dict[int, Member] = {}
        self.longest_op_s = 0.0
        self._next_member = 0
        self._recovery: Recovery | None = None
        self._asked: frozenset[Worker] = frozenset()
        self._shares: dict[str, StoreEntry] = {}
        if (entry := journal.last()) is not None:
            self._take_over(entry)

    def _take_over(self, entry: JournalEntry) -> None:
        """Be the coordinator that wrote this: its members are given a lease's time to come back."""
        self.phase, self.epoch, self._next_member = CoordinatorPhase.RUNNING, entry.epoch, entry.next_member
        for seat, number in entry.seats.items():
            host, pid = entry.processes.get(seat, ("", 0))
            made = Member(number, None, host, pid, None, self._now_s(), seat=Worker.parse(seat), has_state=True)
            self.members[number] = made

    # Who comes and goes.

    def join(self, caller: int, host: str, pid: int, wish: Worker | None) -> Member:
        """A new member; it has a seat when the next epoch begins."""
        self._next_member += 1
        member = Member(self._next_member, caller, host, pid, wish, self._now_s())
        self.members[member.number] = member
        return member

    def come_back(self, number: int, caller: int, host: str, pid: int) -> Member | None:
        """A member whose connection had closed, or None if it is none any more."""
        member = self.members.get(number)
        if member is None or member.caller is not None or (member.pid and (host, pid) != (member.host, member.pid)):
            return None
        member.caller, member.host, member.pid, member.heard_s = caller, host, pid, self._now_s()
        return member

    def why_not(self, wish: Worker | None) -> str | None:
        """Why somebody who wants this seat cannot join, if so."""
        if wish is not None and not (wish.pipeline < self._shape.num_pipelines and wish.stage < self._shape.num_stages):
            return f"{wish} is no place in this job of {self._shape.num_pipelines} pipelines of {self._shape.num_stages} stages"
        if self.phase is CoordinatorPhase.DONE:
            return "the job is done"
        if wish is not None and wish in {member.wish for member in self.members.values()}:
            return f"{wish} is taken: another worker has come for it"
        if len(self.members) >= self._shape.num_workers:
            return f"all {self._shape.num_workers} places are taken"
        return None

    def seat_newcomers(self) -> None:
        """Act on those who have joined: begin, or pause to let them in."""
        match self.phase:
            case CoordinatorPhase.FORMING:
                self._form()
            case CoordinatorPhase.RUNNING if (
                self._recovery is None
            ):  # else when all have begun, and the last change is accounted for
                newcomers = [member for member in self.members.values() if member.seat is None]
                for member, seat in self._seats_for(newcomers):
                    self._world.joining(member, seat)
                self._recovery = Recovery(self._world.now_us(), "it asked to join", joins=True)
                self._recovery.noticed_us = self._recovery.at_us
                self.phase = CoordinatorPhase.PAUSING
                self._to_seated(PauseAtBoundary(self.epoch))
            case CoordinatorPhase.WAITING:
                self._plan_on()
            case _:
                pass

    def welcome_back(self, member: Member, epoch: int) -> None:
        """Go on with a member that was away: it may have missed what was said."""
        assert member.caller is not None
        if member.seat is None:
            return
        if self.phase is CoordinatorPhase.RUNNING and epoch != self.epoch:
            self._begin_recovery(f"{member.seat} missed the beginning of an epoch")
        elif self.phase is CoordinatorPhase.STOPPING:
            self._world.send(member.caller, StopEpoch(self.epoch))
        elif self.phase in (CoordinatorPhase.RUNNING, CoordinatorPhase.PAUSING):
            for share in self._shares.values():
                self._world.send(member.caller, share)
            if self.phase is CoordinatorPhase.PAUSING:
                self._world.send(member.caller, PauseAtBoundary(self.epoch))

    def lose(self, number: int, reason: str) -> None:
        """A member is dead, or as good as."""
        member = self.members.pop(number, None)
        if member is None:
            return
        if member.caller is not None:
            self._world.hang_up(member.caller)
        if member.seat is None:
            return
        went_us = self._world.left(member, reason)
        match self.phase:
            case CoordinatorPhase.RUNNING | CoordinatorPhase.PAUSING:
                self._begin_recovery(reason, went_us)
            case CoordinatorPhase.PLANNING | CoordinatorPhase.WAITING:
                self._plan_on()
            case CoordinatorPhase.STOPPING:
                self._go_on_if_stopped()
            case _:
                pass
        if self._recovery is not None:
            name = str(member.seat)
            self._recovery.at_us = min(self._recovery.at_us, went_us or self._recovery.at_us)
            self._recovery.left.append(name)
            self._recovery.joined = [joined for joined in self._recovery.joined if joined != name]
            self._recovery.joins = False
            self._recovery.cause = reason

    def tick(self) -> None:
        """Look at the clock: who has been silent, or behind, for too long."""
        now_s = self._now_s()
        for member in list(self.members.values()):
            is_running = now_s - member.heard_s > self.lease_s and self._world.is_running(member)
            facts = MemberFacts(member.heard_s, member.caller is not None, member.busy_s, is_running)
            # A closed connection is told of at once; one that is not there yet is that of a member to be found again.
            verdict = judge_liveness(now_s, facts, self.lease_s, self.longest_op_s, is_away=True)
            if verdict.state is Liveness.SUSPECT:
                self._world.suspected(member, verdict.reason)
                self._world.fence(member)
                self.lose(member.number, verdict.reason)

    # What members say.

    def hear(self, member: Member, message: ControlMessage) -> None:
        member.heard_s = self._now_s()
        match message:
            case RenewLease(busy_us=busy_us):
                member.busy_s = busy_us / 1e6
            case EpochStopped(epoch=epoch) if epoch == self.epoch:
                self._stopped(member, message)
            case StoreEntry(epoch=epoch) if epoch == self.epoch:
                self._shares[message.key] = message
                self._to_seated(message)
            case EpochBegun(epoch=epoch) if epoch == self.epoch:
                self._begun(message)
            case _:
                pass

    def finished(self, member: Member) -> None:
        """A member has done all steps; when all have, the job is done."""
        member.has_finished = True
        seated = self._seated()
        if (
            self.phase in (CoordinatorPhase.RUNNING, CoordinatorPhase.PAUSING)
            and seated
            and all(other.has_finished for other in seated)
        ):
            self.end("the job is done")

    def end(self, reason: str) -> None:
        self.phase = CoordinatorPhase.DONE
        self._world.send_all([m.caller for m in self.members.values() if m.caller is not None], JobEnded(reason))

    def _stopped(self, member: Member, message: EpochStopped) -> None:
        if self.phase is CoordinatorPhase.RUNNING:
            self._begin_recovery(f"{member.seat} lost its links: {message.reason}")
        is_there = member.seat is not None and message.stage in (-1, member.seat.stage)
        member.standing, member.has_stopped = message.standing if is_there else None, True
        member.has_state = member.standing is not None
        member.busy_s = 0.0
        self._go_on_if_stopped()

    def _begun(self, message: EpochBegun) -> None:
        recovery = self._recovery
        if recovery is None or recovery.epoch != message.epoch:
            return
        recovery.begun_us = recovery.begun_us or self._world.now_us()
        recovery.transfer_us = max(recovery.transfer_us, message.transfer_us)
        recovery.num_begun += 1
        if recovery.num_begun == len(self._seated()):
            self._tell_recovery()
            if any(member.seat is None for member in self.members.values()):
                self.seat_newcomers()

    # From one epoch to the next.

    def _form(self) -> None:
        """Begin when every row of the first plan has its worker; until then, who wants a row gets it from who does not."""
        rows = sorted(self._initial.places)
        for member in self.members.values():
            member.seat = member.wish if member.wish in rows else None
        free = [row for row in rows if row not in {member.seat for member in self.members.values()}]
        for member in self.members.values():
            if member.seat is None and free:
                member.seat = free.pop(0)
        if not free and self._world.is_ready():
            self._go(self._initial, Resume(self._iteration), self._checkpoint)

    def _begin_recovery(self, cause: str, went_us: int = 0) -> None:
        """Stop everybody."""
        now_us = self._world.now_us()
        last = self._recovery
        if last is not None and not last.joins and not last.begun_us:
            # The one before was not over: both are one, which began with the first.
            self._recovery = replace(last, cause=cause, epoch=0, transfer_us=0, num_begun=0)
        else:
            self._tell_recovery()
            self._recovery = Recovery(went_us or now_us, cause, joins=False, noticed_us=now_us)
        self.phase = CoordinatorPhase.STOPPING
        self._to_seated(StopEpoch(self.epoch))
        self._go_on_if_stopped()

    def _go_on_if_stopped(self) -> None:
        if self.phase in (CoordinatorPhase.STOPPING, CoordinatorPhase.PAUSING) and all(
            member.has_stopped for member in self._seated()
        ):
            if self._recovery is not None:
                self._recovery.stopped_us = self._world.now_us()
            self._plan_on()

    def _plan_on(self) -> None:
        """Fetch a plan for who is there now."""
        self.phase = CoordinatorPhase.PLANNING
        newcomers = [member for member in self.members.values() if member.seat is None]
        for member, seat in self._seats_for(newcomers):
            member.seat = seat
            member.has_stopped = True
            if self._recovery is not None:
                self._recovery.joined.append(str(seat))
        taken = {member.seat for member in self.members.values()}
        self._asked = frozenset(seat for seat in self._shape.workers() if seat not in taken)
        self._world.ask(self._asked)

    def _seats_for(self, newcomers: Iterable[Member]) -> list[tuple[Member, Worker]]:
        """A free seat for each: the one it wants, else one of the stage that has the fewest."""
        taken = {member.seat for member in self.members.values() if member.seat is not None}
        found = []
        for member in newcomers:
            free = [seat for seat in self._shape.workers() if seat not in taken]
            if not free:
                break
            fewest = {stage: sum(seat.stage == stage for seat in taken if seat) for stage in range(self._shape.num_stages)}
            seat = member.wish if member.wish in free else min(free, key=lambda seat: (fewest[seat.stage], seat))
            assert seat is not None
            taken.add(seat)
            found.append((member, seat))
        return found

    def answered(self, failed: frozenset[Worker], answer: PlanAssignment | str) -> None:
        """A plan has come, or a sentence why there is none."""
        if self.phase is not CoordinatorPhase.PLANNING or failed != self._asked:
            return  # somebody came or went meanwhile, and another answer is on its way
        if isinstance(answer, str):
            if any(member.seat is None for member in self.members.values()):
                self._plan_on()  # somebody came meanwhile, and may be who was missing
                return
            self.phase = CoordinatorPhase.WAITING
            self._world.waiting(answer)
            return
        if self._recovery is not None:
            self._recovery.planned_us = self._world.now_us()
        standings = [member.standing for member in self.members.values() if member.standing is not None]
        answer = self._keeping_holders(answer)
        sitters = {member.seat: member for member in self.members.values()}
        held = {seat.stage for seat, now in answer.places.items() if sitters[now].has_state and now.stage == seat.stage}
        resume, checkpoint = Resume(0), -1
        if held == set(range(self._shape.num_stages)):
            try:
                resume = agree(standings)
            except NoAgreement:
                checkpoint = self._world.checkpoint()
        else:
            checkpoint = self._world.checkpoint()
        if checkpoint >= 0:
            resume = Resume(checkpoint)
        self._go(answer, resume, checkpoint)

    def _keeping_holders(self, answer: PlanAssignment) -> PlanAssignment:
        """The same answer, but in no stage does everybody who holds its state move away: a newcomer moves instead."""
        sitters = {member.seat: member for member in self.members.values()}
        seats = dict(answer.places)
        for stage in range(self._shape.num_stages):
            holders = {now for now in seats.values() if now.stage == stage and sitters[now].has_state}
            if not holders or any(seats[seat] in holders for seat in seats if seat.stage == stage):
                continue
            free = next((seat for seat, now in seats.items() if seat.stage == stage and not sitters[now].has_state), None)
            there = next(seat for seat, now in seats.items() if now in holders)
            if free is not None:
                seats[free], seats[there] = seats[there], seats[free]
        return replace(answer, places=seats)

    def _go(self, answer: PlanAssignment, resume: Resume, checkpoint: int) -> None:
        """Begin an epoch: everybody takes the seat that the answer gives it."""
        sitters = {member.seat: member for member in self.members.values()}
        players = {seat: sitters[now] for seat, now in answer.places.items()}
        sources = {} if checkpoint >= 0 or self.epoch == 0 else self._sources(answer, players)
        moves = [f"{now}>{seat}" for seat, now in sorted(answer.places.items()) if now.stage != seat.stage]
        for seat, member in players.items():
            member.seat, member.standing, member.has_stopped, member.has_finished = seat, None, False, False
            member.has_state = True  # or it says otherwise when it is stopped
        self.epoch += 1
        self._shares.clear()
        seats = {str(seat): member.number for seat, member in sorted(players.items())}
        go = StartEpoch(self.epoch, answer.plan.dumps(), seats, resume.iteration, resume.ballot, sources, checkpoint)
        reason = self._recovery.cause if self._recovery is not None else "the job began"
        processes = {str(seat): (member.host, member.pid) for seat, member in players.items()}
        why = f"{reason}; {answer.reason}"
        self._journal.append(JournalEntry(self.epoch, resume.iteration, seats, go.plan, why, self._next_member, processes))
        if self._recovery is not None:
            self._recovery.epoch, self._recovery.iteration = self.epoch, resume.iteration
            self._recovery.moves, self._recovery.num_live = tuple(moves), len(players)
        self.phase = CoordinatorPhase.RUNNING
        self._world.began(answer, go, players.values())
        self._world.send_all([m.caller for m in players.values() if m.caller is not None], go)
        for member in players.values():
            if member.caller is None:
                self._begin_recovery(f"{member.seat} is away")
                break
        if any(member.seat is None for member in self.members.values()):
            self.seat_newcomers()

    def _sources(self, answer: PlanAssignment, players: dict[Worker, Member]) -> dict[str, str]:
        """From whom each seat copies whose player has not the state of its stage; those who give take turns."""
        givers: dict[int, list[Worker]] = {}
        takers = []
        for seat, now in sorted(answer.places.items()):
            if players[seat].has_state and now.stage == seat.stage:
                givers.setdefault(seat.stage, []).append(seat)
            else:
                takers.append(seat)
        turns = {stage: cycle(seats) for stage, seats in givers.items()}
        return {str(seat): str(next(turns[seat.stage])) for seat in takers}

    def _tell_recovery(self) -> None:
        """Hand over what is known of the last change, once."""
        if self._recovery is not None and self._recovery.epoch:
            self._world.recovered(self._recovery)
        self._recovery = None

    def _seated(self) -> list[Member]:
        return [member for member in self.members.values() if member.seat is not None]

    def _to_seated(self, message: ControlMessage) -> None:
        self._world.send_all([member.caller for member in self._seated() if member.caller is not None], message)

    def _now_s(self) -> float:
        return self._world.now_us() / 1e6
