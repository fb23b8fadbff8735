"""The fit of contention: costs and levels are found again from durations that were made by known ones."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.op import Kind
from recycle.profiling.contention import Concurrency, TimedOp, costs_and_levels

pytestmark = pytest.mark.timeout(60)
COSTS = {(0, Kind.F): 1000.0, (0, Kind.I): 2000.0, (1, Kind.F): 1500.0, (1, Kind.W): 700.0}
# Nothing up to three others, and a step of 5 % for each more: a straight line through it is wrong everywhere.
KINKED = [1.0, 1.0, 1.0, 1.0, 1.05, 1.1]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8), st.data())
def test_concurrency_is_counted_as_one_would_microsecond_by_microsecond(given_spans, data):
    busy = [(start, start + length) for start, length in given_spans]
    start, end = data.draw(st.sampled_from(busy))
    until = data.draw(st.integers(start + 1, end))
    by_hand = [0] * 8
    for at in range(start, until):
        by_hand[sum(begin <= at < stop for begin, stop in busy) - 1] += 1
    assert Concurrency(busy).shares(start, until, 7) == pytest.approx([num / (until - start) for num in by_hand])


def test_an_op_that_takes_no_time_has_no_contention():
    assert Concurrency([(0, 10), (5, 5)]).shares(5, 5, 2) == [1, 0, 0]


def made(levels, others, noise=0.0, num=400, seed=1):
    """Ops by known costs and levels, each beside two numbers of other workers out of `others` in turn."""
    chance, ops = random.Random(seed), []
    for number in range(num):
        op_type = list(COSTS)[number % len(COSTS)]
        shares, part = [0.0] * len(levels), chance.random()
        shares[chance.choice(others)] += part
        shares[chance.choice(others)] += 1 - part
        level = sum(share * of for share, of in zip(shares, levels, strict=True))
        ops.append(TimedOp(op_type, round(COSTS[op_type] * level * (1 + chance.gauss(0, noise))), shares))
    return ops


def scaled(costs, levels):
    """Costs and levels without other workers, so that it does not matter which contention was usual."""
    return {op_type: cost * levels[0] for op_type, cost in costs.items()}, [level / levels[0] for level in levels]


@pytest.mark.parametrize("levels", [KINKED, [1.0] * 6, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]])
def test_costs_and_levels_are_found_again(levels):
    ops = made(levels, range(6))
    costs, found = scaled(*costs_and_levels(ops, ops))
    assert found == pytest.approx(levels, rel=0.002)
    assert costs == pytest.approx(COSTS, rel=0.002)


def test_they_are_found_among_noise_and_ops_that_were_delayed_by_something_else():
    ops = made(KINKED, range(6), noise=0.03, num=2000)
    ops = [op._replace(took_us=round(1.4 * op.took_us)) if number % 11 == 0 else op for number, op in enumerate(ops)]
    costs, found = scaled(*costs_and_levels(ops, ops))
    assert found == pytest.approx(KINKED, abs=0.02)
    assert costs == pytest.approx(COSTS, rel=0.03)


def test_costs_are_those_of_the_usual_contention():
    ops, usual = made(KINKED, range(6)), made(KINKED, [5])
    costs, found = costs_and_levels(ops + usual, usual)
    assert found[5] == pytest.approx(1)
    assert costs == pytest.approx({op_type: 1.1 * cost for op_type, cost in COSTS.items()}, rel=0.002)


def test_levels_never_fall_and_stay_where_nothing_was_seen():
    faster_beside_others = made([1.2, 1.1, 1.0, 0.9, 0.8, 0.7], range(6))
    _, found = costs_and_levels(faster_beside_others, faster_beside_others)
    assert found == pytest.approx([1] * 6)
    ops = made([*KINKED[:5], 9.0], [0, 1, 4])
    _, found = scaled(*costs_and_levels(ops, ops))
    assert found[5] == found[4] == pytest.approx(1.05, rel=0.002)
    assert found == sorted(found)


def test_one_worker_is_alone():
    ops = [TimedOp((0, Kind.F), took_us, [1.0]) for took_us in (10, 12, 11)]
    assert costs_and_levels(ops, ops) == ({(0, Kind.F): 11}, [1.0])
