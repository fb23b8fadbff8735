"""Where training goes on after a failure: a pure function from where survivors stand to the iteration that all resume at.

Stages step on their own, so that some may have applied an iteration of which others have not even the gradient. An iteration is
finished if every survivor has its reduced gradient, and the verdict on it can be known: somebody heard the whole ballot, or the
survivors' parts make up a whole one. Then all settle it; otherwise who has applied it takes that back, and it is done again.

Nobody is ever more than one iteration ahead: an op of the next one needs all stages' steps. And what a survivor heard the verdict
on is never taken back, because a ballot is whole only if everybody has put its part in. What only the dead heard may be redone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recycle.control.decide.messages import Ballot, ProgressReport


class NoAgreement(Exception):
    """Survivors stand so far apart that no iteration can be resumed by all: only a checkpoint helps."""


@dataclass(frozen=True, slots=True)
class Resume:
    """All go on with `iteration`; `ballot` is that of the one before it, for those who have not heard its verdict."""

    iteration: int
    ballot: Ballot | None = None


def agree(standings: Sequence[ProgressReport]) -> Resume:
    """Return where to go on."""
    assert standings, "nobody survived"
    reached = min(standing.num_reduced for standing in standings)
    waiting = [standing for standing in standings if standing.own is not None and standing.own.iteration == reached - 1]
    ballot = None
    if waiting:
        ballot = _known(reached - 1, standings)
        if ballot is None:
            # Nobody can have heard it, so that nobody is beyond it: it is done again.
            reached -= 1
    if not all(_can_reach(standing, reached) for standing in standings):
        raise NoAgreement(f"not all survivors can go back to iteration {reached}: they stand at {_shown(standings)}")
    return Resume(reached, ballot)


def _known(iteration: int, standings: Sequence[ProgressReport]) -> Ballot | None:
    """The whole ballot of an iteration: as somebody heard it, or put together from the parts of all."""
    for standing in standings:
        if standing.whole is not None and standing.whole.iteration == iteration:
            return standing.whole
    parts = [standing.own for standing in standings if standing.own is not None and standing.own.iteration == iteration]
    if len(parts) < len(standings):
        return None
    norms = _joined([part.norms for part in parts])
    return Ballot(iteration, norms) if norms is not None else None


ABSENT = -math.inf
"""In a part of a ballot, what others have to say. No norm is ever this."""


def _joined(parts: Sequence[tuple[float, ...]]) -> tuple[float, ...] | None:
    """Each place from whoever speaks for it; None if nobody does for one of them."""
    made = []
    for places in zip(*parts, strict=True):
        spoken = [value for value in places if value != ABSENT]
        if not spoken:
            return None
        made.append(spoken[0])
    return tuple(made)


def _can_reach(standing: ProgressReport, iteration: int) -> bool:
    """Whether a worker can get there by settling what it holds, or by taking back one step."""
    if standing.num_steps in (iteration, iteration + 1):
        return True
    return standing.num_steps == iteration - 1 and standing.own is not None and standing.own.iteration == iteration - 1


def _shown(standings: Sequence[ProgressReport]) -> str:
    return ", ".join(str(standing.num_steps) for standing in standings)
