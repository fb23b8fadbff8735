"""Failure detection: a pure function from the facts about a member to the reason why it is suspected of being dead."""

from collections.abc import Sequence
from dataclasses import dataclass

from recycle.control.decide.messages import FINISH, READ, SAVE, SET_UP
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE

DEFAULT_LEASE_S, SHORTEST_S, LONGEST_S = 2.0, 0.1, 3600.0
# The number of heartbeats in a lease.
RENEWALS_PER_LEASE = 6
# A silent member is suspected early enough that it is fenced before its lease ends.
SILENCE_PER_LEASE = 0.9
# A member whose process is seen running may be silent for so many leases: on a busy machine it waits for a processor.
STARVED_LEASES = 5
# A tick that comes so many leases after the one before is late: the coordinator itself stood still, and heard nobody meanwhile.
LATE_TICK_LEASES, SHORTEST_LATE_S = 0.25, 0.1
# An op may take so many times as long as the longest op of any worker so far; before any op was reported, `SLOW_S`.
PATIENCE = 10
# Reducing and stepping count as ops of at least so many leases. Everything else (to set up an epoch, to save, to finish, to read
# data), and an op before any op was reported, has a fixed limit: models may be large, and kernels compile.
STEP_LEASES, SLOW_S = 5, 600.0
# A member that loads the job and has no place yet may be silent for so long: an import may hold up its process.
LOADING_S = 60.0
# If all members wait for each other for so many leases, and as long as `PATIENCE` says, a message between two of them is lost;
# while they connect, for so long.
STUCK_LEASES, CONNECT_S = 3, 30.0


def refuse_lease(lease_s: float) -> None:
    """Raise if the lease is too short to be kept, or too long to be waited for."""
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not SHORTEST_S <= lease_s <= LONGEST_S:
        raise UserError(f"the lease is {lease_s!r}, but it must be a number of seconds from {SHORTEST_S:g} to {LONGEST_S:g}")


def stall_s(since_last_tick_s: float, lease_s: float) -> float:
    """Return how long the coordinator stood still before a late tick, 0 if the tick was not late."""
    return since_last_tick_s if since_last_tick_s > max(SHORTEST_LATE_S, LATE_TICK_LEASES * lease_s) else 0.0


class StallWatch:
    """Notices that the coordinator itself stood still: nobody is judged by the time in which it heard nobody.

    Until `patient_until_s`, a connection that closed may be that of a member that gave up waiting, and comes back.
    """

    def __init__(self, now_s: float, lease_s: float) -> None:
        self._last_s = self.patient_until_s = now_s
        self._lease_s = lease_s

    def tick(self, now_s: float) -> float:
        """Return how long the coordinator stood still before this tick, 0 if it did not."""
        stalled_s, self._last_s = stall_s(now_s - self._last_s, self._lease_s), now_s
        if stalled_s:
            self.patient_until_s = now_s + (self._lease_s if stalled_s > self._lease_s else 0.0)
        return stalled_s


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """When a member last sent a message, whether its process was seen running, and for how long it has been doing something.

    One that `is_loading` has no place yet, and nobody waits for it.
    """

    last_seen_s: float
    busy_s: float = 0.0
    is_running: bool = False
    doing: str = ""
    is_loading: bool = False


def suspicion(now_s: float, facts: MemberFacts, lease_s: float, longest_op_s: float) -> str | None:
    """Return why a member is suspected and must be fenced before others take over its work; None if it is alive."""
    silence_s, may_be_silent_s = now_s - facts.last_seen_s, lease_s * (STARVED_LEASES if facts.is_running else SILENCE_PER_LEASE)
    if silence_s > (max(LOADING_S, may_be_silent_s) if facts.is_loading else may_be_silent_s):
        return f"silent for {silence_s:.1f} s, with a lease of {lease_s:g} s"
    if facts.busy_s > (limit_s := _busy_limit_s(facts.doing, lease_s, longest_op_s)):
        longest = f", where no op took over {longest_op_s:.3g} s" if longest_op_s and limit_s < SLOW_S else ""
        return f"far behind its plan: it has been busy for {facts.busy_s:.1f} s with {facts.doing or 'an op'}{longest}"
    return None


def _busy_limit_s(doing: str, lease_s: float, longest_op_s: float) -> float:
    if doing in (SET_UP, SAVE, FINISH, READ) or not longest_op_s:
        return max(SLOW_S, STEP_LEASES * lease_s)
    return max(STEP_LEASES * lease_s if doing in (REDUCE, OPTIMIZER) else lease_s, PATIENCE * longest_op_s)


@dataclass(frozen=True, slots=True)
class Wait:
    """A member at `place` has waited for others, at the places `for_`, for so long."""

    place: str
    for_: tuple[str, ...]
    waited_s: float
    is_connecting: bool = False


def stuck_member(waits: Sequence[Wait], lease_s: float, longest_op_s: float) -> tuple[str, str] | None:
    """Return the place to give up, and the reason, if all members wait for each other for too long; else None.

    `waits` are those of all members that have not finished. Who computes, or has just begun to wait, breaks the circle soon.
    """
    first = max(waits, key=lambda wait: wait.waited_s, default=None)
    shortest_s = min((wait.waited_s for wait in waits), default=0.0)
    limit_s = max(STUCK_LEASES * lease_s, PATIENCE * longest_op_s)
    if first is None or shortest_s <= (max(limit_s, CONNECT_S) if any(wait.is_connecting for wait in waits) else limit_s):
        return None
    names = first.for_ or tuple(wait.place for wait in waits if wait.place != first.place)
    lost = max(names, key=lambda name: sum(name in wait.for_ for wait in waits), default=first.place)
    return lost, f"{first.place} has waited {first.waited_s:.1f} s for {lost}, and nobody computes: their link seems to be cut"


def cut_off_members(place: str, unreachable: Sequence[str], num_members: int) -> tuple[Sequence[str], str]:
    """Return the places to give up, and the reason, if the member at `place` cannot connect to others.

    It is the one that is cut off if it cannot reach most of the others.
    """
    lost = [place] if 2 * len(unreachable) > num_members - 1 > 1 else unreachable
    return lost, f"{place} cannot connect to {', '.join(unreachable)}: their link seems to be cut"
