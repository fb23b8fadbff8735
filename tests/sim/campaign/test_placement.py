"""Which node of a trace holds which place of the cluster."""

import pytest

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace
from recycle.sim.campaign.placement import Placement, membership_changes, ready_changes

SHAPE = Shape(2, 2, 4)


def test_nodes_that_are_called_like_workers_take_their_own_places():
    event = Placement(SHAPE).change(0, (), ["W1_1", "W0_1"])
    assert event.members.live == {Worker(1, 1), Worker(0, 1)}


def test_other_nodes_fill_the_places_in_order_and_the_rest_are_spare():
    event = Placement(SHAPE).change(0, (), [f"node{number}" for number in range(6)])
    assert event.members.live == frozenset(SHAPE.workers())
    assert event.members.num_spare == 2
    assert event.members.num_live == 6


def test_a_spare_steps_in_for_a_node_that_leaves():
    placement = Placement(SHAPE)
    placement.change(0, (), [f"node{number}" for number in range(5)])
    event = placement.change(7, ["node2"], ())
    assert event.left == event.joined == (Worker(1, 0),)
    assert event.members.num_spare == 0
    assert not event.members.failed


def test_a_newcomer_takes_the_place_that_has_been_empty_longest():
    placement = Placement(SHAPE)
    placement.change(0, (), ["a", "b", "c", "d"])
    placement.change(1, ["c"], ())
    placement.change(2, ["a"], ())
    assert placement.change(3, (), ["e"]).joined == (Worker(1, 0),)


def test_a_worker_that_returns_gets_its_own_place_back_if_it_is_free():
    placement = Placement(SHAPE)
    placement.change(0, (), ["W0_0", "W0_1", "W1_0", "W1_1"])
    placement.change(1, ["W1_1"], ())
    placement.change(2, ["W0_0"], ())
    assert placement.change(3, (), ["W0_0"]).joined == (Worker(0, 0),)


def test_a_worker_that_the_cluster_does_not_have_is_refused_by_name():
    with pytest.raises(UserError, match="W7_0"):
        Placement(SHAPE).change(0, (), ["W7_0"])


def test_an_added_node_counts_when_it_is_ready_and_not_at_all_if_it_left_before():
    changes = [Change(10, True, "a"), Change(12, False, "b"), Change(20, True, "c"), Change(21, False, "c")]
    assert ready_changes(changes, 5) == [Change(12, False, "b"), Change(15, True, "a")]


def test_a_node_that_leaves_and_joins_within_its_time_to_get_ready_leaves_first():
    changes = [Change(10, False, "a"), Change(11, True, "a"), Change(14, False, "a"), Change(15, True, "a")]
    assert ready_changes(changes, 5) == [Change(10, False, "a"), Change(20, True, "a")]


def test_nobody_begins_to_join_before_a_hang_is_noticed():
    changes = [Change(10, False, "a", hangs=True), Change(10, True, "spare"), Change(12, False, "b"), Change(100, True, "b")]
    assert ready_changes(changes, 5, 60) == [
        Change(10, False, "a", hangs=True),
        Change(12, False, "b"),
        Change(75, True, "spare"),
        Change(105, True, "b"),
    ]


def test_what_happens_at_one_time_is_one_event():
    names = ["W0_0", "W0_1", "W1_0", "W1_1"]
    start = tuple(Change(0, True, name) for name in names)
    trace = Trace((*start, Change(5, False, "W0_0"), Change(5, False, "W1_1"), Change(9, True, "W0_0")), 30)
    found = list(membership_changes(trace, SHAPE, 5))
    assert [event.at_us for event in found] == [0, 5, 14]
    assert found[1].left == (Worker(0, 0), Worker(1, 1))
    assert found[2].members.failed == {Worker(1, 1)}
