"""The table of rooms: who may import whom, which outside library lives where, and how long a file may be."""

import ast
import sys
from pathlib import Path

import pytest

import recycle

SOURCE = Path(recycle.__file__).parent
ANYTHING = frozenset(
    {"core", "host", "planner", "sim", "control", "runtime", "profiling", "models", "report", "evaluate", "dashboard", "cli"}
)

# package -> (packages of ours, outside libraries)
TABLE = {
    "core": (set(), set()),
    "host": ({"core"}, set()),
    "planner": ({"core", "host"}, {"ortools", "scipy", "numpy", "numba"}),
    "sim": ({"core", "host", "planner"}, {"numpy"}),
    "control": ({"core", "host"}, set()),
    "runtime": ({"core", "host", "control"}, {"torch", "safetensors"}),
    "profiling": ({"core", "host", "runtime"}, {"torch"}),
    "models": ({"core", "runtime"}, {"torch"}),
    "report": ({"core"}, {"matplotlib", "numpy"}),
    "evaluate": (
        {"core", "host", "planner", "sim", "runtime", "profiling", "models", "report"},
        {"torch", "matplotlib", "numpy"},
    ),
    "dashboard": ({"core", "report"}, set()),
    "cli": (ANYTHING, {"rich", "prometheus_client", "ortools", "scipy", "numpy", "numba", "torch", "matplotlib"}),
}
# The only files that may import these.
ONLY_IN = {"ortools": "planner/exact/cpsat.py", "scipy": "planner/exact/milp.py"}
MOST_LINES = 400

FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def parse(file):
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def imported(tree, file):
    """Every module that a file imports, at its top or inside a function, by its full name."""
    package = ["recycle", *Path(file).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from recycle import core` names a package only in its second half.
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == "recycle" else (base,)


def refused(file, modules):
    """Those of `modules` that `file` may not import, with the reason."""
    room = Path(file).parts[0]
    ours, outside = TABLE[room]
    for module in modules:
        top, *rest = module.split(".")
        if top == "recycle":
            other = rest[0] if rest else ""
            if other in TABLE and other != room and other not in ours:
                yield f"{file} imports {module}, but {room} may import only {sorted(ours) or 'nothing'} of ours"
        elif top not in sys.stdlib_module_names and top not in outside:
            yield f"{file} imports {module}, but {room} may use only {sorted(outside) or 'the standard library'}"
        elif ONLY_IN.get(top, file) != file and room != "cli":
            yield f"{file} imports {module}, but only {ONLY_IN[top]} may"


def test_every_folder_has_its_row_in_the_table():
    folders = {Path(file).parts[0] for file in FILES if "/" in file}
    assert folders <= set(TABLE)
    assert {file for file in FILES if "/" not in file} <= {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("file", [file for file in FILES if "/" in file])
def test_a_file_imports_only_what_its_room_may(file):
    assert list(refused(file, imported(parse(file), file))) == []


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short_and_says_what_it_is(file):
    assert ast.get_docstring(parse(file)), f"{file} has no docstring"
    assert len((SOURCE / file).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/plan.py", "import numpy"),
        ("core/plan.py", "from recycle.planner.model.schedule import Schedule"),
        ("core/plan.py", "def f():\n    import numpy as np"),
        ("planner/greedy.py", "from ortools.sat.python import cp_model"),
        ("planner/exact/cpsat.py", "import scipy.optimize"),
        ("planner/solve.py", "import torch"),
        ("planner/solve.py", "from recycle import sim"),
        ("planner/solve.py", "from ..sim import clock"),
        ("sim/replay.py", "from recycle.runtime.execute.executor import play"),
        ("control/client.py", "import rich"),
        ("runtime/worker.py", "from recycle.planner import solve"),
        ("report/figures.py", "if True:\n    from recycle.sim import clock"),
        ("dashboard/page.py", "import flask"),
    ],
)
def test_the_table_refuses_what_lies_outside_it(file, code):
    assert len(list(refused(file, imported(ast.parse(code), file)))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/plan.py", "import json\nfrom recycle.core.op import Op\nfrom recycle import __version__"),
        ("planner/exact/cpsat.py", "from ortools.sat.python import cp_model"),
        ("planner/exact/milp.py", "import scipy.optimize"),
        ("planner/kernel.py", "import numba\nfrom .schedule import Schedule\nfrom ..core.plan import Plan"),
        ("sim/replay.py", "import numpy\nfrom recycle import core, planner"),
        ("cli/plan.py", "import rich\nfrom recycle.runtime import worker"),
    ],
)
def test_the_table_allows_what_lies_inside_it(file, code):
    assert list(refused(file, imported(ast.parse(code), file))) == []
