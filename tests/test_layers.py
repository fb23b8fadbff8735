"""The table of rooms: which package may import which, in which order sub-packages lie, and how large files and folders may be."""

import ast
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import recycle

SOURCE = Path(recycle.__file__).parent
ANYTHING = frozenset(
    {
        "core",
        "host",
        "planner",
        "sim",
        "control",
        "runtime",
        "profiling",
        "models",
        "report",
        "evaluate",
        "integrations",
        "loggers",
        "dashboard",
        "cli",
    }
)

# package -> (packages of ours, outside libraries)
TABLE = {
    "core": (set(), {"msgspec"}),
    "host": ({"core"}, {"cloudpickle", "setproctitle"}),
    "planner": ({"core", "host"}, {"ortools", "scipy", "numpy", "numba"}),
    "sim": ({"core", "host", "planner"}, {"msgspec", "numpy"}),
    "control": ({"core", "host"}, set()),
    "runtime": ({"core", "host", "control"}, {"msgspec", "torch", "safetensors"}),
    "profiling": ({"core", "host", "runtime"}, {"torch"}),
    "models": ({"core", "runtime"}, {"torch"}),
    "report": ({"core"}, {"matplotlib", "msgspec", "numpy"}),
    "evaluate": (
        {"core", "host", "planner", "sim", "runtime", "profiling", "models", "report"},
        {"torch", "matplotlib", "numpy"},
    ),
    "integrations": ({"core", "host", "control", "runtime"}, {"ray", "yaml"}),
    "loggers": ({"core", "runtime"}, {"torch", "wandb", "mlflow"}),
    "dashboard": ({"core", "report"}, {"numpy", "starlette", "uvicorn"}),
    "api": ({"core", "planner", "runtime", "cli"}, {"torch"}),
    "cli": (ANYTHING, {"rich", "prometheus_client", "msgspec", "ortools", "scipy", "numpy", "numba", "torch", "matplotlib"}),
}
# Inside a package, a room (a module or a sub-package) may import the rooms of lines above its own.
ORDER = {
    "core": [
        "errors release layers",
        "units files op cluster layer_shares",
        "profile time_shares",
        "layer_sums",
        "held_layers",
        "problem",
        "plans events",
    ],
    "host": [
        "process_lifetime process_title stop_signals scratch folder_lock interfaces free_memory by_value",
        "process_pool",
        "parallel_map",
    ],
    "planner": [
        "profiles model problem_from_text",
        "exact heuristic failure_normalization whole_layers",
        "dead_placement",
        "solve",
        "build_library live_planner kept_throughput shared_layers_choice proven_bound",
    ],
    "sim": [
        "model_layers measured_model policy failure_model one_f_one_b replay fault_free_schedule",
        "job pipeline_groups failure_traces",
        "iteration_times",
        "shared_layer_choice",
        "systems",
        "campaign",
        "advise reproduce",
    ],
    "control": ["planning drift", "decide", "store", "net"],
    "runtime": [
        "boundary",
        "compute",
        "data",
        "checkpoint options",
        "transport cutting",
        "execute job",
        "worker movable_layers job_checks",
        "coordinator",
        "callbacks",
        "launch",
    ],
    "profiling": [
        "machine worker_pool contention stopwatch emulated_device",
        "layer_times",
        "stage_times plan_runner",
        "profile_fit",
        "rehearsal",
    ],
    "models": ["gpt text"],
    "dashboard": ["reading", "views", "web"],
    "report": ["timeline", "record", "render", "figures export"],
    "evaluate": ["hardware", "variant_plans results against_simulation", "cluster_benchmark"],
    "integrations": [
        "job_commands child_process",
        "kubernetes_job ray_job ray_cluster ray_agent",
        "ray_launcher",
        "kubernetes slurm ray",
    ],
    "loggers": ["log_values kept_run", "csv_logger mlflow_logger tensorboard_logger wandb_logger", "select"],
    "api": ["run_folders", "train"],
    "cli": ["terminal arguments profile_text", "live", "planning simulation", "training", "machines", "demo measuring", "main"],
}
# The only files that may import these.
ONLY_IN = {"ortools": "planner/exact/cpsat.py", "scipy": "planner/exact/milp.py"}
# What runs on machines that have torch and nothing else of ours: these sub-packages import none of these packages.
BARE = {"evaluate/hardware": {"planner", "sim", "report"}}
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 400, 60, 14

FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
MODULES = {".".join(("recycle", *Path(file).with_suffix("").parts)).removesuffix(".__init__"): file for file in FILES}


@cache
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
            names = [f"{base}.{alias.name}" for alias in node.names]
            # `from recycle import core` and `from recycle.sim import policy` name a module only in their second half.
            yield from (name if base == "recycle" or name in MODULES else base for name in names)


def level(package, room):
    """The line of a room in the order of its package."""
    return next(number for number, line in enumerate(ORDER[package]) if room in line.split())


