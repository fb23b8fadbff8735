"""Plans of simulations in tests: made in this process and with little effort, because most tests ask for no good plan."""

import pytest

from recycle.sim import iteration_times

# Placed ops a plan: each of the greedy method's settings is tried about once at the sizes of tests.
EFFORT = 20_000


def plan_quickly(monkeypatch: pytest.MonkeyPatch, effort: int = EFFORT) -> None:
    """Small plans take less time than the start of a process, which would not know of the effort either."""
    monkeypatch.setattr(iteration_times, "EFFORT", effort)
    monkeypatch.setattr(iteration_times, "parallel_map", lambda function, given: [function(one) for one in given])
