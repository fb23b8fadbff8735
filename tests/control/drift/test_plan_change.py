"""Whether another plan is worth its pause."""

import pytest

from recycle.control.drift.plan_change import LEAST_GAIN, PlanChange, PlanPeriods, decide_change

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("periods", "iteration_us", "num_left", "pause_us", "change"),
    [
        (PlanPeriods(150, 110), SECOND, 100, SECOND, PlanChange.REPLAN),
        (PlanPeriods(150, 149), SECOND, 10**6, 0, PlanChange.KEEP),
        (PlanPeriods(100, 150), SECOND, 10**6, 0, PlanChange.KEEP),
        (PlanPeriods(150, 110), SECOND // 1000, 100, SECOND, PlanChange.KEEP),  # 27 ms are won, and a second is lost
        (PlanPeriods(150, 110), SECOND, 3, 0, PlanChange.KEEP),  # the change comes too late
        (PlanPeriods(1000, 500, 120), SECOND, 100, SECOND, PlanChange.LEAVE_OUT),
        (PlanPeriods(1000, 500, 501, is_idle=True), SECOND, 100, SECOND, PlanChange.LEAVE_OUT),
        (PlanPeriods(1000, 500, 501), SECOND, 100, SECOND, PlanChange.REPLAN),
        (PlanPeriods(100, 110, 100), SECOND, 100, SECOND, PlanChange.KEEP),
    ],
)
def test_a_plan_changes_if_it_gains_more_than_the_pause_costs(periods, iteration_us, num_left, pause_us, change):
    decision = decide_change(periods, iteration_us, num_left, pause_us)
    assert decision.change is change
    assert decision.reason


def test_the_gain_is_at_least_what_a_prediction_may_be_wrong_by():
    at_least = PlanPeriods(1000, round(1000 * (1 - LEAST_GAIN)))
    assert decide_change(at_least, SECOND, 1000, 0).change is PlanChange.REPLAN
    assert decide_change(PlanPeriods(1000, at_least.new_us + 1), SECOND, 1000, 0).change is PlanChange.KEEP
