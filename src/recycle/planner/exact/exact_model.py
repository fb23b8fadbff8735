"""The model that both exact methods give to their solvers: ops, lengths, precedences, routes, and the result.

The model has for every stage and chain an F, an I and a W; where a backward pass is fused, I stands for B and W takes no time. A
chain stays on its home worker where that is alive. Chains of one home are interchangeable, so the model fixes some order of
their ops without losing every optimum; `arcs` has these orders, and the reasons.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import microbatch_of
from recycle.core.plans.rules import lag_us, needs
from recycle.core.problem import Problem
from recycle.planner.model.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Exact:
    """The best schedule found, or None, and a lower bound of the period of every schedule of the model.

    The schedule is optimal if its period is `bound_us`. It is the hint itself where nothing is better. Optimal means among the
    schedules that move no live worker's chain: moving one can be better, but very rarely is.
    """

    schedule: Schedule | None
    bound_us: int


class Fusing(Enum):
    """Whether the backward passes of a stage are fused: always, never, or as is best for each chain."""

    ALWAYS = "always"
    NEVER = "never"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Arc:
    """`after` starts `lag_us` or more after the end of `before`; after its start, if `from_start`."""

    before: Op
    after: Op
    lag_us: int = 0
    from_start: bool = False


def fusing(problem: Problem, stage: int) -> Fusing:
    """Whether `stage` fuses. An I followed by its W is never worse than a B of the same length: then the model never fuses."""
    costs = problem.profile.stages[stage]
    if not problem.techniques.decoupled:
        return Fusing.ALWAYS
    return Fusing.NEVER if costs.fused_us >= costs.input_us + costs.weight_us else Fusing.FREE


def kinds_of(problem: Problem, stage: int) -> tuple[Kind, ...]:
    """The kinds of op at `stage` in order; the last one ends a chain's work there."""
    return (Kind.F, Kind.I) if fusing(problem, stage) is Fusing.ALWAYS else (Kind.F, Kind.I, Kind.W)


def ops_of(problem: Problem) -> list[Op]:
    """Every op of the model, where an I may stand for a B."""
    shape = problem.shape
    chains = [microbatch_of(shape, chain) for chain in range(shape.num_chains)]
    return [Op(s, kind, chain) for s in range(shape.num_stages) for chain in chains for kind in kinds_of(problem, s)]


def lengths_us(problem: Problem, op: Op) -> tuple[int, int]:
    """The length of `op` if its backward pass is split, and if it is fused; equal where `fusing` is fixed."""
    costs = problem.profile.stages[op.stage]
    split = problem.duration_us(op.stage, op.kind)
    fused = {Kind.F: costs.forward_us, Kind.I: costs.fused_us, Kind.W: 0}[op.kind]
    match fusing(problem, op.stage):
        case Fusing.ALWAYS:
            return fused, fused
        case Fusing.NEVER:
            return split, split
        case Fusing.FREE:
            return split, fused


def routes_of(problem: Problem, stage: int, home: int) -> tuple[int, ...]:
    """The pipelines whose worker may run the chains of `home` at `stage`: the home itself, or any live peer if it is dead."""
    return (home,) if problem.cluster.is_live(Worker(home, stage)) else tuple(problem.cluster.live_pipelines(stage))


def head_us(problem: Problem, stage: int) -> int:
    """The earliest start of any op at `stage`: the time of the first forward through the stages before."""
    return sum(problem.profile.stages[s].forward_us + problem.profile.comm_us(s) for s in range(stage))


def load_us(problem: Problem, stage: int) -> int:
    """The least time that one chain takes of its worker at `stage`."""
    ops = [Op(stage, kind, MicroBatch(0, 0)) for kind in kinds_of(problem, stage)]
    return min(sum(lengths_us(problem, op)[how] for op in ops) for how in (0, 1))


def finish_us(problem: Problem, stage: int) -> int:
    """Time from the last end of `stage` to the end of the period."""
    if problem.techniques.staggered:
        return problem.finish_us(stage)
    return problem.reduce_us(stage) + max(costs.optimizer_us for costs in problem.profile.stages)


def first_dead_stage(problem: Problem, home: int) -> int:
    """The first stage at which `home` has no worker; the number of stages if it has them all."""
    dead = [worker.stage for worker in problem.cluster.failed if worker.pipeline == home]
    return min(dead, default=problem.shape.num_stages)


def arcs(problem: Problem) -> Iterator[Arc]:
    """Every precedence of the model: the rules', and those that lose no optimum."""
    for op in ops_of(problem):
        for before in needs(op, problem.shape.num_stages):
            yield Arc(before, op, lag_us(before, op, problem))
    for home in range(problem.shape.num_pipelines):
        yield from _index_orders(problem, home)
        if first_dead_stage(problem, home) == problem.shape.num_stages:
            yield from _memory_orders(problem, home)


