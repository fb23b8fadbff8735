"""The hand-made plans that the other tests draw are legal and have the known periods."""

from recycle.core.plans.rules import check
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan


def test_the_hand_made_plans_are_legal_and_have_the_known_periods() -> None:
    known = [
        (make_1f1b_plan(), 27),
        (make_rerouted_plan(), 12),
        (make_rerouted_plan(staggered=False), 13),
        (make_split_plan(), 21),
    ]
    for plan, period in known:
        assert check(plan) == []
        assert plan.period_us == period


def test_the_costly_plans_are_legal() -> None:
    assert check(make_rerouted_plan(profile=costly_profile(2))) == []
    assert check(make_1f1b_plan(profile=costly_profile(4))) == []
