"""A cluster that is small enough to measure in a test, and plans for it from made-up costs."""

from itertools import combinations

import recycle
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanFolder, names_of
from recycle.evaluate.hardware.kills import DEATHS
from recycle.evaluate.hardware.race import plan_path
from recycle.evaluate.hardware.setup import CPU_CORES, Setup
from recycle.evaluate.hardware.variants import variants

# Four layers, because torch's ZBV cuts the model into two pieces for each of two workers.
TINY = Setup(CPU_CORES, pipelines=2, stages=2, microbatches=2, width=16, layers=4, heads=2, context=16, samples=1)


def make_plan(shape, dead, techniques):
    size = shape.num_pipelines, shape.num_stages, shape.num_microbatches
    return recycle.solve(recycle.problem(*size, fail=dead, costs=(10, 13, 9), comm=1, techniques=techniques), "greedy")


def save_plans(folder):
    """Make the plan of every variant that needs one. Where a pipeline is dropped, no worker of the others is dead."""
    for variant in variants(TINY):
        if not variant.is_torch:
            dead = variant.dead if variant.dropped is None else ""
            path = plan_path(folder, variant)
            path.parent.mkdir(parents=True, exist_ok=True)
            make_plan(variant.shape(TINY), dead, variant.techniques).save(path)


def save_plans_for_deaths(folder):
    """Make the plans for no dead worker, each dead worker, and every pair that leaves each stage a live worker."""
    shape, source = TINY.shape, PlanFolder(folder / DEATHS)
    source.folder.mkdir(parents=True)
    pairs = [frozenset(pair) for pair in combinations(shape.workers(), 2) if len({worker.stage for worker in pair}) == 2]
    for dead in [frozenset[Worker](), *(frozenset({worker}) for worker in shape.workers()), *pairs]:
        plan = make_plan(shape, names_of(dead, ",") if dead else "", "adaptive,decoupled,staggered")
        plan.save(source.path(dead))