def _index_orders(problem: Problem, home: int) -> Iterator[Arc]:
    """Ops of one kind at one stage run in the order of their indices, where relabelling can bring that about.

    If all k chains can be matched (F0 to F1, F1 to F2, ... I0 to W0), then so can the j-th F0 to the j-th F1 and
    so on: hence one order for every kind and stage. A re-routed chain ties its F, I and W to one worker: that
    fixes the labels at the first dead stage, and only the forwards before it can still be sorted.
    """
    dead = first_dead_stage(problem, home)
    for stage in range(min(dead + 1, problem.shape.num_stages)):
        kinds = [Kind.F]
        if dead == problem.shape.num_stages:
            # A W of no length stands where its B ends, so a B may pass an older W: no order of W if fusing is free.
            kinds = [kind for kind in kinds_of(problem, stage) if kind is not Kind.W or fusing(problem, stage) is Fusing.NEVER]
        for kind in kinds:
            yield from _pairs(problem, home, stage, (kind, kind), 1, from_start=stage == dead)


def _memory_orders(problem: Problem, home: int) -> Iterator[Arc]:
    """Precedences that a capacity implies for ordered chains: F of j + k waits until j frees memory. They propagate better."""
    for stage in range(problem.shape.num_stages):
        capacity, whole, rest = problem.capacity(stage), problem.held_by_forward(stage), problem.held_for_weight(stage)
        if capacity is None or not whole:
            continue
        yield from _pairs(problem, home, stage, (Kind.I, Kind.F), capacity // whole)
        if fusing(problem, stage) is Fusing.NEVER and rest:
            yield from _pairs(problem, home, stage, (Kind.W, Kind.F), (capacity - whole) // rest + 1)


def _pairs(
    problem: Problem, home: int, stage: int, kinds: tuple[Kind, Kind], distance: int, from_start: bool = False
) -> Iterator[Arc]:
    for index in range(problem.shape.num_microbatches - distance):
        before = Op(stage, kinds[0], MicroBatch(home, index))
        yield Arc(before, Op(stage, kinds[1], MicroBatch(home, index + distance)), 0, from_start)


def canonical(problem: Problem, schedule: Schedule) -> Schedule | None:
    """The same schedule with its chains relabelled and split as the model assumes; None if it moves a live worker's chain.

    A fused chain's `weight_us` is where its B ends, as in the model.
    """
    shape = problem.shape
    homes = np.arange(shape.num_chains) // shape.num_microbatches
    for stage in range(shape.num_stages):
        live = np.isin(homes, problem.cluster.live_pipelines(stage))
        if (schedule.pipeline[stage] != homes)[live].any():
            return None
    made = _split(problem, schedule)
    for home in range(shape.num_pipelines):
        chains = slice(home * shape.num_microbatches, (home + 1) * shape.num_microbatches)
        dead = first_dead_stage(problem, home)
        if dead == shape.num_stages:
            _sort_all(made, chains)
        else:
            _sort_forwards(made, chains, dead)
    for stage, costs in enumerate(problem.profile.stages):
        made.weight_us[stage] = np.where(made.is_fused[stage], made.input_us[stage] + costs.fused_us, made.weight_us[stage])
    return made


def _split(problem: Problem, schedule: Schedule) -> Schedule:
    """A copy in which the stages that never fuse have an I and its W in the place of a B."""
    weight, is_fused = schedule.weight_us.copy(), schedule.is_fused.copy()
    for stage, costs in enumerate(problem.profile.stages):
        if fusing(problem, stage) is Fusing.NEVER:
            weight[stage] = np.where(is_fused[stage], schedule.input_us[stage] + costs.input_us, weight[stage])
            is_fused[stage] = False
    routes = schedule.assignment.routed(problem, schedule.pipeline.copy())
    return replace(schedule, assignment=routes, weight_us=weight, is_fused=is_fused).from_zero()


def _sort_all(made: Schedule, chains: slice) -> None:
    """Sort in place each kind by itself: the j-th F, the j-th I or B and the j-th W become one chain."""
    made.forward_us[:, chains].sort(axis=1)
    for split, weight, is_fused in zip(made.input_us, made.weight_us, made.is_fused, strict=True):
        order = chains.start + np.argsort(split[chains], kind="stable")
        weights = np.sort(weight[chains][~is_fused[chains]])
        split[chains], is_fused[chains] = split[order], is_fused[order]
        weight[chains.start + np.flatnonzero(~is_fused[chains])] = weights


def _sort_forwards(made: Schedule, chains: slice, dead: int) -> None:
    """Relabel in place by the forwards at the first dead stage, and sort the forwards before it."""
    order = chains.start + np.argsort(made.forward_us[dead, chains], kind="stable")
    for column in (made.pipeline, made.forward_us, made.input_us, made.weight_us, made.is_fused):
        column[:, chains] = column[:, order]
    made.forward_us[:dead, chains].sort(axis=1)
