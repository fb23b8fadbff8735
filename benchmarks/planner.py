"""The planner's benchmark: how good its plans are, and how fast they are made.

make bench                                          every table, printed
python benchmarks/planner.py --only example         one of them
python benchmarks/planner.py --quick                small shapes, in about two minutes
python benchmarks/planner.py --save                 also writes docs/benchmarks/<date>-planner.md and the table in README.md
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from random_problems import MEMORY_FORMS, random_problem
from sheet import (
    GIB,
    NO,
    ROOT,
    UNJUDGED,
    YES,
    Case,
    Results,
    Row,
    Script,
    Section,
    markdown_table,
    measure,
    write_between_marks,
)
from weak_spots import weak

import recycle
from recycle.planner.failure_normalization import least_bound
from recycle.planner.heuristic.greedy import DEFAULT_EFFORT

ALL = "adaptive,decoupled,staggered"

# Pipelines, stages, micro-batches of each pipeline, dead workers.
EXAMPLE = (3, 4, 6, 1)
SHAPES = (
    EXAMPLE,
    (4, 8, 32, 1),
    (4, 8, 32, 8),
    (16, 2, 64, 8),
    (8, 16, 64, 12),
    (16, 16, 64, 25),
    (32, 8, 64, 64),
    (4, 64, 256, 25),
)
LARGE = (32, 64, 128, 200)
# F, I, W and the time between two stages, in µs.
UNIT, REAL = ("1,1,1", 0), ("10,13,9", 1)
# With cuts: 10, 13 and 9 for each of four layers. Of REAL a layer would be no whole microsecond, and layers would not be equal.
LAYERED = ("40,52,36", 1)
# Micro-batches in flight, as a multiple of the number of stages -> the most that a period may be above its proven bound.
ASKED_RATIO = {2: 1.005, 1: 1.05}
ASKED_PLAN_S, ASKED_PLAN_GIB, ASKED_LIBRARY_S = 10, 4, 60
# With cuts: equal layers of a stage, layers shared on either side, and the most that a period may be above its bound.
LAYERS_OF_A_STAGE, SHARED_LAYERS, ASKED_CUT_RATIO = 4, 2, 1.03
# A plan that is made before training may be searched for some minutes: four times the usual effort.
CUT_EFFORT = 4 * DEFAULT_EFFORT
# Dead workers of 4 x 8 -> how many random sets of them, and the least median of the throughput that is kept.
KEPT_SHAPE, ASKED_KEPT = (4, 8, 32), {1: (8, 0.95), 4: (20, 0.85)}
ASKED_CUT_PLAN_S, ASKED_CUT_LIBRARY_S = 20, 120

# Random problems of each memory form, the search effort for each, and the most that periods may be above their proven bounds.
RANDOM_OF_A_FORM, RANDOM_EFFORT, ASKED_MEAN_GAP, ASKED_WORST_GAP = 20, 3_000_000, 1.015, 1.10

# Zero Bubble Pipeline Parallelism (ICLR 2024): stages, micro-batches -> longest stage span of 1F1B, with S and with 2S in flight.
ZERO_BUBBLE = {(4, 8): (33, 27, 24), (8, 16): (69, 55, 48), (16, 64): (237, 207, 192)}

# The worked example of the ReCycle paper: name, dead workers, techniques, memory, optimum.
EXAMPLE_CASES = (
    ("fault-free 1F1B", "", "none", "4,3,2,1", 27),
    ("Adaptive Pipelining, 1F1B's own memory", "W1_2", "adaptive", "4,3,2,1", 36),
    ("Adaptive Pipelining", "W1_2", "adaptive", "6", 33),
    ("+ Decoupled BackProp", "W1_2", "adaptive,decoupled", "6", 29),
    ("+ Staggered Optimizer", "W1_2", ALL, "6", 27),
    ("the same in less memory", "W1_2", ALL, "4,3,6,2", 27),
    ("one dead at each stage, synchronous", "W0_0,W1_1,W2_2,W0_3", "adaptive,decoupled", "unlimited", 30),
    ("one dead at each stage, staggered", "W0_0,W1_1,W2_2,W0_3", ALL, "unlimited", 27),
    ("fault-free, decoupled and staggered", "", ALL, "6", 19),
)


def quality(quick: bool) -> Section:
    limit_s = 5.0 if quick else None
    cases = tuple(
        Case(
            f"{_shape(shape)}, {shape[3]} dead, memory {_depth(depth)}, costs {costs[0]}",
            partial(_quality, shape, depth, costs, limit_s),
        )
        for shape, depth, costs in product(SHAPES[:3] if quick else SHAPES, ASKED_RATIO, (UNIT, REAL))
    )
    about = (
        "D pipelines × S stages, M micro-batches each; the dead workers where they hurt least (`solve_normalized`), method "
        "auto, all three techniques. Memory is micro-batches in flight on every worker. The bound is proven for the dead "
        "workers of the plan; the least bound for any placement of as many, which is stricter: a ratio to it cannot gain by "
        "placing them where the bound is high. A ratio of 1 is optimal. The target is a period over its bound of at most "
        f"{ASKED_RATIO[2]} with memory 2S and {ASKED_RATIO[1]} with S."
    )
    times = ("period µs", "bound µs", "ratio", "least bound µs", "ratio to it")
    header = ("D × S, M", "dead", "memory", "F,I,W / comm", *times, "status", "method", "seconds", "met")
    return Section("quality", "Quality", about, header, cases)


def _quality(shape: tuple[int, int, int, int], depth: int, costs: tuple[str, int], limit_s: float | None) -> Row:
    dead = shape[3]
    problem = _problem(shape, costs, depth)
    began = time.perf_counter()
    plan, _ = recycle.solve_normalized(problem, dead, time_limit_s=limit_s)
    seconds = time.perf_counter() - began
    least = least_bound_us(problem, dead)
    given = (_shape(shape), str(dead), _depth(depth), f"{costs[0]} / {costs[1]}")
    times = (str(plan.period_us), str(plan.quality.bound_us), f"{plan.gap:.4f}", str(least), f"{plan.period_us / least:.4f}")
    quality = (plan.quality.status, plan.quality.method, f"{seconds:.2f}")
    return (*given, *times, *quality, _judged(plan.gap <= ASKED_RATIO[depth]))


def cuts(quick: bool) -> Section:
    limit_s = 5.0 if quick else None
    cases = tuple(
        Case(f"{_shape(shape)}, {shape[3]} dead, memory {memory}", partial(_cuts, shape, memory, limit_s))
        for shape, memory in product(SHAPES[:2] if quick else SHAPES, ("2S", "unlimited"))
    )
    about = (
        f"The same shapes with costs {LAYERED[0]}, communication {LAYERED[1]}, and {LAYERS_OF_A_STAGE} equal layers a stage, of "
        f"which {SHARED_LAYERS} on either side of a boundary are shared. Kept is the throughput over that of the fault-free plan "
        "with the same options; beside it, what re-routing alone keeps of the fault-free plan without shared layers, and the "
        f"share of workers that live. Plans with cuts are made with `--effort {CUT_EFFORT}`. The target is a period over its "
        f"bound of at most {ASKED_CUT_RATIO}."
    )
    times = ("period µs", "bound µs", "ratio", "asked")
    header = ("D × S, M", "dead", "memory", *times, "kept", "re-routing", "live", "seconds", "met")
    return Section("cuts", "Plans with cuts", about, header, cases)


def _cuts(shape: tuple[int, int, int, int], memory: str, limit_s: float | None) -> Row:
    pipelines, stages, _, dead = shape
    limit = 2 * stages if memory == "2S" else memory
    plain = recycle.problem(*shape[:3], costs=LAYERED[0], comm=LAYERED[1], memory=limit, layers=LAYERS_OF_A_STAGE * stages)
    cut = replace(plain, shared_layers=SHARED_LAYERS)
    began = time.perf_counter()
    plan, _ = recycle.solve_normalized(cut, dead, "greedy", limit_s, CUT_EFFORT)
    seconds = time.perf_counter() - began
    kept = recycle.solve(cut, "greedy", limit_s, CUT_EFFORT).period_us / plan.period_us
    routed = (
        recycle.solve(plain, "greedy", limit_s).period_us / recycle.solve_normalized(plain, dead, "greedy", limit_s)[0].period_us
    )
    times = (str(plan.period_us), str(plan.quality.bound_us), f"{plan.gap:.4f}", str(ASKED_CUT_RATIO))
    given = (_shape(shape), str(dead), memory, *times)
    shares = (f"{kept:.3f}", f"{routed:.3f}", f"{1 - dead / (pipelines * stages):.3f}")
    return (*given, *shares, f"{seconds:.2f}", _judged(plan.gap <= ASKED_CUT_RATIO))


def kept(quick: bool) -> Section:
    cases = tuple(
        Case(f"{_shape(KEPT_SHAPE)}, {dead} dead", partial(_kept, dead, 2 if quick else num_sets, asked, quick))
        for dead, (num_sets, asked) in ASKED_KEPT.items()
    )
    about = (
        f"Throughput over the fault-free plan with the same options, for random sets of dead workers, with {LAYERS_OF_A_STAGE} "
        f"equal layers a stage of which {SHARED_LAYERS} are shared, costs {LAYERED[0]}, communication {LAYERED[1]}, and "
        "unlimited memory."
    )
    header = ("D × S, M", "dead", "sets", "least", "median", "asked", "live", "worst ratio to bound", "seconds", "met")
    return Section("kept", "What cuts keep", about, header, cases)


def _kept(dead: int, num_sets: int, asked: float, quick: bool) -> Row:
    pipelines, stages, _ = KEPT_SHAPE
    whole = recycle.problem(
        *KEPT_SHAPE, costs=LAYERED[0], comm=LAYERED[1], layers=LAYERS_OF_A_STAGE * stages, shared_layers=SHARED_LAYERS
    )
    limit_s = 5.0 if quick else None
    began = time.perf_counter()
    fault_free_us = recycle.solve(whole, "greedy", limit_s).period_us
    plans = []
    for seed in range(num_sets):
        cluster = replace(whole.cluster, failed=frozenset(_random_dead(pipelines, stages, dead, seed)))
        plans.append(recycle.solve(replace(whole, cluster=cluster), "greedy", limit_s))
    shares = [fault_free_us / plan.period_us for plan in plans]
    median = statistics.median(shares)
    found = (f"{min(shares):.3f}", f"{median:.3f}", str(asked), f"{1 - dead / (pipelines * stages):.3f}")
    worst = f"{max(plan.gap for plan in plans):.4f}"
    seconds = f"{time.perf_counter() - began:.1f}"
    met = UNJUDGED if quick else _judged(median >= asked)
    return (_shape(KEPT_SHAPE), str(dead), str(num_sets), *found, worst, seconds, met)


def _random_dead(pipelines: int, stages: int, num: int, seed: int) -> list[recycle.Worker]:
    """A random set of workers that leaves every stage a live one."""
    rng, workers = random.Random(seed), [recycle.Worker(p, s) for p, s in product(range(pipelines), range(stages))]
    while True:
        dead = rng.sample(workers, num)
        if max(Counter(worker.stage for worker in dead).values()) < pipelines:
            return dead


def cut_speed(quick: bool) -> Section:
    shape, plans = ((8, 16, 32, 20), (8, 8, 32)) if quick else (LARGE, (16, 16, 64))
    cases = (
        Case(f"one plan for {_shape(shape)}, {shape[3]} dead", partial(_cut_speed, shape, False, quick)),
        Case(f"every plan for {_shape(plans)}", partial(_cut_speed, plans, True, quick)),
    )
    about = (
        f"Fresh `recycle plan` processes with memory 2S, costs {LAYERED[0]}, communication {LAYERED[1]}, {LAYERS_OF_A_STAGE} "
        f"equal layers a stage of which {SHARED_LAYERS} are shared: one plan, and a library for 0 to 25 % failures."
    )
    return Section("cut-speed", "Speed with cuts", about, ("D × S, M", "what", "seconds", "asked", "peak memory", "met"), cases)


def _cut_speed(shape: Sequence[int], is_library: bool, quick: bool) -> Row:
    words = [*_words(shape, LAYERED, 2), "--layers", str(LAYERS_OF_A_STAGE * shape[1]), "--shared-layers", str(SHARED_LAYERS)]
    with tempfile.TemporaryDirectory() as folder:
        if is_library:
            run = _recycle("plan", *words, "--library", "--max-failures", "25%", "--out", f"{folder}/plans", "--json")
        else:
            run = _recycle("plan", *words, "--failures", str(shape[3]), "--out", f"{folder}/plan.json", "--json")
    what, asked = ("library", ASKED_CUT_LIBRARY_S) if is_library else (f"{shape[3]} dead", ASKED_CUT_PLAN_S)
    met = UNJUDGED if quick else _judged(run.seconds < asked)
    return (_shape(shape), what, f"{run.seconds:.1f}", str(asked), f"{run.peak_bytes / GIB:.2f} GiB", met)


def least_bound_us(problem: recycle.Problem, num_failures: int) -> int:
    """What no plan can beat, wherever the dead workers are."""
    return least_bound(problem, num_failures)


def random_memory(quick: bool) -> Section:
    num = 3 if quick else RANDOM_OF_A_FORM
    cases = tuple(Case(f"{num} random problems, memory {form}", partial(_random_memory, form, num)) for form in MEMORY_FORMS)
    about = (
        f"{num} random problems of each memory form: 1 to 4 pipelines, 2 to 8 stages, S to 3S micro-batches, up to two dead; "
        "equal and uneven stages, or a hot one; messages of no time up to that of F; all techniques, or without the later ones. "
        f"Method auto with an effort of {RANDOM_EFFORT:,}. A gap is a period over its proven bound. The target of each form is a "
        f"mean of at most {ASKED_MEAN_GAP} and a worst of at most {ASKED_WORST_GAP}."
    )
    header = ("memory", "problems", "proven optimal", "mean gap", "worst gap", "worst problem", "seconds", "met")
    return Section("random-memory", "Random problems of all memory forms", about, header, cases)


def _random_memory(form: str, num: int) -> Row:
    began = time.perf_counter()
    plans = [recycle.solve(random_problem(form, number), effort=RANDOM_EFFORT) for number in range(num)]
    gaps = [plan.gap for plan in plans]
    worst = max(range(num), key=gaps.__getitem__)
    shape = plans[worst].problem.shape
    where = f"{worst}: {_shape((shape.num_pipelines, shape.num_stages, shape.num_microbatches))}"
    found = (f"{statistics.mean(gaps):.4f}", f"{max(gaps):.4f}", where, f"{time.perf_counter() - began:.1f}")
    met = statistics.mean(gaps) <= ASKED_MEAN_GAP and max(gaps) <= ASKED_WORST_GAP
    return (form, str(num), str(sum(gap == 1 for gap in gaps)), *found, _judged(met))


def zero_bubble(quick: bool) -> Section:
    cases = []
    for (stages, microbatches), spans in list(ZERO_BUBBLE.items())[: 2 if quick else None]:
        falling = ",".join(str(depth) for depth in range(stages, 0, -1))
        settings = (("1F1B", "none", falling), ("S in flight", ALL, str(stages)), ("2S in flight", ALL, str(2 * stages)))
        for (name, techniques, memory), reference in zip(settings, spans, strict=True):
            run = partial(_zero_bubble, stages, microbatches, name, techniques, memory, reference)
            cases.append(Case(f"{stages} stages, {microbatches} micro-batches, {name}", run))
    about = (
        "One pipeline, no failure, F = I = W = 1, no communication: our longest stage span beside the one that Zero Bubble "
        "Pipeline Parallelism (ICLR 2024) reports. The target is at most theirs."
    )
    header = ("S, M", "schedule", "ours", "bound", "theirs", "status", "met")
    return Section("zero-bubble", "Fault-free plans against Zero Bubble", about, header, tuple(cases))


def _zero_bubble(stages: int, microbatches: int, name: str, techniques: str, memory: str, reference: int) -> Row:
    plan = recycle.solve(recycle.problem(1, stages, microbatches, costs=UNIT[0], memory=memory, techniques=techniques))
    spans = (str(plan.period_us), str(plan.quality.bound_us), str(reference))
    return (f"{stages}, {microbatches}", name, *spans, plan.quality.status, _judged(plan.period_us <= reference))


def example(_: bool) -> Section:
    cases = tuple(Case(case[0], partial(_example, *case)) for case in EXAMPLE_CASES)
    about = (
        "3 pipelines × 4 stages, 6 micro-batches each; F, I and W take one slot, a fused backward two, communication none. "
        "Memory is micro-batches in flight by stage. The target is the optimum, and its proof."
    )
    header = ("case", "dead", "memory", "slots", "bound", "optimum", "status", "met")
    return Section("example", "The worked example of the paper", about, header, cases)


def _example(name: str, dead: str, techniques: str, memory: str, optimum: int) -> Row:
    plan = recycle.solve(recycle.problem(*EXAMPLE[:3], fail=dead, costs=UNIT[0], memory=memory, techniques=techniques))
    slots = (str(plan.period_us), str(plan.quality.bound_us), str(optimum))
    met = plan.period_us == optimum and plan.quality.status == "optimal"
    return (name, dead or "none", memory, *slots, plan.quality.status, _judged(met))


def speed(quick: bool) -> Section:
    shape = (8, 16, 32, 20) if quick else LARGE
    cases = tuple(
        Case(f"{_shape(shape)}, {shape[3]} dead, costs {costs[0]}", partial(_speed, shape, costs, quick))
        for costs in (UNIT, REAL)
    )
    about = (
        "A fresh `recycle plan --failures` process with memory 2S, from its start until the plan is on disk and it has ended. "
        "The ratio is to the least bound for any placement of as many failures. "
        f"The target is less than {ASKED_PLAN_S} s and less than {ASKED_PLAN_GIB} GiB."
    )
    header = ("D × S, M", "dead", "F,I,W / comm", "ops", "ratio", "seconds", "peak memory", "file", "met")
    return Section("speed", "Speed of one plan", about, header, cases)


def _speed(shape: tuple[int, int, int, int], costs: tuple[str, int], quick: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        run = _recycle("plan", *_words(shape, costs, 2), "--failures", str(shape[3]), "--out", str(out), "--json")
        size = out.stat().st_size
    given = (_shape(shape), str(shape[3]), f"{costs[0]} / {costs[1]}", f"{run.facts['num_ops']:,}")
    found = (f"{run.facts['period'] / least_bound_us(_problem(shape, costs, 2), shape[3]):.4f}", f"{run.seconds:.1f}")
    met = run.seconds < ASKED_PLAN_S and run.peak_bytes < ASKED_PLAN_GIB * GIB
    return (*given, *found, f"{run.peak_bytes / GIB:.2f} GiB", f"{size / 2**20:.1f} MiB", UNJUDGED if quick else _judged(met))


def library(quick: bool) -> Section:
    shapes = ((8, 8, 32),) if quick else ((4, 64, 256), (16, 16, 64))
    cases = tuple(
        Case(f"{_shape(shape)}, memory {_depth(depth)}", partial(_library, shape, depth, quick))
        for shape, depth in product(shapes, ASKED_RATIO)
    )
    about = (
        f"A fresh `recycle plan --library` process, costs {REAL[0]}, communication {REAL[1]}: a plan for every number of "
        "failures from 0 to 25 % of the workers, one process a core, until the last plan is on disk. Ratios are to the "
        "least bound for any placement of as many failures. Peak memory is that of the largest process. "
        f"The target is less than {ASKED_LIBRARY_S} s."
    )
    header = ("D × S, M", "memory", "plans", "worst ratio", "mean ratio", "seconds", "peak memory", "met")
    return Section("library", "Speed of a library", about, header, cases)


def _library(shape: tuple[int, int, int], depth: int, quick: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        words = _words(shape, REAL, depth)
        run = _recycle("plan", *words, "--library", "--max-failures", "25%", "--out", f"{folder}/plans", "--json")
    problem = _problem(shape, REAL, depth)
    ratios = [plan["period"] / least_bound_us(problem, plan["failures"]) for plan in run.facts["plans"]]
    found = (str(len(ratios)), f"{max(ratios):.4f}", f"{sum(ratios) / len(ratios):.4f}", f"{run.seconds:.1f}")
    met = UNJUDGED if quick else _judged(run.seconds < ASKED_LIBRARY_S)
    return (_shape(shape), _depth(depth), *found, f"{run.peak_bytes / GIB:.2f} GiB", met)


SECTIONS = {
    "quality": quality,
    "cuts": cuts,
    "kept": kept,
    "random-memory": random_memory,
    "weak": weak,
    "zero-bubble": zero_bubble,
    "example": example,
    "speed": speed,
    "library": library,
    "cut-speed": cut_speed,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What a fresh process printed, took and held."""

    facts: dict[str, Any]
    seconds: float
    peak_bytes: int


