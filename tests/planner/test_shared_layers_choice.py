"""How many layers are shared: by memory, by what is kept with one worker dead, and by uneven stages."""

from dataclasses import replace
from statistics import fmean

import pytest

import recycle
from recycle.core.cluster import Cluster, Shape
from recycle.core.errors import UserError
from recycle.core.layer_shares import LayerShare
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile, StageProfile
from recycle.core.units import count_text
from recycle.planner import shared_layers_choice
from recycle.planner.shared_layers_choice import choose_shared_layers

# A stage of six layers: 600 bytes of state and 120 of activations for each micro-batch in flight.
STAGE = StageProfile(60, 78, 54, 132, activation_bytes=120, weight_held_bytes=60, static_bytes=600, gradient_bytes=10)
PROFILE = Profile((STAGE,) * 4).with_layers([6] * 4)


def problem(memory: Memory, pipelines: int = 3, profile: Profile = PROFILE, microbatches: int = 6) -> Problem:
    return Problem(Cluster(Shape(pipelines, 4, microbatches)), profile, memory)


def test_with_memory_enough_so_many_layers_are_shared_that_more_would_keep_no_more() -> None:
    choice = choose_shared_layers(problem(Memory.unlimited()))
    means = {option.num: (option.fault_free_us + fmean(option.one_dead_us)) / 2 for option in choice.options}
    assert choice.num == min(num for num, mean in means.items() if mean <= 1.01 * min(means.values())) > 0
    assert choice.too_large is None
    assert min(means.values()) < means[max(means)] * 1.01 < 0.95 * means[0]
    assert choice.chosen.fault_free_us / fmean(choice.chosen.one_dead_us) > 0.87  # 11 of 12 workers are alive
    assert choice.chosen.guest_bytes == 2 * choice.num * 100  # layers of either neighbour
    assert f"share {count_text(choice.num, 'layer')}" in choice.sentence()
    assert "\n" not in choice.sentence()


def test_layers_that_leave_no_room_for_micro_batches_are_not_shared() -> None:
    """One shared layer would fit, but then an inner stage has one micro-batch in flight, and waits."""
    choice = choose_shared_layers(problem(Memory.bytes([1010] * 4)))
    assert (choice.num, choice.too_large) == (0, 2)
    assert choice.options[1].fault_free_us > choice.options[0].fault_free_us


@pytest.mark.parametrize(("most_bytes", "num"), [(800, 0), (1010, 1)])
def test_a_limit_in_bytes_is_never_exceeded(most_bytes: int, num: int) -> None:
    # With one shared layer an inner stage holds 800 bytes of state, with two of them 1,000, and needs 12 bytes more to run.
    slim = replace(PROFILE, stages=(replace(STAGE, activation_bytes=12, weight_held_bytes=6),) * 4)
    choice = choose_shared_layers(problem(Memory.bytes([most_bytes] * 4), profile=slim))
    assert (choice.num, choice.too_large) == (num, num + 1)
    assert choice.chosen.most_bytes <= most_bytes
    assert f"; {num + 1} would not fit into its memory" in choice.sentence()


def test_memory_that_plans_do_not_limit_is_respected_too() -> None:
    """The plans are limited to micro-batches or not at all, but the device has so many bytes."""
    free = choose_shared_layers(problem(Memory.microbatches([8] * 4)))
    needed = {option.num: option.most_bytes for option in free.options}
    assert needed[0] < needed[1] < needed[2]
    tight = choose_shared_layers(problem(Memory.microbatches([8] * 4)), limit_bytes=needed[2] - 1)
    assert (tight.num, tight.too_large) == (1, 2)
    device = replace(PROFILE, device_bytes=needed[1] - 1)
    assert choose_shared_layers(problem(Memory.microbatches([8] * 4), profile=device)).num == 0


def test_equal_stages_whose_peers_cannot_take_over_share_nothing() -> None:
    choice = choose_shared_layers(problem(Memory.unlimited(), pipelines=1, microbatches=24))
    assert choice.num == 0
    assert choice.chosen.one_dead_us == ()
    assert "share no layers" in choice.sentence()


def test_uneven_stages_share_layers_even_if_nobody_can_die() -> None:
    head = (LayerShare(),) * 5 + (LayerShare(3, 3, 3),)
    heavy = StageProfile(80, 104, 72, 176, activation_bytes=160, weight_held_bytes=80, static_bytes=800)
    uneven = Profile((STAGE,) * 3 + (heavy,), layers=((LayerShare(),) * 6,) * 3 + (head,))
    choice = choose_shared_layers(problem(Memory.unlimited(), pipelines=1, profile=uneven))
    periods = {option.num: option.fault_free_us for option in choice.options}
    assert choice.num > 0
    assert periods[choice.num] < 0.97 * periods[0]


def test_dead_workers_and_the_own_number_of_a_problem_do_not_count() -> None:
    whole = recycle.problem(3, 4, 6, costs=(60, 78, 54), layers=24)
    other = recycle.problem(3, 4, 6, costs=(60, 78, 54), layers=24, shared_layers=3, fail="W1_2,W2_2")
    assert choose_shared_layers(other) == choose_shared_layers(whole)


def test_large_problems_are_decided_by_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_layers_choice, "solve", None)
    choice = choose_shared_layers(recycle.problem(32, 64, 128, costs=(100, 130, 90), memory=128, layers=256))
    assert choice.num in (1, 2)


def test_one_stage_has_no_neighbours() -> None:
    assert choose_shared_layers(recycle.problem(2, 1, 3, costs=(1, 1, 1), layers=4)).num == 0


def test_without_layers_nothing_can_be_chosen() -> None:
    with pytest.raises(UserError, match="nothing says how many layers a stage has"):
        choose_shared_layers(recycle.problem(2, 2, 3, costs=(1, 1, 1)))
