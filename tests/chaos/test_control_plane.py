"""A sample of the schedules of the whole control plane; CI runs ten thousand, `make chaos` a million."""

import pytest

from tests.chaos.control_plane.schedules import EVENTS, run_schedule
from tests.chaos.seeds import run_seeds

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("part", range(2))
def test_the_job_is_done_and_nothing_is_lost(part: int) -> None:
    happened, failed = run_seeds(run_schedule, 50 * part, 50)
    assert failed == [], f"replay with: python -m tests.chaos.control_plane --num 1 --first {failed[0]}"
    assert set(happened) == set(EVENTS)


def test_a_seed_replays_exactly() -> None:
    assert [run_schedule(seed) for seed in range(5)] == [run_schedule(seed) for seed in range(5)]
