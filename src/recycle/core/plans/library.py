"""Library: a folder with one plan for each number of failures.

A library of another profile, shape, memory limit or release is refused, never mixed.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from recycle.core.cluster import Cluster
from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text
from recycle.core.plans.plan import FORMAT as PLAN_FORMAT
from recycle.core.plans.plan import VERSION as PLAN_VERSION
from recycle.core.plans.plan import Plan
from recycle.core.problem import Problem
from recycle.core.release import RELEASE

FORMAT, VERSION = "recycle-library", 1


@dataclass(frozen=True, slots=True)
class Library:
    """A folder with a plan of `problem` for each number of failures. `recycle.build` fills one, `open` reads it.

    Example:
        >>> import recycle, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> plans = list(recycle.build(folder, recycle.problem(2, 2, 4, costs="1,1,1"), max_failures=0, num_processes=1))
        >>> recycle.Library.open(folder).get(0).period_us == plans[0].period_us
        True
    """

    folder: Path
    problem: Problem

    @staticmethod
    def create(folder: Path, problem: Problem) -> "Library":
        """Open the library at `folder` for `problem`, or make it if there is none; refuse one of another problem."""
        library = Library(folder, without_failures(problem))
        if (folder / "library.json").exists():
            found = Library.open(folder)
            if found.problem != library.problem:
                raise FileProblem(
                    f"{folder} holds a library made from {_difference(found.problem, library.problem)}: "
                    "choose another folder, or remove that one"
                )
            return found
        head = {"format": FORMAT, "version": VERSION, "release": RELEASE, "problem": library.problem.to_json()}
        write_text(folder / "library.json", json.dumps(head, indent=1) + "\n")
        return library

    @staticmethod
    def open(folder: Path | str) -> "Library":
        """Open the library at `folder`, refusing one of another release."""
        folder = Path(folder)
        data = read_json(folder / "library.json", FORMAT, VERSION)
        if data.get("release") != RELEASE:
            raise FileProblem(
                f"{folder} was made by release {data.get('release')}, but this is {RELEASE}: build the library again"
            )
        try:
            return Library(folder, Problem.from_json(data["problem"]))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise FileProblem(
                f"{folder / 'library.json'} does not describe a problem ({problem}): build the library again"
            ) from None

    def path(self, num_failures: int) -> Path:
        return self.folder / f"plan-{num_failures:04d}.json"

    def look(self, num_failures: int) -> int | None:
        """Return the period of the plan for `num_failures` without reading its rows, or None if there is no whole one.

        A plan of another problem is refused.
        """
        path = self.path(num_failures)
        if not path.exists():
            return None
        try:
            data = read_json(path, PLAN_FORMAT, PLAN_VERSION)
            found = Problem.from_json(data["problem"])
            is_whole = set(data["rows"]) == set(map(str, found.cluster.live_workers())) and all(data["rows"].values())
            period_us = int(data["period_us"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # a broken file is planned again
        self._refuse_foreign(path, found, num_failures)
        return period_us if is_whole else None

    def put(self, num_failures: int, text: str) -> None:
        """Store the text of a plan."""
        write_text(self.path(num_failures), text)

    def get(self, num_failures: int) -> Plan:
        """Return the plan for `num_failures`."""
        path = self.path(num_failures)
        if not path.exists():
            raise FileProblem(
                f"{self.folder} has no plan for {num_failures} failures: build the library further with "
                "'recycle plan --library --max-failures'"
            )
        plan = Plan.load(path)
        self._refuse_foreign(path, plan.problem, num_failures)
        return plan

    def _refuse_foreign(self, path: Path, found: Problem, num_failures: int) -> None:
        if without_failures(found) != self.problem:
            raise FileProblem(f"{path} was made from {_difference(found, self.problem)} than its library: remove that file")
        if len(found.cluster.failed) != num_failures:
            raise FileProblem(f"{path} is a plan for {len(found.cluster.failed)} failures, not {num_failures}: remove that file")


def without_failures(problem: Problem) -> Problem:
    """The same problem with every worker alive."""
    return replace(problem, cluster=Cluster(problem.shape))


def _difference(found: Problem, wanted: Problem) -> str:
    for name, one, other in (
        ("shape", found.shape, wanted.shape),
        ("profile", found.profile, wanted.profile),
        ("memory limit", found.memory, wanted.memory),
        ("number of shared layers", found.shared_layers, wanted.shared_layers),
        ("set of slow workers", found.speeds, wanted.speeds),
    ):
        if one != other:
            return f"another {name}"
    return "other techniques"