def refused(file, modules):
    """The modules that `file` may not import, each with the reason."""
    package, *inner = Path(file).with_suffix("").parts
    ours, outside = TABLE[package]
    for module in modules:
        top, *rest = module.split(".")
        if top == "recycle":
            other = rest[0] if rest else ""
            if other in TABLE and other != package and other not in ours:
                yield f"{file} imports {module}, but {package} may import only {sorted(ours) or 'nothing'} of ours"
            elif other in BARE.get("/".join(Path(file).parts[:2]), ()):
                yield f"{file} imports {module}, but it must run on machines that have only torch and msgspec"
            elif (
                other == package and len(rest) > 1 and rest[1] != inner[0] and level(package, rest[1]) >= level(package, inner[0])
            ):
                yield f"{file} imports {module}, but {inner[0]} lies below or beside {rest[1]} in the order of {package}"
        elif top not in sys.stdlib_module_names and top not in outside:
            yield f"{file} imports {module}, but {package} may use only {sorted(outside) or 'the standard library'}"
        elif ONLY_IN.get(top, file) != file and package != "cli":
            yield f"{file} imports {module}, but only {ONLY_IN[top]} may"


def test_every_folder_has_its_row_in_the_table():
    assert {Path(file).parts[0] for file in FILES if "/" in file} <= set(TABLE)
    assert {file for file in FILES if "/" not in file} <= {"__init__.py", "__main__.py"}


def test_every_room_has_its_line_in_the_order_of_its_package():
    rooms = {(Path(file).parts[0], Path(file).with_suffix("").parts[1]) for file in FILES if "/" in file}
    placed = Counter((package, room) for package, lines in ORDER.items() for line in lines for room in line.split())
    assert {each for each in rooms if each[1] != "__init__"} == set(placed)
    assert max(placed.values()) == 1


@pytest.mark.parametrize("file", [file for file in FILES if "/" in file])
def test_a_file_imports_only_what_its_room_may(file):
    assert list(refused(file, imported(parse(file), file))) == []


def circle(graph):
    """Some modules that import each other in a circle, none if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return found.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    # The package itself only names what it imports later, when it is asked.
    graph = {
        name: {each for each in imported(parse(file), file) if each in MODULES} - {name, "recycle"}
        for name, file in MODULES.items()
        if name != "recycle"
    }
    assert circle(graph) == []
    assert circle(graph | {"recycle.core.errors": {"recycle.core.plans.plan"}}) != []


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short_and_says_what_it_is(file):
    assert ast.get_docstring(parse(file)), f"{file} has no docstring"
    assert len((SOURCE / file).read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("file", FILES)
def test_a_function_can_be_read_without_scrolling(file):
    functions = [node for node in ast.walk(parse(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}


def test_a_folder_has_few_files():
    assert max(Counter(Path(file).parent for file in FILES).values()) <= MOST_FILES


def test_a_public_name_is_defined_in_one_module():
    where = {}
    for file in FILES:
        for node in parse(file).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(file)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/plans/plan.py", "import numpy"),
        ("core/plans/plan.py", "from recycle.planner.model.schedule import Schedule"),
        ("core/plans/plan.py", "def f():\n    import numpy as np"),
        ("core/errors.py", "from recycle.core.units import parse_bytes"),
        ("planner/heuristic/greedy.py", "from ortools.sat.python import cp_model"),
        ("planner/exact/cpsat.py", "import scipy.optimize"),
        ("planner/model/schedule.py", "from recycle.planner.exact import cpsat"),
        ("planner/exact/milp.py", "from recycle.planner.heuristic.greedy import solve_greedy"),
        ("planner/solve.py", "import torch"),
        ("planner/solve.py", "from recycle import sim"),
        ("planner/solve.py", "from ..sim import policy"),
        ("sim/replay/replay.py", "from recycle.runtime.execute.executor import Executor"),
        ("control/net/client.py", "import rich"),
        ("control/decide/coordinator.py", "from recycle.control.net.server import Server"),
        ("runtime/worker/worker.py", "from recycle.planner import solve"),
        ("runtime/compute/stage.py", "from recycle.runtime.transport.gloo import GlooTransport"),
        ("report/render/png.py", "if True:\n    from recycle.sim import policy"),
        ("evaluate/hardware/race.py", "from recycle.sim.replay.replay import replay"),
        ("dashboard/page.py", "import flask"),
    ],
)
def test_the_table_refuses_what_lies_outside_it(file, code):
    assert len(list(refused(file, imported(ast.parse(code), file)))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/plans/plan.py", "import json\nfrom recycle.core.op import Op\nfrom recycle import __version__"),
        ("planner/exact/cpsat.py", "from ortools.sat.python import cp_model"),
        ("planner/exact/milp.py", "import scipy.optimize\nfrom recycle.planner.exact.exact_model import ExactModel"),
        (
            "planner/heuristic/greedy.py",
            "import numba\nfrom ..model.schedule import Schedule\nfrom ...core.plans.plan import Plan",
        ),
        ("sim/replay/replay.py", "import numpy\nfrom recycle import core, planner"),
        ("cli/planning/plan.py", "import rich\nfrom recycle.runtime.worker import worker"),
    ],
)
def test_the_table_allows_what_lies_inside_it(file, code):
    assert list(refused(file, imported(ast.parse(code), file))) == []