def _recycle(*arguments: str) -> Run:
    began = time.perf_counter()
    command = [sys.executable, "-m", "recycle", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    printed, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # the usage of this process and its children, not of every one there was
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"recycle {' '.join(arguments)} ended with {process.returncode}:\n{errors}")
    return Run(json.loads(printed), seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def _words(shape: Sequence[int], costs: tuple[str, int], depth: int) -> list[str]:
    """The cluster, the costs and the memory on the command line."""
    pipelines, stages, microbatches = map(str, shape[:3])
    cluster = ["--pipelines", pipelines, "--stages", stages, "--microbatches", microbatches]
    return [*cluster, "--costs", costs[0], "--comm", str(costs[1]), "--memory", str(depth * shape[1])]


def _problem(shape: Sequence[int], costs: tuple[str, int], depth: int) -> recycle.Problem:
    """The same in Python."""
    pipelines, stages, microbatches = shape[:3]
    return recycle.problem(pipelines, stages, microbatches, costs=costs[0], comm=costs[1], memory=depth * stages)


def _shape(shape: Sequence[int]) -> str:
    return f"{shape[0]} × {shape[1]}, {shape[2]}"


def _depth(depth: int) -> str:
    return "S" if depth == 1 else f"{depth}S"


def _judged(met: bool) -> str:
    return YES if met else NO


def summary(results: Results, link: str) -> str:
    """What README.md shows: the ratio of every shape, then the speed."""
    ratios: dict[Row, list[str]] = {}
    for row in results["quality"]:
        ratios.setdefault(row[:2], []).append(row[8])
    settings = (f"memory {_depth(depth)}, costs {costs[0]}" for depth, costs in product(ASKED_RATIO, (UNIT, REAL)))
    table = markdown_table(("D × S, M", "dead", *settings), [(*key, *found) for key, found in ratios.items()])
    plans = " and ".join(f"{row[5]} s (costs {row[2].split()[0]}, {row[6]})" for row in results["speed"])
    libraries = ", ".join(f"{row[0]} with memory {row[1]} in {row[5]} s" for row in results["library"])
    about = (
        "Period over the least proven bound, where 1 is optimal, for D pipelines × S stages with M micro-batches each and the "
        "dead\nworkers where they hurt least; memory is micro-batches in flight on each worker."
    )
    return (
        f"{about}\n\n{table}\n\nOne plan for {_shape(LARGE)} with {LARGE[3]} dead, as a fresh process: {plans}.\n"
        f"Every plan for 0 to 25 % failures of 256 workers:\n{libraries}.\nThe machine and all tables: [{link}]({link})."
    )


SCRIPT = Script(
    "planner",
    "Measure how good plans are and how fast they are made.",
    tuple(SECTIONS),
    quick="small shapes, in about two minutes",
    save="keep the tables in docs/benchmarks; if it is all of them, in README.md too",
    quantity="seconds",
)


def main() -> None:
    args = SCRIPT.arguments()
    console, about = SCRIPT.introduce()
    # The first plan on a machine compiles the scheduler, which no number below should contain.
    recycle.solve(recycle.problem(1, 2, 2, costs=UNIT[0]))
    sections = [SECTIONS[name](args.quick) for name in args.only or SECTIONS]
    results = measure(sections, console)
    if args.save:
        path = SCRIPT.keep(args.only or (), about, sections, results)
        console.print(f"wrote {path}")
        if not args.only:
            write_between_marks(ROOT / "README.md", summary(results, path.as_posix()))
            console.print("wrote the table in README.md")


if __name__ == "__main__":
    main()
