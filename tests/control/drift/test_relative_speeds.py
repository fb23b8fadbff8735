"""Speeds of workers beside their peers: slowness is told apart from contention and from errors of the profile."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.control.drift.op_pace import op_class, pace_of, parse_class
from recycle.control.drift.relative_speeds import relative_speeds
from recycle.core.cluster import Shape, Worker
from recycle.core.op import Kind

COSTS = {"F": 10, "I": 13, "W": 9, "B": 22}
SHAPE = Shape(3, 4, 6)


def cost_of(stage, name):
    """What the plan takes an op to cost; a class with layers costs as much as it has layers."""
    kind, layers = parse_class(name)
    return COSTS[kind.value] * (1 if layers is None else len(layers))


def measured(shape, factor_of, names=("F", "I", "W"), seed=0, noise=0.0):
    """The paces of one iteration in which ops take `factor_of(worker)` times what they cost."""
    rng = random.Random(seed)
    paces = {}
    for number, worker in enumerate(shape.workers()):
        times = [
            (name, round(1000 * factor_of(worker) * cost_of(worker.stage, name) * (1 + noise * rng.uniform(-1, 1))))
            for name in names
            for _ in range(6)
        ]
        paces[number] = worker, pace_of(times)
    return paces


def speeds_of(paces):
    found = relative_speeds(paces, cost_of)
    return {str(paces[number][0]): round(estimate.speed, 2) for number, estimate in found.items()}


def test_a_worker_is_slow_if_its_ops_take_longer_than_those_of_its_peers():
    slow = Worker(1, 2)
    speeds = speeds_of(measured(SHAPE, lambda worker: 1 / 0.6 if worker == slow else 1))
    assert speeds.pop("W1_2") == 0.6
    assert set(speeds.values()) == {1.0}


def test_if_all_are_slower_nobody_is_slow():
    for factor in (0.5, 1, 7):
        assert set(speeds_of(measured(SHAPE, lambda worker, factor=factor: factor)).values()) == {1.0}


def test_an_error_of_the_profile_makes_no_worker_slow():
    """A stage whose ops take three times what its profile says, on all its workers."""
    assert set(speeds_of(measured(SHAPE, lambda worker: 3 if worker.stage == 1 else 1)).values()) == {1.0}


def test_of_two_peers_the_faster_is_the_measure():
    speeds = speeds_of(measured(Shape(2, 3, 4), lambda worker: 2 if worker == Worker(0, 1) else 1))
    assert speeds["W0_1"] == 0.5
    assert speeds["W1_1"] == 1.0


def test_a_single_op_that_was_held_up_changes_nothing():
    paces = measured(SHAPE, lambda worker: 1)
    times = [("F", 10_000)] * 5 + [("F", 900_000)]
    paces[0] = paces[0][0], {**paces[0][1], **pace_of(times)}
    assert speeds_of(paces)["W0_0"] == 1.0


def test_peers_are_compared_by_ops_that_compute_the_same_layers():
    """Long ops cost less per layer here than the plan says; a worker that has more of them is not faster for that."""
    peers = [Worker(0, 1), Worker(1, 1), Worker(2, 1)]
    long, short = op_class(Kind.F, range(2, 6)), op_class(Kind.F, range(3, 5))
    fast_long = {"W0_1": {long: (6, 30_000), short: (1, 20_000)}, "W1_1": {long: (1, 30_000), short: (6, 20_000)}}
    paces = {number: (worker, fast_long.get(str(worker), fast_long["W1_1"])) for number, worker in enumerate(peers)}
    assert set(speeds_of(paces).values()) == {1.0}


def test_a_worker_without_a_peer_is_compared_with_all_others():
    paces = measured(Shape(1, 4, 6), lambda worker: 2 if worker.stage == 3 else 1)
    found = relative_speeds(paces, cost_of)
    assert all(estimate.is_lone for estimate in found.values())
    assert found[3].speed == pytest.approx(found[0].speed / 2)


def test_a_worker_that_ran_nothing_has_no_speed():
    paces = measured(SHAPE, lambda worker: 1)
    paces[5] = paces[5][0], {}
    assert set(relative_speeds(paces, cost_of)) == set(paces) - {5}


@given(st.floats(0.05, 0.95), st.integers(0, 10**6), st.floats(0.2, 5))
def test_the_speed_is_found_under_noise_and_contention(speed, seed, contention):
    slow = Worker(0, 0)
    paces = measured(SHAPE, lambda worker: contention / (speed if worker == slow else 1), seed=seed, noise=0.05)
    found = {paces[number][0]: estimate.speed for number, estimate in relative_speeds(paces, cost_of).items()}
    assert found[slow] == pytest.approx(speed, rel=0.11)


def test_a_class_is_read_back_as_it_was_written():
    for kind in Kind:
        assert parse_class(op_class(kind, None)) == (kind, None)
        assert parse_class(op_class(kind, range(3, 17))) == (kind, range(3, 17))
