"""Problems with shared layers and speeds: which stage holds what, and what that costs."""

from dataclasses import replace

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import MemoryTooSmall, UserError
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Link, Profile, StageProfile

STAGE = StageProfile(
    10, 13, 9, 22, optimizer_us=8, activation_bytes=40, weight_held_bytes=20, static_bytes=80, gradient_bytes=400
)
PROFILE = Profile((STAGE,) * 3, peer_link=Link(latency_us=1, bytes_per_us=10.0)).with_equal_layers(12)


def shared(num: int, **more: object) -> Problem:
    return replace(Problem(Cluster(Shape(2, 3, 4)), PROFILE, shared_layers=num), **more)  # type: ignore[arg-type]


def test_a_stage_holds_its_layers_and_the_shared_ones_beside_them() -> None:
    held = shared(1).held_layers
    assert held is not None
    assert held.ranges == (range(5), range(3, 9), range(7, 12))
    assert held.shared == (3, 4, 7, 8)
    assert held.holders[3] == (0, 1)


def test_static_memory_and_step_count_all_layers_that_are_held() -> None:
    problem = shared(1)
    assert [problem.static_bytes(stage) for stage in range(3)] == [100, 120, 100]
    assert [problem.optimizer_us(stage) for stage in range(3)] == [10, 12, 10]


def test_a_shared_layer_is_reduced_over_the_workers_of_both_stages() -> None:
    problem = shared(1)
    # Three own layers over 2 workers, two shared ones over 4.
    assert problem.reduce_us(0) == PROFILE.ring_us(300, 2) + PROFILE.ring_us(200, 4)
    held = problem.held_layers
    assert held is not None
    assert held.sum_us([3]) == PROFILE.ring_us(100, 4)
    assert held.sum_us([3, 4]) == PROFILE.ring_us(200, 4)
    assert held.finish_of_layer_us[3] == PROFILE.ring_us(100, 4) + 2


def test_without_shared_layers_a_problem_costs_what_its_profile_says() -> None:
    problem = shared(0)
    assert problem.held_layers is None
    assert (problem.static_bytes(0), problem.optimizer_us(0), problem.reduce_us(0)) == (80, 8, PROFILE.reduce_us(0, 2))


def test_a_limit_in_micro_batches_counts_layers_where_they_are_shared() -> None:
    memory = Memory.microbatches([3, 3, 3])
    assert (shared(0, memory=memory).capacity(1), shared(0, memory=memory).held_by_forward(1)) == (3, 1)
    assert (shared(1, memory=memory).capacity(1), shared(1, memory=memory).held_by_forward(1)) == (12, 4)


def test_shared_layers_need_memory_of_their_own() -> None:
    assert shared(0, memory=Memory.bytes([130] * 3)).capacity(1) == 50
    with pytest.raises(MemoryTooSmall, match="parameters and states 100"):
        shared(1, memory=Memory.bytes([130] * 3))


def test_a_problem_with_layers_and_speeds_survives_its_json() -> None:
    problem = shared(2, speeds=((Worker(1, 2), 0.6), (Worker(0, 0), 1.0)))
    assert problem.speeds == ((Worker(1, 2), 0.6),)
    assert Problem.from_json(problem.to_json()) == problem
    assert not {"speeds", "shared_layers"} & set(shared(0).to_json())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"shared_layers": 5}, "stage 0 has only 4"),
        ({"shared_layers": -1}, "whole number from 0"),
        ({"speeds": ((Worker(2, 0), 0.5),)}, "W2_0 has a speed, but is not a worker"),
        ({"speeds": ((Worker(0, 0), 0.0),)}, "the speed of W0_0 is 0.0"),
        ({"speeds": ((Worker(0, 0), 0.5), (Worker(0, 0), 0.6))}, "two speeds"),
        ({"profile": Profile.uniform(3, 10, 13, 9), "shared_layers": 1}, "nothing says how many layers"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        replace(shared(0), **changes)  # type: ignore[arg-type]
