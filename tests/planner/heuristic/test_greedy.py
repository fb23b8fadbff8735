"""The greedy method: near the bound at real sizes, fair to the peers, the same on every run, and done in time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import recycle
from recycle import Plan, Problem
from recycle.core.plans.rules import check
from tests.planner.strategies import problems
from tests.processes import depends_on_load

QUICK = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
FAILURES = "W1_2,W3_0,W5_5,W7_7,W2_4,W6_1"
SYNCHRONOUS, ALL = "adaptive,decoupled", "adaptive,decoupled,staggered"


def real_problem(fail: str = "", memory: int | str = "unlimited", techniques: str = ALL) -> Problem:
    """Sixty-four workers, with costs in a ratio that was measured."""
    return recycle.problem(8, 8, 32, fail=fail, costs=(10, 13, 9), comm=1, memory=memory, techniques=techniques)


@pytest.mark.parametrize("techniques", [SYNCHRONOUS, ALL])
@pytest.mark.parametrize("num_failures", [0, 1, 6])
def test_with_memory_to_spare_the_bound_of_normalised_failures_is_reached(num_failures: int, techniques: str) -> None:
    plan, _ = recycle.solve_normalized(real_problem(techniques=techniques), num_failures, "greedy")
    assert plan.quality.status == "optimal"


@pytest.mark.parametrize("techniques", [SYNCHRONOUS, ALL])
@pytest.mark.parametrize(("memory", "most_over"), [("unlimited", 1.02), (16, 1.02), (8, 1.12)])
def test_failures_anywhere_are_planned_near_the_bound(memory: int | str, most_over: float, techniques: str) -> None:
    plan = recycle.solve(real_problem(FAILURES, memory, techniques), "greedy", effort=1_000_000)
    assert check(plan) == []
    assert plan.gap <= most_over


@QUICK
@given(problems())
def test_peers_share_a_dead_workers_micro_batches_evenly_and_the_living_keep_their_own(problem: Problem) -> None:
    plan = recycle.solve(problem, "greedy", effort=1)
    for stage in range(problem.shape.num_stages):
        rows = [row for row in plan.rows if row.worker.stage == stage]
        loads = [row.kinds.count("F") for row in rows]
        assert max(loads) - min(loads) <= 1
        for row in rows:
            mine = {slot.op.microbatch.index for slot in plan.slots(row) if not slot.is_rerouted}
            assert mine == set(range(problem.shape.num_microbatches))


@QUICK
@given(problems())
def test_more_effort_is_never_worse(problem: Problem) -> None:
    little, much = (recycle.solve(problem, "greedy", effort=effort) for effort in (1, 20_000))
    assert check(little) == []
    assert much.period_us <= little.period_us


def test_another_process_makes_the_same_plan(tmp_path: Path) -> None:
    here = recycle.solve(real_problem(FAILURES, 8), "greedy", effort=300_000)
    code = (
        "import sys, recycle\n"
        f"problem = recycle.problem(8, 8, 32, fail={FAILURES!r}, costs=(10, 13, 9), comm=1, memory=8)\n"
        "recycle.solve(problem, 'greedy', effort=300_000).save(__import__('pathlib').Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "plan.json")], check=True, timeout=120)
    assert Plan.load(tmp_path / "plan.json").rows == here.rows


def test_a_time_limit_ends_the_search() -> None:
    problem = recycle.problem(16, 16, 64, fail="W1_2", costs=(10, 13, 9), comm=1, memory=16)
    recycle.solve(problem, "greedy", effort=1)  # the scheduler is compiled on its first use
    began = time.monotonic()
    plan = recycle.solve(problem, "greedy", time_limit_s=0.5)
    with depends_on_load():
        assert time.monotonic() - began < 30
    assert check(plan) == []


def test_once_loaded_nothing_is_compiled_amid_a_search() -> None:
    """In a process of its own, in which nothing was loaded before."""
    script = """
from numba.core.dispatcher import Dispatcher
import recycle
from recycle.planner.heuristic import greedy
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic import priority_kernel

def compiled():
    # The other kernels are compiled into those that call them.
    parts = (kernel.list_schedule, kernel.last_ends, kernel.right_shift, kernel.justify, priority_kernel.priority_schedule)
    assert all(isinstance(part, Dispatcher) for part in parts)
    return {part.__name__: part.signatures for part in parts}

assert not any(compiled().values())
greedy.compile_kernels()
loaded = compiled()
assert all(loaded.values()), loaded
for techniques in ("adaptive,decoupled,staggered", "adaptive,decoupled", "adaptive,staggered", "adaptive"):
    for memory in (6, "unlimited"):
        for fail in ("", "W2_0", "W1_2,W0_1", "W0_0,W1_1,W2_2,W0_3"):
            problem = recycle.problem(3, 4, 6, fail=fail, costs=(10, 13, 9), comm=1, memory=memory, techniques=techniques)
            recycle.solve(problem, "greedy", effort=20_000)
assert compiled() == loaded
print("nothing more")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.stdout, ran.stderr) == ("nothing more\n", "")
