"""`agree`: a pure function from the progress of the surviving workers to the iteration at which all resume.

docs/concepts/failures.md has the rule. The verdict of an iteration is known if a survivor received the complete ballot, or if the
survivors' parts form a complete one.

No worker is more than one iteration ahead: an op of the next iteration needs the steps of all stages. A step whose verdict a
survivor received is never taken back, because a ballot is complete only with the parts of all workers. A step whose verdict only
dead workers received may be redone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recycle.control.decide.messages import Ballot, ProgressReport

ABSENT = -math.inf
"""In a part of a ballot, the norm of a stage that the worker does not hold. No norm ever has this value."""


class NoAgreement(Exception):
    """The survivors' iterations are too far apart for a common one: only a checkpoint helps."""


@dataclass(frozen=True, slots=True)
class Resume:
    """All resume at `iteration`; `ballot` belongs to the iteration before it, for workers without its verdict."""

    iteration: int
    ballot: Ballot | None = None


def agree(reports: Sequence[ProgressReport]) -> Resume:
    """Return the iteration at which all survivors resume. Raises NoAgreement if there is none."""
    assert reports, "nobody survived"
    reached = min(report.num_reduced for report in reports)
    ballot = None
    if any(report.own is not None and report.own.iteration == reached - 1 for report in reports):
        ballot = _complete_ballot(reached - 1, reports)
        if ballot is None:
            # No survivor can have received it, so that none is beyond it: the iteration is redone.
            reached -= 1
    if not all(_can_reach(report, reached) for report in reports):
        steps = ", ".join(str(report.num_steps) for report in reports)
        raise NoAgreement(f"not all survivors can go back to iteration {reached}: they stand at {steps}")
    return Resume(reached, ballot)


def _complete_ballot(iteration: int, reports: Sequence[ProgressReport]) -> Ballot | None:
    """Return the ballot of an iteration, as a survivor received it or joined from the parts of all; None if it is incomplete."""
    for report in reports:
        if report.whole is not None and report.whole.iteration == iteration:
            return report.whole
    parts = [report.own.norms for report in reports if report.own is not None and report.own.iteration == iteration]
    if len(parts) < len(reports):
        return None
    norms = tuple(next((norm for norm in stage if norm != ABSENT), ABSENT) for stage in zip(*parts, strict=True))
    return Ballot(iteration, norms) if ABSENT not in norms else None


def _can_reach(report: ProgressReport, iteration: int) -> bool:
    """Whether a worker gets to the iteration by settling the gradient it holds, or by taking back the step that it tried."""
    if report.num_steps == iteration:
        return True
    held = report.own.iteration if report.own is not None else None
    return held == (iteration if report.num_steps == iteration + 1 else iteration - 1) and abs(report.num_steps - iteration) == 1


def agree_if_possible(progress: Sequence[ProgressReport]) -> Resume | None:
    """Return where all can resume, None if they cannot."""
    try:
        return agree(progress)
    except NoAgreement:
        return None
