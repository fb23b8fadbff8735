"""More memory never makes a plan longer: not that which I frees, in a limit in bytes."""

from dataclasses import replace

import pytest

import recycle
from recycle.core.cluster import Cluster, Shape
from recycle.core.plans.rules import check
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Link, Profile, StageProfile

EFFORT = 1_500_000


def hot_problem(kept_bytes: int) -> Problem:
    """The second stage is 1.3 times as slow as the others, and a message takes as long as F; I frees 1000 - `kept_bytes`."""
    even = StageProfile(151, 211, 113, 324, activation_bytes=1000, weight_held_bytes=kept_bytes, static_bytes=700)
    hot = replace(even, forward_us=196, input_us=274, weight_us=146, fused_us=420)
    profile = Profile((even, hot, even, even, even), Link(151, 1e9))
    return Problem(Cluster(Shape(3, 5, 11)), profile, Memory.bytes([6700] * 5))


@pytest.mark.parametrize("kept_bytes", [750, 500, 250, 0])
def test_memory_that_i_frees_makes_no_plan_longer(kept_bytes: int) -> None:
    plan = recycle.solve(hot_problem(kept_bytes), "greedy", effort=EFFORT)
    assert check(plan) == []
    assert plan.period_us <= recycle.solve(hot_problem(1000), "greedy", effort=EFFORT).period_us
