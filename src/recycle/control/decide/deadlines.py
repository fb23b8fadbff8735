"""The deadlines of members: which have been silent or busy, or made a phase of the coordinator wait, for too long, and why."""

from collections.abc import Callable, Sequence

from recycle.control.decide.failure_detection import (
    PATIENCE,
    SILENCE_PER_LEASE,
    STUCK_LEASES,
    MemberFacts,
    Wait,
    cut_off_members,
    stuck_member,
    suspicion,
)
from recycle.control.decide.members import Member, MemberTable
from recycle.control.decide.messages import SET_UP
from recycle.control.decide.phases import CoordinatorPhase

# All members that are asked to stop must have stopped after so many leases, but not before `SHORTEST_STOP_S`.
STOP_LEASES, SHORTEST_STOP_S = 5, 10.0
# A requested plan must come; and a checkpoint that is looked for, of which every byte is read.
PLAN_S, CHECKPOINT_S = 600.0, 6 * 3600.0


def suspected_members(
    now_s: float, members: Sequence[Member], lease_s: float, longest_op_s: float, is_running: Callable[[Member], bool]
) -> list[tuple[Member, str, float]]:
    """Return the members that have been silent, or busy with one thing, for too long: each with the reason, and since when."""
    found = []
    for member in members:
        is_silent = now_s - member.last_seen_s > SILENCE_PER_LEASE * lease_s
        if not is_silent and member.busy_s <= lease_s:  # most members, at every tick
            continue
        is_loading = member.place is None and not member.is_ready
        is_starved = is_silent and not is_loading and is_running(member)
        facts = MemberFacts(member.last_seen_s, member.busy_s, is_starved, member.doing, is_loading)
        if reason := suspicion(now_s, facts, lease_s, longest_op_s):
            found.append((member, reason, member.last_seen_s if is_silent else now_s - member.busy_s))
    return found


def unreachable_members(reporter: Member, unreachable: Sequence[str], members: MemberTable) -> list[tuple[Member, str]]:
    """Return the members to give up, each with the reason, if one reports that it cannot connect to others."""
    if not unreachable:
        return []
    placed = members.placed
    live = [str(member.place) for member in placed]
    if not (names := [name for name in unreachable if name in live]):
        return []
    lost, reason = cut_off_members(str(reporter.place), names, len(live))
    return [(member, reason) for member in placed if str(member.place) in lost]


def late_members(
    phase: CoordinatorPhase, in_phase_s: float, placed: Sequence[Member], lease_s: float, longest_op_s: float
) -> list[tuple[Member, str, float]]:
    """Return the members to give up after so long in a phase: each with the reason, and how late it is."""
    match phase:
        case CoordinatorPhase.RUNNING | CoordinatorPhase.PAUSING:
            busy = [member for member in placed if not member.has_finished]
            if any(member.waited_s <= STUCK_LEASES * lease_s for member in busy):
                return []
            waits = [Wait(str(each.place), each.waits_for, each.waited_s, each.doing == SET_UP) for each in busy]
            if stuck := stuck_member(waits, lease_s, longest_op_s):
                lost, reason = stuck
                waited_s = max(each.waited_s for each in waits)
                return [(member, reason, waited_s) for member in placed if str(member.place) == lost]
        case CoordinatorPhase.STOPPING if in_phase_s > max(SHORTEST_STOP_S, STOP_LEASES * lease_s, PATIENCE * longest_op_s):
            reason = f"it has not stopped for {in_phase_s:.1f} s"
            return [(member, reason, in_phase_s) for member in placed if not member.has_stopped]
    return []
