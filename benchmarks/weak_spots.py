"""The planner's table `weak`: problems on which plans were once far from the optimum, small enough for CP-SAT to prove it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from random_problems import ACTIVATION_BYTES, STATIC_BYTES, random_problem
from sheet import NO, UNJUDGED, YES, Case, Row, Section

import recycle
from recycle.core.cluster import Cluster, Shape
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Link, Profile, StageProfile

# F, I, W and a whole backward pass of a stage, in µs; a message takes as long as F.
_COSTS_US = (100, 130, 90, 220)
# Bytes that are left of the activations of a micro-batch when I ends: the fewer, the more memory is free.
FREED_LESS_AND_LESS = (0, 250, 500, 750, ACTIVATION_BYTES)


# What is not proven is searched for until the effort is spent, so there is little of it.
FREEING_EFFORT = 3_000_000
# The most that a period may be above the exact one, where that is proven.
ASKED_EXACT_RATIO = 1.01


def weak(quick: bool) -> Section:
    cases = [
        Case(f"{spot.name}, {what}", partial(_beside_exact, spot.name, what, problem))
        for spot in weak_spots(quick)
        for what, problem in spot.problems
    ]
    cases.append(Case("more memory freed at I", partial(_freeing, quick)))
    about = (
        "Plans of method auto with the usual effort beside those of method cpsat; both count their effort. The target is a "
        f"period of at most {ASKED_EXACT_RATIO} times the exact one, where that is proven; other rows are not judged, and their "
        f"ratio is to the bound. In the last row, with an effort of {FREEING_EFFORT:,}, I frees more and more memory: no "
        "plan may be longer than with less."
    )
    header = ("weak spot", "problem", "D × S, M", "period µs", "exact µs", "bound µs", "ratio", "seconds", "met")
    return Section("weak", "Where plans were weak, beside exact ones", about, header, tuple(cases))


def _beside_exact(name: str, what: str, problem: Problem) -> Row:
    began = time.perf_counter()
    plan = recycle.solve(problem)
    seconds = time.perf_counter() - began
    exact = recycle.solve(problem, "cpsat")
    bound = max(plan.quality.bound_us, exact.quality.bound_us)
    is_proven = bound == min(plan.period_us, exact.period_us)
    ratio = plan.period_us / bound
    met = UNJUDGED if not is_proven else YES if ratio <= ASKED_EXACT_RATIO else NO
    times = (str(plan.period_us), str(exact.period_us) if is_proven else "not proven", str(bound), f"{ratio:.4f}")
    return (name, what, _shape_text(problem), *times, f"{seconds:.1f}", met)


def _freeing(quick: bool) -> Row:
    """The periods where I frees nothing, a quarter, half, three quarters and all of the activations."""
    began = time.perf_counter()
    kept = FREED_LESS_AND_LESS[::-1][: 2 if quick else None]
    plans = [recycle.solve(freeing_problem(one), effort=FREEING_EFFORT) for one in kept]
    periods, last = [plan.period_us for plan in plans], plans[-1]
    is_monotone = all(more <= less for less, more in pairwise(periods))
    numbers = (", ".join(map(str, periods)), "–", str(last.quality.bound_us), f"{last.gap:.4f}")
    what = f"{', '.join(map(str, kept))} bytes of {ACTIVATION_BYTES} left after I"
    seconds = f"{time.perf_counter() - began:.1f}"
    return ("more memory freed at I", what, _shape_text(last.problem), *numbers, seconds, YES if is_monotone else NO)


def _shape_text(problem: Problem) -> str:
    shape = problem.shape
    return f"{shape.num_pipelines} × {shape.num_stages}, {shape.num_microbatches}"


@dataclass(frozen=True, slots=True)
class WeakSpot:
    """A kind of problem, and problems of it by what tells them apart."""

    name: str
    problems: tuple[tuple[str, Problem], ...]


def weak_spots(quick: bool = False) -> Iterator[WeakSpot]:
    """Yield the five weak spots; `quick` leaves out what takes CP-SAT long."""
    adaptive = ((3, 4, 6), (4, 4, 8), (4, 8, 16), (8, 4, 16))
    yield WeakSpot(
        "adaptive alone, memory of 1F1B",
        tuple(("W1_2 dead, costs 1,1,1", adaptive_problem(*shape)) for shape in adaptive[: 2 if quick else None]),
    )
    forms = (("bytes, all until W", 3), ("bytes, half until W", 5), ("bytes, a fifth until W", 4), ("bytes, a fifth until W", 7))
    yield WeakSpot("memory in bytes", tuple(_random(*form) for form in forms[: 2 if quick else None]))
    hot = ((2, 3, 5, 1.5, 1, 3), (3, 4, 6, 2.0, 2, 5), (2, 3, 5, 1.5, 0, 3), (3, 4, 6, 1.5, 0, 8), (3, 4, 6, 1.5, 3, 5))
    yield WeakSpot("hot stage, messages as long as F", tuple(_hot(*one) for one in hot[: 2 if quick else None]))
    numbers = (1, 7, 10, 13)
    yield WeakSpot("memory S+1", tuple(_random("S+1", number) for number in numbers[: 2 if quick else None]))
    shapes = ((3, 3, 5), (2, 5, 6), (5, 2, 7), (3, 6, 8))
    yield WeakSpot(
        "shapes outside the benchmark",
        tuple(_outside(shape, depth) for shape in shapes[: 1 if quick else None] for depth in (2, 1)),
    )


def adaptive_problem(num_pipelines: int, num_stages: int, num_microbatches: int) -> Problem:
    """W1_2 is dead, backward passes are whole and the step is synchronous, and a stage has the memory that 1F1B needs."""
    memory = ",".join(str(num_stages - stage) for stage in range(num_stages))
    shape = (num_pipelines, num_stages, num_microbatches)
    return recycle.problem(*shape, fail="W1_2", costs="1,1,1", memory=memory, techniques="adaptive")


def freeing_problem(kept_bytes: int) -> Problem:
    """A worker has memory in bytes for as many micro-batches as there are stages, and I frees all but `kept_bytes` of one."""
    hot = hot_problem(3, 4, 6, 1.3, 1, 4)
    stages = tuple(replace(stage, weight_held_bytes=kept_bytes) for stage in hot.profile.stages)
    memory = Memory.bytes([STATIC_BYTES + 4 * ACTIVATION_BYTES] * 4)
    return replace(hot, profile=replace(hot.profile, stages=stages), memory=memory)


def hot_problem(num_pipelines: int, num_stages: int, num_microbatches: int, factor: float, hot: int, memory: int) -> Problem:
    """One stage is so many times as slow as the others, and the worker of the last pipeline at stage 1 is dead."""

    def stage(times: float) -> StageProfile:
        forward_us, input_us, weight_us, fused_us = (round(times * cost_us) for cost_us in _COSTS_US)
        costs = StageProfile(forward_us, input_us, weight_us, fused_us, static_bytes=STATIC_BYTES)
        return replace(costs, activation_bytes=ACTIVATION_BYTES, weight_held_bytes=ACTIVATION_BYTES)

    stages = tuple(stage(factor if number == hot else 1.0) for number in range(num_stages))
    dead = frozenset({recycle.Worker(num_pipelines - 1, 1)})
    cluster = Cluster(Shape(num_pipelines, num_stages, num_microbatches), dead)
    return Problem(cluster, Profile(stages, Link(_COSTS_US[0], 1e9)), Memory.microbatches([memory] * num_stages))


def _random(form: str, number: int) -> tuple[str, Problem]:
    return f"{form}, random problem {number}", random_problem(form, number)


def _hot(num_pipelines: int, num_stages: int, num_microbatches: int, factor: float, hot: int, memory: int) -> tuple[str, Problem]:
    problem = hot_problem(num_pipelines, num_stages, num_microbatches, factor, hot, memory)
    return f"stage {hot} takes {factor:g} times as long, memory {memory}", problem


def _outside(shape: tuple[int, int, int], depth: int) -> tuple[str, Problem]:
    memory = depth * shape[1]
    return f"W1_1 dead, memory {memory}", recycle.problem(*shape, fail="W1_1", costs="10,13,9", comm=1, memory=memory)
