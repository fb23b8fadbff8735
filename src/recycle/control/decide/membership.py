"""Who is alive: a pure function from facts to a verdict with its reason. It knows no sockets and no clock of its own.

Death is pushed: a closed connection is known at once. Silence is known by a lease. A worker that is alive but computes one op far
longer than any op of its plan takes is suspected by the plan's own times. All time-outs follow from the lease.
"""

from dataclasses import dataclass
from enum import StrEnum

from recycle.core.errors import UserError

DEFAULT_LEASE_S, SHORTEST_S, LONGEST_S = 2.0, 0.1, 3600.0
# A member says something so many times in a lease.
RENEWALS_PER_LEASE = 6
# It is suspected so early that it has been fenced when its lease is over.
SILENCE_PER_LEASE = 0.9
# An op may take so many times as long as the longest that any worker has taken so far, before its worker is suspected. As long as
# it is not known how long ops take, nobody is: a lease may be shorter than any of them.
PATIENCE = 10


def refuse_lease(lease_s: float) -> None:
    """Raise if nobody could keep such a lease, or nobody would wait for it."""
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not SHORTEST_S <= lease_s <= LONGEST_S:
        raise UserError(f"the lease is {lease_s!r}, but it must be a number of seconds from {SHORTEST_S:g} to {LONGEST_S:g}")


# So many leases may a member be silent whose process is seen running: on a machine with too much to do, it waits its turn.
STARVED_LEASES = 5


class Liveness(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    """Not dead for sure: it must be fenced before others take its work over."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """What is known of a member: when it was last heard, whether its connection is open, how long its op has been computing.

    `is_running` says that its process was seen, neither stopped nor gone: then silence may mean that it gets no processor.
    """

    heard_s: float
    is_connected: bool
    busy_s: float = 0.0
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class LivenessVerdict:
    state: Liveness
    reason: str = ""


def judge_liveness(
    now_s: float, facts: MemberFacts, lease_s: float, longest_op_s: float, is_away: bool = False
) -> LivenessVerdict:
    """Say whether a member is alive. `is_away`: the coordinator itself was not there, so that closed connections mean nothing."""
    silence_s = now_s - facts.heard_s
    if not facts.is_connected and not is_away:
        return LivenessVerdict(Liveness.DEAD, "its connection closed")
    if silence_s > lease_s * (STARVED_LEASES if facts.is_running else SILENCE_PER_LEASE):
        return LivenessVerdict(Liveness.SUSPECT, f"silent for {silence_s:.1f} s, with a lease of {lease_s:g} s")
    most_s = max(lease_s, PATIENCE * longest_op_s)
    if longest_op_s and facts.busy_s > most_s:
        return LivenessVerdict(
            Liveness.SUSPECT,
            f"far behind its plan: an op has been computing for {facts.busy_s:.1f} s, where none took over {longest_op_s:.3g} s",
        )
    return LivenessVerdict(Liveness.ALIVE)
