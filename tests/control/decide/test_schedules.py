"""Seeded schedules of failures: none gets stuck, and the same seed gives the same schedule. CI runs two thousand of them, too."""

import pytest

from tests.chaos.seeds import run_seeds
from tests.control.decide.schedules import EVENTS, run_schedule

pytestmark = pytest.mark.timeout(280)
NUM, NUM_PARTS = 400, 2


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_schedule_gets_stuck(part: int) -> None:
    size = NUM // NUM_PARTS
    happened, failed = run_seeds(run_schedule, part * size, size)
    assert failed == [], f"replay with: python -m tests.control.decide.schedules --num 1 --first {failed[0]}"
    assert set(happened) == {*EVENTS, "epoch refused"}


def test_a_seed_replays_exactly() -> None:
    assert [run_schedule(seed) for seed in range(20)] == [run_schedule(seed) for seed in range(20)]
