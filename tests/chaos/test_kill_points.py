"""A sample of the kill points; `make chaos` runs all of them."""

from random import Random

import pytest

import recycle
from tests.chaos.kill_points import SHAPE, pairs, points, run_point
from tests.runtime.recovery_runs import ALL, problem

pytestmark = pytest.mark.timeout(120)
KINDS = ("op", "reduce", "step", "checkpoint", "recovery", "send", "receive")


def test_every_worker_has_every_kind_of_point():
    found = points()
    kinds = {(point.lines[-1].split("@")[0], point.kind) for point in found}
    everybody = [f"{action} W{at}" for action in ("kill", "hang") for at in ("0_0", "0_1", "1_0", "1_1")]
    assert kinds == {(who, kind) for who in everybody for kind in KINDS if kind != "checkpoint" or " W0" in who}
    assert sum(point.kind == "op" for point in found) == 2 * recycle.solve(problem(SHAPE, ALL), "greedy").num_ops


# The points are made in the test: a plan takes longer than it takes to collect all other tests of a folder.
@pytest.mark.parametrize(
    "kind",
    ["op", "checkpoint", "recovery", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("receive", "send", "pair"))],
)
def test_the_weights_are_those_of_the_twin(kind):
    random = Random(17)
    point = random.choice([point for point in points() + pairs(1, random) if point.kind == kind])
    assert run_point(point).problem == ""
