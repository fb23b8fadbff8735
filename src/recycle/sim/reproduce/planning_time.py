"""Planning time: a library for 0 to 25 % failures of 2,048 GPUs, for which the paper says "under an hour"."""

import os
import tempfile
import time
from collections.abc import Callable

from recycle.core.cluster import Cluster, Shape
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Profile
from recycle.planner.build_library import build
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.published_numbers import PLANNER_SECONDS

SHAPES = (Shape(4, 64, 256), Shape(16, 16, 64))
COSTS, COMM_US = (10, 13, 9), 1


def run_planning_time(tick: Callable[[int], None] = lambda done: None) -> ExperimentResult:
    """Build each library in an empty folder and return how long it took."""
    rows, seconds, facts = [["library", "plans", "worst period over bound", "ours", "published"]], [], {}
    for shape in SHAPES:
        took, gaps = _build(shape, tick)
        name = f"{shape.num_pipelines} x {shape.num_stages}, {shape.num_microbatches} micro-batches"
        rows.append([name, str(len(gaps)), f"{max(gaps):.4f}", f"{took:.0f} s", f"< {PLANNER_SECONDS} s"])
        facts[name] = {"seconds": round(took, 1), "plans": len(gaps), "worst_gap": round(max(gaps), 6)}
        seconds.append(took)
    assumptions = (
        "256 workers of 8 GPUs are 2,048 GPUs; a plan for every number of failures from 0 to 64 (25 %)",
        f"costs F, I, W of {', '.join(map(str, COSTS))} and {COMM_US} between stages; memory for 2S micro-batches at every stage",
        f"{os.cpu_count()} cores; the library is written to disk; times differ from run to run and from machine to machine",
    )
    groups = [f"{shape.num_pipelines} x {shape.num_stages}" for shape in SHAPES]
    panel = BarPanel("2,048 GPUs, 0 to 25 % failures (published: under an hour)", groups, {"ours": seconds})
    table = ResultTable("Time to plan a whole library", rows)
    return ExperimentResult("planner", "How long planning takes", assumptions, (table,), (panel,), "seconds", "library", facts)


def _build(shape: Shape, tick: Callable[[int], None]) -> tuple[float, list[float]]:
    profile = Profile.uniform(shape.num_stages, *COSTS, comm_us=COMM_US)
    memory = Memory.microbatches([2 * shape.num_stages] * shape.num_stages)
    problem = Problem(Cluster(shape), profile, memory)
    began, gaps = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for built in build(folder, problem, shape.num_workers // 4):
            gaps.append(built.period_us / built.bound_us)
            tick(len(gaps))
    return time.monotonic() - began, gaps
