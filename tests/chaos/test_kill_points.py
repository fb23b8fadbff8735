"""A sample of the kill points; `make chaos` runs all of them."""

from random import Random

import pytest

import recycle
from tests.chaos.kill_points import SHAPE, points, run_point
from tests.runtime.recovery_runs import ALL, problem

pytestmark = pytest.mark.timeout(120)
ALL_POINTS = points()


def test_every_worker_has_every_kind_of_point():
    kinds = {(point.lines[-1].split("@")[0], point.kind) for point in ALL_POINTS}
    assert len(kinds) == 2 * 4 * 5
    assert sum(point.kind == "op" for point in ALL_POINTS) == 2 * recycle.solve(problem(SHAPE, ALL), "greedy").num_ops


@pytest.mark.parametrize("point", Random(17).sample(ALL_POINTS, 6), ids=str)
def test_the_weights_are_those_of_the_twin(point):
    assert run_point(point).problem == ""
