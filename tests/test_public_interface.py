"""The names that `import recycle` gives, used the way the README uses them."""

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import recycle
from recycle.planner.profiles.catalog import GPUS, MODELS

HEAVY = {"torch", "numba", "numpy", "ortools", "scipy", "matplotlib", "rich"}


def test_five_lines_make_a_plan(tmp_path: Path) -> None:
    problem = recycle.problem(3, 4, 6, fail="W1_2", costs=(1, 1, 1), memory=6)
    plan = recycle.solve(problem)
    assert plan.period_us == 27
    assert recycle.check(plan) == []
    plan.save(tmp_path / "plan.json")
    assert recycle.Plan.load(tmp_path / "plan.json") == plan


def test_five_lines_make_a_library(tmp_path: Path) -> None:
    profile = recycle.estimate(MODELS["gpt3-medium"], GPUS["a100-80"], 2)
    problem = recycle.problem(2, 2, 2, profile=profile)
    periods = {plan.num_failures: plan.period_us for plan in recycle.build(tmp_path / "plans", problem, max_failures=1)}
    assert sorted(periods) == [0, 1]
    assert recycle.Library.open(tmp_path / "plans").get(1).period_us == periods[1]


def test_five_lines_compare_systems_under_failures() -> None:
    job = recycle.simulated_job("layers=4,hidden=512,heads=8,sequence=512", "a100-80", 3, 2, 4)
    lines = [f"0,add,node{number}" for number in range(6)]
    trace = recycle.Trace.parse("\n".join([*lines, "600000,remove,node3", "# end 3600000"]))
    runs = {name: recycle.measure(record) for name, record in recycle.simulate(job, trace, "recycle,ideal").items()}
    assert 0 < runs["recycle"].throughput < runs["ideal"].throughput
    assert runs["recycle"].dropped_samples == 0


def test_a_plan_is_replayed_in_one_line() -> None:
    plan = recycle.solve(recycle.problem(2, 2, 3, fail="W1_1", costs=(3, 2, 1)))
    assert recycle.replay(plan).steady_period_us == plan.period_us
    assert recycle.replay(plan, recycle.Conditions(slow={recycle.Worker(0, 0): 2.0})).steady_period_us > plan.period_us


def test_texts_and_numbers_describe_the_same_problem() -> None:
    one = recycle.problem(3, 4, 6, fail=["W1_2", "W0_0"], costs=(1, 2, 3), memory=[4, 3, 2, 1], techniques=recycle.Techniques())
    other = recycle.problem(
        3, 4, 6, fail="W0_0, W1_2", costs="1,2,3", memory="4,3,2,1", techniques="adaptive,decoupled,staggered"
    )
    assert one == other


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["Job", "cut", "train"])
def test_the_example_of_a_docstring_runs(name: str) -> None:
    public = getattr(recycle, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(public, name, globs=vars(sys.modules[public.__module__]).copy())
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_training_takes_eleven_parameters_at_most() -> None:
    assert len(inspect.signature(recycle.train).parameters) <= 11


def test_every_public_name_is_there() -> None:
    assert all(hasattr(recycle, name) for name in recycle.__all__)
    assert not hasattr(recycle, "planet")


def test_importing_recycle_loads_no_library_but_the_standard_one() -> None:
    code = "import sys, recycle; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert HEAVY.isdisjoint(loaded.stdout.split())


def test_a_plan_is_loaded_and_checked_without_any_of_them(tmp_path: Path) -> None:
    recycle.solve(recycle.problem(2, 2, 2, fail="W1_1", costs=(1, 1, 1))).save(tmp_path / "plan.json")
    code = (
        "import sys, pathlib, recycle\n"
        "assert recycle.check(recycle.Plan.load(pathlib.Path(sys.argv[1]))) == []\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "plan.json")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert HEAVY.isdisjoint(loaded.stdout.split())
