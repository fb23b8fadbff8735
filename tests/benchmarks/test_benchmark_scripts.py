"""The benchmarks of advice and of the planner's weak spots, in small."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("case", [0, 1, 2, 4], ids=lambda case: f"case {case}")
def test_plans_at_the_weak_spots_are_within_a_hundredth_of_the_exact_ones(case: int) -> None:
    import weak_spots

    row = weak_spots.weak(quick=True).cases[case].run()
    assert row[-1] == "yes", row


@pytest.mark.slow
def test_more_memory_that_i_frees_makes_no_plan_longer() -> None:
    import weak_spots

    row = weak_spots.weak(quick=False).cases[-1].run()
    assert row[-1] == "yes", row


@pytest.mark.slow
def test_the_benchmark_of_advice_prints_the_first_choice() -> None:
    command = [sys.executable, str(BENCHMARKS / "advise.py"), "--quick"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout
    assert "4 A100" in printed
    assert "recycle 1 × 3, 8, tp 1, 1 spare GPUs" in printed
