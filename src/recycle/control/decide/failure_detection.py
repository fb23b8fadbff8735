"""Failure detection: a pure function from the facts about a member to the reason why it is suspected of being dead."""

from dataclasses import dataclass

from recycle.core.errors import UserError

DEFAULT_LEASE_S, SHORTEST_S, LONGEST_S = 2.0, 0.1, 3600.0
# The number of heartbeats in a lease.
RENEWALS_PER_LEASE = 6
# A silent member is suspected early enough that it is fenced before its lease ends.
SILENCE_PER_LEASE = 0.9
# A member whose process is seen running may be silent for so many leases: on a busy machine it waits for a processor.
STARVED_LEASES = 5
# A tick that comes so many leases after the one before is late: the coordinator itself stood still, and heard nobody meanwhile.
LATE_TICK_LEASES, SHORTEST_LATE_S = 0.25, 0.1
# An op may take so many times as long as the longest op of any worker so far. As long as no op has been reported, no member is
# suspected of slowness: a lease may be shorter than any op.
PATIENCE = 10


def refuse_lease(lease_s: float) -> None:
    """Raise if the lease is too short to be kept, or too long to be waited for."""
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not SHORTEST_S <= lease_s <= LONGEST_S:
        raise UserError(f"the lease is {lease_s!r}, but it must be a number of seconds from {SHORTEST_S:g} to {LONGEST_S:g}")


def stall_s(since_last_tick_s: float, lease_s: float) -> float:
    """Return how long the coordinator stood still before a late tick, 0 if the tick was not late."""
    return since_last_tick_s if since_last_tick_s > max(SHORTEST_LATE_S, LATE_TICK_LEASES * lease_s) else 0.0


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """When a member last sent a message, how long its op has been computing, and whether its process was seen running."""

    last_seen_s: float
    busy_s: float = 0.0
    is_running: bool = False


def suspicion(now_s: float, facts: MemberFacts, lease_s: float, longest_op_s: float) -> str | None:
    """Return why a member is suspected and must be fenced before others take over its work; None if it is alive."""
    silence_s = now_s - facts.last_seen_s
    if silence_s > lease_s * (STARVED_LEASES if facts.is_running else SILENCE_PER_LEASE):
        return f"silent for {silence_s:.1f} s, with a lease of {lease_s:g} s"
    if longest_op_s and facts.busy_s > max(lease_s, PATIENCE * longest_op_s):
        return (
            f"far behind its plan: an op has been computing for {facts.busy_s:.1f} s, where none took over {longest_op_s:.3g} s"
        )
    return None
