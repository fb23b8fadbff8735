"""Random legal plans for property tests: any shape, failures, costs, routes, fused or split backward, idle time."""

from dataclasses import replace

from hypothesis import strategies as st

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from tests.builders import Timed, plan_of, ready_us
from tests.slow_check import peak_held


@st.composite
def stage_profiles(draw: st.DrawFn) -> StageProfile:
    forward, split, weight, optimizer = (draw(st.integers(1, 5)) for _ in range(4))
    activation = draw(st.integers(1, 9))
    return StageProfile(
        forward,
        split,
        weight,
        fused_us=split + draw(st.integers(0, 6)),
        optimizer_us=optimizer,
        activation_bytes=activation,
        weight_held_bytes=draw(st.integers(0, activation)),
        static_bytes=draw(st.integers(0, 9)),
        gradient_bytes=draw(st.integers(0, 9)),
        output_bytes=draw(st.integers(0, 3)),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A problem without a memory limit."""
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    techniques = Techniques(draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    mortal = [Worker(p, s) for s in range(shape.num_stages) for p in range(1, shape.num_pipelines)]
    failed = draw(st.sets(st.sampled_from(mortal))) if mortal and techniques.adaptive else set()
    stages = tuple(draw(stage_profiles()) for _ in range(shape.num_stages))
    profile = Profile(stages, Link(draw(st.integers(0, 2)), 1.0), Link(draw(st.integers(0, 2)), 2.0))
    return Problem(Cluster.of(shape, failed), profile, techniques=techniques)


@st.composite
def legal_plans(draw: st.DrawFn) -> Plan:
    """A plan made op by op in random order, with a memory limit, if any, that it just meets."""
    problem = draw(problems())
    timed = _place(draw, problem, _ops(draw, problem))
    plan = plan_of(problem, timed, bound_us=1)
    unit = draw(st.sampled_from(["unlimited", "microbatches", "bytes"]))
    if unit == "unlimited":
        return plan
    limits = []
    for stage in range(problem.shape.num_stages):
        peaks = [peak_held(plan, worker, unit) for worker in problem.cluster.live_workers() if worker.stage == stage]
        limits.append(max(*peaks, 1) if len(peaks) > 1 else max(peaks[0], 1))
    return replace(plan, problem=replace(problem, memory=Memory(unit, tuple(limits))))


def _ops(draw: st.DrawFn, problem: Problem) -> dict[Op, Worker]:
    """Every op that must run, and a live worker for it; the ops of a micro-batch at a stage share one."""
    ops: dict[Op, Worker] = {}
    for stage in range(problem.shape.num_stages):
        for home in range(problem.shape.num_pipelines):
            for index in range(problem.shape.num_microbatches):
                live = problem.cluster.live_pipelines(stage)
                at_home = home in live and not (problem.techniques.adaptive and draw(st.booleans()))
                worker = Worker(home if at_home else draw(st.sampled_from(live)), stage)
                split = problem.techniques.decoupled and draw(st.booleans())
                for kind in "FIW" if split else "FB":
                    ops[Op(stage, Kind(kind), MicroBatch(home, index))] = worker
    return ops


def _place(draw: st.DrawFn, problem: Problem, ops: dict[Op, Worker]) -> Timed:
    """Start ops one by one, any that is ready, on its worker when that is free, now and then later."""
    randomly = draw(st.randoms(use_true_random=False))
    timed: Timed = {worker: [] for worker in problem.cluster.live_workers()}
    free = dict.fromkeys(timed, 0)
    ends: dict[Op, int] = {}
    waiting = sorted(ops, key=str)
    while waiting:
        ready = [op for op in waiting if ready_us(problem, op, ends) is not None]
        op = randomly.choice(ready)
        worker = ops[op]
        start = max(free[worker], ready_us(problem, op, ends) or 0) + randomly.choice((0, 0, 0, 2))
        ends[op] = free[worker] = start + problem.profile.stages[op.stage].duration_us(op.kind)
        timed[worker].append((start, op))
        waiting.remove(op)
    return timed
