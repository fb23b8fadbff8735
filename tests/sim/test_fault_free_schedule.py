"""The closed form of a zero-bubble schedule: the published bubbles, and our own plans in the same memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recycle
from recycle.sim.fault_free_schedule import FaultFreeSchedule, StageTimes, zero_bubble_idle_us

SLACK = 1.05


def equal_stages(num_stages, forward, input_, weight, inflight):
    return [StageTimes(forward, input_, weight, inflight)] * num_stages


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_the_memory_of_1f1b_gives_the_published_bubble_of_zb_h1_and_twice_as_much_that_of_zb_h2(num_stages):
    forward, input_, weight = 10, 13, 9
    bubbles = [
        zero_bubble_idle_us(equal_stages(num_stages, forward, input_, weight, inflight), 4 * num_stages)
        for inflight in (num_stages, 2 * num_stages - 1)
    ]
    assert bubbles == [(num_stages - 1) * (10 + 13 - 9), (num_stages - 1) * (10 + 13 - 2 * 9)]


def test_with_room_for_more_nothing_is_idle_and_with_less_than_1f1b_needs_it_is_1f1b():
    roomy, tight = (zero_bubble_idle_us(equal_stages(4, 10, 13, 9, inflight), 16) for inflight in (12, 3))
    assert (roomy, tight) == (0, 3 * (10 + 13 + 9))


def test_few_micro_batches_cannot_fill_the_bubbles_whatever_the_memory():
    # Two micro-batches in flight: of 3 * 23 only one W is filled.
    assert zero_bubble_idle_us(equal_stages(4, 10, 13, 9, 100), 2) == 3 * 23 - 9


def test_messages_lengthen_the_way_there_and_back():
    assert zero_bubble_idle_us(equal_stages(4, 10, 13, 9, 4), 16, message_us=2) == 3 * (10 + 13 - 9) + 3 * 2 * 2


def test_a_later_stage_with_little_room_limits_all():
    stages = equal_stages(4, 10, 13, 9, 7)
    stages[2] = StageTimes(10, 13, 9, 2)  # no more than 1F1B needs there
    assert zero_bubble_idle_us(stages, 16) == 3 * (10 + 13 - 9)


TIMES = st.floats(0.1, 10)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES, st.integers(0, 30)), min_size=1, max_size=8), st.integers(1, 40))
def test_it_is_never_worse_than_1f1b_and_more_memory_never_hurts(times, num_microbatches):
    stages = [StageTimes(*each) for each in times]
    more = [StageTimes(*each[:3], each[3] + 1) for each in times]
    bubble = sum(stage.total_us for stage in stages) - max(stage.total_us for stage in stages)
    assert 0 <= zero_bubble_idle_us(more, num_microbatches) <= zero_bubble_idle_us(stages, num_microbatches) <= bubble + 1e-9


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(8, 12), st.integers(8, 14), st.integers(6, 10), st.integers(0, 12))
def test_our_plans_in_the_same_memory_are_about_as_fast(num_stages, rounds, forward, input_, weight, more):
    """One pipeline: a plan is hardly ever faster than the closed form, and little slower."""
    num_microbatches, memory = rounds * num_stages, num_stages + more
    costs = f"{10 * forward},{10 * input_},{10 * weight}"
    plan = recycle.solve(recycle.problem(1, num_stages, num_microbatches, costs=costs, memory=memory), "greedy")
    stages = equal_stages(num_stages, 10 * forward, 10 * input_, 10 * weight, memory)
    closed_us = zero_bubble_idle_us(stages, num_microbatches) + num_microbatches * stages[0].total_us
    assert plan.period_us <= SLACK * closed_us
    assert closed_us <= 1.01 * plan.period_us


def test_a_system_with_another_schedule_than_its_published_one_has_another_name():
    assert [schedule.suffix for schedule in FaultFreeSchedule] == ["", "-zb"]
