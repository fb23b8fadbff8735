"""The plan library: built once, resumed where it was stopped, and never mixed with another."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import recycle
from recycle import Library, Memory, Problem, Profile, Shape, Techniques
from recycle.core.cluster import Cluster
from recycle.core.errors import FileProblem, UserError
from recycle.core.plans.rules import check
from recycle.planner.build_library import Built

MOST = 3
PROBLEM = recycle.problem(3, 2, 3, costs=(2, 3, 2), memory=4)


def built(folder: Path, problem: Problem = PROBLEM, most: int = MOST) -> list[Built]:
    return sorted(recycle.build(folder, problem, most, "greedy", num_processes=1), key=lambda plan: plan.num_failures)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "plans"
    assert [plan.was_there for plan in built(folder)] == [False] * (MOST + 1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A finished library that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "plans"))


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """What lies in a folder: when each file was written, and its text."""
    return {path.name: (path.stat().st_mtime_ns, path.read_text()) for path in sorted(folder.iterdir())}


def test_there_is_one_legal_plan_for_each_number_of_failures(folder: Path) -> None:
    assert list(files(folder)) == ["library.json", "plan-0000.json", "plan-0001.json", "plan-0002.json", "plan-0003.json"]
    library = Library.open(folder)
    assert library.problem == PROBLEM
    for num_failures in range(MOST + 1):
        plan = library.get(num_failures)
        assert check(plan) == []
        assert len(plan.problem.cluster.failed) == num_failures
        assert replace(plan.problem, cluster=Cluster(PROBLEM.shape)) == PROBLEM


def test_the_report_says_what_the_plans_say(folder: Path) -> None:
    library = Library.open(folder)
    for plan in built(folder):
        assert plan.was_there
        stored = library.get(plan.num_failures)
        assert (plan.period_us, plan.bound_us) == (stored.period_us, stored.quality.bound_us)


def test_failures_of_the_given_problem_do_not_matter(folder: Path) -> None:
    dead = recycle.problem(3, 2, 3, fail="W1_1", costs=(2, 3, 2), memory=4)
    assert all(plan.was_there for plan in built(folder, dead))


def remove(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    path.write_text(path.read_text()[:200])


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00 garbage")


def empty(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("spoil", [remove, cut_short, fill_with_garbage, empty])
def test_only_what_is_missing_or_broken_is_planned_again(folder: Path, spoil: Callable[[Path], None]) -> None:
    before = files(folder)
    spoil(folder / "plan-0001.json")
    assert [plan.was_there for plan in built(folder)] == [True, False, True, True]
    after = files(folder)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == {"plan-0001.json"}
    assert check(Library.open(folder).get(1)) == []


def test_a_library_grows_to_more_failures(folder: Path) -> None:
    before = files(folder)
    assert [plan.was_there for plan in built(folder, most=4)] == [True] * 4 + [False]
    assert before.items() < files(folder).items()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (recycle.problem(3, 2, 4, costs=(2, 3, 2), memory=4), "another shape"),
        (recycle.problem(3, 2, 3, costs=(2, 3, 3), memory=4), "another profile"),
        (recycle.problem(3, 2, 3, costs=(2, 3, 2), comm=1, memory=4), "another profile"),
        (recycle.problem(3, 2, 3, costs=(2, 3, 2), memory=5), "another memory limit"),
        (recycle.problem(3, 2, 3, costs=(2, 3, 2)), "another memory limit"),
        (recycle.problem(3, 2, 3, costs=(2, 3, 2), memory=4, techniques="adaptive"), "other techniques"),
    ],
)
def test_a_library_made_from_something_else_is_refused_and_left_alone(folder: Path, other: Problem, difference: str) -> None:
    before = files(folder)
    with pytest.raises(FileProblem, match=f"^{folder} holds a library made from {difference}: choose another folder") as problem:
        built(folder, other)
    assert "\n" not in str(problem.value)
    assert files(folder) == before


def test_a_library_of_another_release_is_refused(folder: Path) -> None:
    head = json.loads((folder / "library.json").read_text())
    (folder / "library.json").write_text(json.dumps(head | {"release": "0.0.7"}))
    for ask in (lambda: Library.open(folder), lambda: built(folder)):
        with pytest.raises(FileProblem, match=rf"made by release 0\.0\.7, but this is {recycle.__version__}: build the library"):
            ask()


@pytest.mark.parametrize("text", ["", "{}", '{"format": "recycle-plan", "version": 1}', "[1, 2]"])
def test_a_folder_whose_head_is_something_else_is_refused(folder: Path, text: str) -> None:
    (folder / "library.json").write_text(text)
    with pytest.raises(FileProblem, match=r"library\.json"):
        built(folder)


def test_a_head_that_describes_no_problem_is_refused(folder: Path) -> None:
    head = json.loads((folder / "library.json").read_text())
    (folder / "library.json").write_text(json.dumps(head | {"problem": {"shape": 3}}))
    with pytest.raises(FileProblem, match=r"does not describe a problem .*: build the library again"):
        Library.open(folder)


def test_a_plan_of_another_library_is_refused_and_left_alone(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    built(foreign, recycle.problem(3, 2, 3, costs=(5, 5, 5), memory=4), most=1)
    shutil.copy(foreign / "plan-0001.json", folder / "plan-0001.json")
    before = files(folder)
    for ask in (lambda: Library.open(folder).get(1), lambda: built(folder)):
        with pytest.raises(
            FileProblem, match=r"plan-0001\.json was made from another profile than its library: remove that file"
        ):
            ask()
    assert files(folder) == before


def test_a_plan_under_the_name_of_another_number_is_refused(folder: Path) -> None:
    shutil.copy(folder / "plan-0001.json", folder / "plan-0002.json")
    for ask in (lambda: Library.open(folder).get(2), lambda: built(folder)):
        with pytest.raises(FileProblem, match=r"plan-0002\.json is a plan for 1 failures, not 2: remove that file"):
            ask()


def test_a_plan_that_is_not_there_says_how_to_get_it(folder: Path) -> None:
    with pytest.raises(
        FileProblem,
        match=f"^{folder} has no plan for 4 failures: build the library further with 'recycle plan --library --max-failures'$",
    ):
        Library.open(folder).get(4)


def test_there_is_no_library_in_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"cannot read .*library\.json"):
        Library.open(tmp_path)


@pytest.mark.parametrize("most", [-1, 5])
def test_more_failures_than_can_be_survived_are_refused_before_anything_is_written(tmp_path: Path, most: int) -> None:
    with pytest.raises(UserError, match=f"{most} failures are too many: at most 4 workers can fail"):
        built(tmp_path / "plans", most=most)
    assert not (tmp_path / "plans").exists()


def test_a_profile_with_bytes_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    stage = replace(
        Profile.uniform(1, 2, 3, 2).stages[0], activation_bytes=7, weight_held_bytes=3, static_bytes=2, output_bytes=9
    )
    profile = Profile((stage, stage), device_bytes=40)
    problem = Problem(Cluster(Shape(2, 2, 2)), profile, Memory.bytes((40, 30)), Techniques(staggered=False))
    assert Library.create(tmp_path, problem).problem == Library.open(tmp_path).problem == problem


def test_two_processes_make_the_same_library_as_one(original: Path, tmp_path: Path) -> None:
    list(recycle.build(tmp_path / "plans", PROBLEM, MOST, "greedy", num_processes=2))
    one, two = Library.open(original), Library.open(tmp_path / "plans")
    for num_failures in range(MOST + 1):
        assert one.get(num_failures).rows == two.get(num_failures).rows
