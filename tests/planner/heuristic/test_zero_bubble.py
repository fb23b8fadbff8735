"""Without failures the same techniques are the zero-bubble schedules; the reference spans are those of Zero Bubble (ICLR'24)."""

import pytest

import recycle
from recycle.core.plans.rules import check

SIZES = [(4, 8), (8, 16), (16, 64)]


def spans(*slots: int) -> list[tuple[tuple[int, int], int]]:
    return list(zip(SIZES, slots, strict=True))


def period_us(num_stages: int, num_microbatches: int, memory: int | list[int], techniques: str) -> int:
    problem = recycle.problem(1, num_stages, num_microbatches, costs=(1, 1, 1), memory=memory, techniques=techniques)
    plan = recycle.solve(problem, time_limit_s=20)
    assert check(plan) == []
    return plan.period_us


@pytest.mark.parametrize(("size", "slots"), spans(33, 69, 237))
def test_without_techniques_and_with_its_memory_1f1b_is_found(size: tuple[int, int], slots: int) -> None:
    num_stages, num_microbatches = size
    assert period_us(num_stages, num_microbatches, list(range(num_stages, 0, -1)), "none") == slots


@pytest.mark.parametrize(("size", "slots"), spans(27, 55, 207))
def test_with_the_memory_of_1f1b_the_bubble_is_as_small_as_zero_bubble_makes_it(size: tuple[int, int], slots: int) -> None:
    assert period_us(*size, size[0], "decoupled,staggered") <= slots


@pytest.mark.parametrize(("size", "slots"), spans(24, 48, 192))
def test_with_twice_the_memory_there_is_no_bubble(size: tuple[int, int], slots: int) -> None:
    assert period_us(*size, 2 * size[0], "decoupled,staggered") == slots


def test_more_pipelines_change_nothing() -> None:
    problem = recycle.problem(4, 4, 8, costs=(1, 1, 1), memory=4)
    assert recycle.solve(problem, time_limit_s=20).period_us == 27
