"""`decide_change`: whether a plan for the present speeds is worth the pause that it takes to change to it."""

from dataclasses import dataclass
from enum import StrEnum

# A plan must be better by this share, whatever it costs: predictions are no better than that.
LEAST_GAIN = 0.03
# So many iterations pass before a change is made: what is decided during one is agreed on in the next, at whose end all pause.
_UNTIL_CHANGE = 3
# A worker below this speed may be left out, if the others do better without it, or if there is nothing for it to do.
TOO_SLOW = 0.5


class PlanChange(StrEnum):
    """What to do: go on with the present plan, take that for the present speeds, or one without the slowest worker."""

    KEEP = "keep"
    REPLAN = "replan"
    LEAVE_OUT = "leave out"


@dataclass(frozen=True, slots=True)
class PlanPeriods:
    """Steady periods of plans at the present speeds: of the present one, of a new one, and of one without the slowest worker.

    If that one `is_idle`, the new plan gives it no op: nobody would know when it is faster again.
    """

    present_us: int
    new_us: int
    without_us: int | None = None
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class ChangeDecision:
    change: PlanChange
    reason: str


def decide_change(periods: PlanPeriods, iteration_us: float, num_left: int, pause_us: float) -> ChangeDecision:
    """Decide for a job whose iterations take `iteration_us`, with `num_left` to go; a change of plans takes `pause_us`."""
    best_us, change = periods.new_us, PlanChange.REPLAN
    if periods.without_us is not None and (periods.is_idle or periods.without_us < (1 - LEAST_GAIN) * periods.new_us):
        best_us, change = periods.without_us, PlanChange.LEAVE_OUT
    gain = 1 - best_us / max(1, periods.present_us)
    if gain < LEAST_GAIN:
        return ChangeDecision(PlanChange.KEEP, f"another plan would gain {max(0.0, gain):.0%}")
    if gain * iteration_us * max(0, num_left - _UNTIL_CHANGE) <= pause_us:
        gained = f"gains {gain:.0%} of the last {num_left} iterations"
        return ChangeDecision(PlanChange.KEEP, f"another plan {gained}, less than the pause of {pause_us / 1e6:.1f} s")
    return ChangeDecision(change, f"iterations are to be {gain:.0%} shorter by another plan")
