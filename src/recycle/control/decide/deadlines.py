"""The deadlines of the coordinator's phases: which members have made it wait for too long, and why."""

from collections.abc import Sequence

from recycle.control.decide.failure_detection import PATIENCE, Wait, stuck_member
from recycle.control.decide.members import Member
from recycle.control.decide.messages import SET_UP
from recycle.control.decide.phases import CoordinatorPhase

# All members that are asked to stop must have stopped after so many leases, but not before `SHORTEST_STOP_S`.
STOP_LEASES, SHORTEST_STOP_S = 5, 10.0
# A requested plan must come.
PLAN_S = 600.0


def late_members(
    phase: CoordinatorPhase, in_phase_s: float, placed: Sequence[Member], lease_s: float, longest_op_s: float
) -> list[tuple[Member, str]]:
    """Return the members to give up, each with the reason, after the coordinator has been in a phase for so long."""
    match phase:
        case CoordinatorPhase.RUNNING | CoordinatorPhase.PAUSING:
            busy = [member for member in placed if not member.has_finished]
            waits = [Wait(str(each.place), each.waits_for, each.waited_s, each.doing == SET_UP) for each in busy]
            if stuck := stuck_member(waits, lease_s, longest_op_s):
                lost, reason = stuck
                return [(member, reason) for member in placed if str(member.place) == lost]
        case CoordinatorPhase.STOPPING if in_phase_s > max(SHORTEST_STOP_S, STOP_LEASES * lease_s, PATIENCE * longest_op_s):
            return [(member, f"it has not stopped for {in_phase_s:.1f} s") for member in placed if not member.has_stopped]
    return []
