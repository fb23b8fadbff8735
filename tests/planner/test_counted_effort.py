"""A plan depends on its problem alone: by default every search counts its effort, and no clock decides."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import recycle

# Problems whose search ends by its effort: the bound is not met, and CP-SAT proves nothing in so little.
EFFORT = 1_500_000
EXAMPLE = recycle.problem(3, 4, 6, fail="W1_2", costs="10,13,9", comm=1, memory=4)
ADAPTIVE = recycle.problem(4, 8, 16, fail="W1_2", costs="1,1,1", memory="8,7,6,5,4,3,2,1", techniques="adaptive")
CUTS = recycle.problem(3, 4, 6, fail="W1_2", costs="40,52,36", comm=1, memory=8, layers=16, shared_layers=2)
SMALL = recycle.problem(2, 2, 3, fail="W1_1", costs="3,4,2", comm=1, memory=2)


@contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes for each core compute meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("problem", "method"),
    [(EXAMPLE, "auto"), pytest.param(ADAPTIVE, "greedy", marks=pytest.mark.slow), (SMALL, "milp"), (CUTS, "greedy")],
)
def test_the_same_plan_is_made_on_an_idle_and_on_a_busy_machine(problem: recycle.Problem, method: str) -> None:
    idle = recycle.solve(problem, method, effort=EFFORT).dumps()
    with busy_machine():
        assert recycle.solve(problem, method, effort=EFFORT).dumps() == idle


def test_the_same_plan_for_any_failures_is_made_on_an_idle_and_on_a_busy_machine() -> None:
    idle, distribution = recycle.solve_normalized(EXAMPLE, 2, effort=EFFORT)
    with busy_machine():
        busy, other = recycle.solve_normalized(EXAMPLE, 2, effort=EFFORT)
    assert busy.dumps() == idle.dumps()
    assert other == distribution


def test_a_plan_file_has_no_seconds() -> None:
    plan = recycle.solve(SMALL, "greedy")
    assert "seconds" not in plan.head()
    assert recycle.Plan.parse(plan.dumps()).quality.seconds == 0
