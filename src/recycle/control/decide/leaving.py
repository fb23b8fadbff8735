"""Members that leave as they were asked to, or are left out: whether they take a stage's state along, and how they are let go."""

from collections.abc import Iterable
from dataclasses import replace

from recycle.control.decide.effects import CoordinatorEffects
from recycle.control.decide.members import Member, MemberTable, Recovery
from recycle.control.decide.messages import JobEnded
from recycle.core.cluster import Shape

JOINS = "it asked to join"


def take_state_along(members: MemberTable, num_stages: int) -> bool:
    """Return whether some stage's state is held by nobody but members that leave."""
    kept = {member.place.stage for member in members.placed if member.place and member.has_state and not member.is_leaving}
    return bool(members.leaving) and len(kept) < num_stages


def release_leaving(
    members: MemberTable, shape: Shape, effects: CoordinatorEffects, recovery: Recovery | None
) -> tuple[bool, Recovery | None]:
    """Let members go that leave; but if only they hold a stage's state, all save it first, in an epoch for that.

    Return whether they do, and the recovery that goes on.
    """
    saves = take_state_along(members, shape.num_stages)
    if not saves:
        dismiss(members.leaving, effects, recovery)
    return saves, None if saves and not members.new_places(shape) else recovery  # nobody leaves yet


def dismiss(leaving: Iterable[Member], effects: CoordinatorEffects, recovery: Recovery | None) -> None:
    """Let members go. They lose their places now, and end when their last reports are acknowledged."""
    for member in leaving:
        before = replace(member)
        member.place, member.progress, member.has_left = None, None, True
        if before.place is not None:
            effects.member_left(before, member.leaves_because)
            if recovery is not None:
                recovery.add_leave(str(before.place))
        if member.connection is not None:
            effects.send(member.connection, JobEnded(member.leaves_because))
