"""Assignment of places: preferred places first, stages kept complete, holders of state spread over those that copy."""

from hypothesis import given
from hypothesis import strategies as st

from recycle.control.decide.place_assignment import first_places, free_places, keep_holders, keeps_state, state_sources
from recycle.core.cluster import Cluster, Shape
from recycle.core.plans.plan_source import PlanAssignment
from tests.builders import dead
from tests.control.decide.coordinator_harness import SHAPE, W0_0, W0_1, W1_0, W1_1, answer_for, evened, plan_for

WIDE = Shape(3, 2, 3)
PLACES = list(WIDE.workers())


def test_in_the_first_epoch_members_without_a_preferred_place_get_the_rows_that_none_prefers() -> None:
    assert first_places([W0_0, W0_1, W1_0], [None, W0_0, W1_1, None]) == [W0_1, W0_0, W1_0, None]


def test_a_new_member_gets_its_preferred_place_or_one_of_the_stage_with_the_fewest_members() -> None:
    assert free_places(SHAPE, [W0_0, W1_0], [W1_1]) == [W1_1]
    assert free_places(SHAPE, [W0_0, W1_0], [W1_0, None, None]) == [W0_1, W1_1]


@given(st.sets(st.sampled_from(PLACES)), st.lists(st.none() | st.sampled_from(PLACES), max_size=8))
def test_free_places_are_given_once_as_long_as_there_are_any(taken, preferred) -> None:
    given_places = free_places(WIDE, taken, preferred)
    assert len(given_places) == min(len(preferred), len(PLACES) - len(taken))
    assert len({*taken, *given_places}) == len(taken) + len(given_places)


def moving_holder() -> PlanAssignment:
    """An assignment that moves the member at W1_1 to the first stage, and keeps the one at W0_1."""
    return PlanAssignment(plan_for(Cluster(SHAPE, dead("W1_1"))), {W0_0: W0_0, W0_1: W0_1, W1_0: W1_1}, "by hand")


def test_the_only_holder_of_a_stage_changes_its_move_with_a_member_without_state() -> None:
    kept = keep_holders(moving_holder(), {W0_0, W1_1})
    assert kept.places == {W0_0: W0_0, W0_1: W1_1, W1_0: W0_1}
    assert keeps_state(kept, {W0_0, W1_1}) == [W0_0, W0_1]
    assert state_sources(kept, {W0_0, W1_1}) == {"W1_0": "W0_0"}


def test_a_holder_may_move_if_another_one_stays_or_all_members_hold_state() -> None:
    for holders in ({W0_0, W0_1, W1_1}, {W0_0, W0_1}):
        assert keep_holders(moving_holder(), holders) == moving_holder()


def test_the_holders_of_a_stage_take_turns_as_sources() -> None:
    assignment = answer_for(Shape(4, 1, 4), frozenset())
    assert isinstance(assignment, PlanAssignment)
    assert state_sources(assignment, dead("W0_0", "W1_0")) == {"W2_0": "W0_0", "W3_0": "W1_0"}


@given(st.sets(st.sampled_from(PLACES), max_size=4), st.booleans(), st.data())
def test_no_stage_loses_its_state_if_a_member_without_state_can_move_instead(failed, is_moving, data) -> None:
    assignment = answer_for(WIDE, frozenset(failed), evened(WIDE, frozenset(failed)) if is_moving else None)
    assert isinstance(assignment, PlanAssignment)
    live = sorted(set(PLACES) - failed)
    holders = data.draw(st.sets(st.sampled_from(live)))
    kept = keep_holders(assignment, holders)
    assert sorted(kept.places.values()) == sorted(assignment.places.values())
    stages = {place.stage for place in keeps_state(kept, holders)}
    assert stages >= {place.stage for place in keeps_state(assignment, holders)}
    if stages == set(range(WIDE.num_stages)):
        sources = state_sources(kept, holders)
        assert set(sources) | set(sources.values()) <= set(map(str, kept.places))
        assert set(sources) == set(map(str, set(kept.places) - set(keeps_state(kept, holders))))
