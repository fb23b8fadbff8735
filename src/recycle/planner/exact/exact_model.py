"""The model that both exact methods give to their solvers: ops, lengths, precedences, routes, and the result.

The model has for every stage and chain an F, an I and a W; where a backward pass is fused, I stands for B and W takes no time. A
chain stays on its home worker where that is alive. Chains of one home are interchangeable, so the model fixes some order of
their ops without losing every optimum; `arcs` has these orders, and the reasons.

With shared layers or speeds, the cuts of all chains are given, and with speeds their routes too: by the assignment of the
schedule from which the method starts. What a chain costs is then its own, and no order is assumed.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import chain_of, microbatch_of
from recycle.core.plans.rules import lag_us, needs
from recycle.core.problem import Problem
from recycle.planner.model.assignment import Assignment
from recycle.planner.model.schedule import Schedule

MOST_OPS_OF_MODEL = 20_000
"""At 19,200 ops CP-SAT takes 4 s to build the model, and 20 s find neither a schedule nor a bound; beyond, it is not built."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The best schedule found, or None, and a lower bound of the period of every schedule of the model.

    The schedule is optimal if its period is `bound_us`. It is the hint itself where nothing is better. Optimal means among the
    schedules that move no live worker's chain: moving one can be better, but very rarely is. With shared layers or speeds it
    means among the schedules with the hint's cuts, and with speeds its routes: other cuts can be better.

    `used` is the effort that the search took, in the unit of the greedy method's effort.
    """

    schedule: Schedule | None
    bound_us: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class ExactLimit:
    """When an exact method stops: after a counted effort, which gives the same result on every machine, or after seconds.

    The effort is in the unit of the greedy method's, placed ops: the solvers count otherwise, and each converts it so that it
    takes about as long.
    """

    effort: int | None = None
    deadline: float | None = None  # by time.monotonic()

    def __post_init__(self) -> None:
        assert (self.effort is None) != (self.deadline is None), "an exact method has one limit"

    @staticmethod
    def seconds(limit_s: float) -> "ExactLimit":
        return ExactLimit(deadline=time.monotonic() + limit_s)

    @property
    def left_s(self) -> float:
        """The seconds that are left; infinite if effort is counted."""
        return math.inf if self.deadline is None else max(0.0, self.deadline - time.monotonic())


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


def given_by(problem: Problem, hint: Schedule) -> Assignment | None:
    """The cuts and routes that the model takes from the hint; None if a chain costs the same at a stage as all others."""
    return hint.assignment if problem.shared_layers or problem.speeds else None


def fusing(problem: Problem, stage: int, given: Assignment | None = None) -> Fusing:
    """Whether `stage` fuses. An I followed by its W is never worse than a B of the same length: then the model never fuses."""
    if not problem.techniques.decoupled:
        return Fusing.ALWAYS
    if given is None:
        costs = problem.profile.stages[stage]
        return Fusing.NEVER if costs.fused_us >= costs.input_us + costs.weight_us else Fusing.FREE
    _, split, weight, fused = given.lengths_us[:, stage]
    return Fusing.NEVER if (fused >= split + weight).all() else Fusing.FREE


def kinds_of(problem: Problem, stage: int, given: Assignment | None = None) -> tuple[Kind, ...]:
    """The kinds of op at `stage` in order; the last one ends a chain's work there."""
    return (Kind.F, Kind.I) if fusing(problem, stage, given) is Fusing.ALWAYS else (Kind.F, Kind.I, Kind.W)


def ops_of(problem: Problem, given: Assignment | None = None) -> list[Op]:
    """Every op of the model, where an I may stand for a B."""
    shape = problem.shape
    chains = [microbatch_of(shape, chain) for chain in range(shape.num_chains)]
    return [Op(s, kind, chain) for s in range(shape.num_stages) for chain in chains for kind in kinds_of(problem, s, given)]


def lengths_us(problem: Problem, op: Op, given: Assignment | None = None) -> tuple[int, int]:
    """The length of `op` if its backward pass is split, and if it is fused; equal where `fusing` is fixed."""
    if given is None:
        costs = problem.profile.stages[op.stage]
        forward, split, weight, whole = costs.forward_us, costs.input_us, costs.weight_us, costs.fused_us
    else:
        forward, split, weight, whole = given.lengths_us[:, op.stage, chain_of(problem.shape, op.microbatch)].tolist()
    split_us = {Kind.F: forward, Kind.I: split, Kind.W: weight}[op.kind]
    fused_us = {Kind.F: forward, Kind.I: whole, Kind.W: 0}[op.kind]
    match fusing(problem, op.stage, given):
        case Fusing.ALWAYS:
            return fused_us, fused_us
        case Fusing.NEVER:
            return split_us, split_us
        case Fusing.FREE:
            return split_us, fused_us


def held_of(problem: Problem, op: Op, given: Assignment | None = None) -> tuple[int, int]:
    """The memory that the chain of `op` takes at its stage with F, and the part of it that stays between I and W."""
    if given is None:
        return problem.held_by_forward(op.stage), problem.held_for_weight(op.stage)
    at = op.stage, chain_of(problem.shape, op.microbatch)
    return int(given.taken[at]), int(given.kept[at])


def routes_of(problem: Problem, op: Op, given: Assignment | None = None) -> tuple[int, ...]:
    """The pipelines whose worker may run the chain of `op`: the home, any live peer if that is dead, or the given."""
    home, cluster = op.microbatch.pipeline, problem.cluster
    if given is not None and problem.speeds:
        return (int(given.pipeline[op.stage, chain_of(problem.shape, op.microbatch)]),)
    return (home,) if cluster.is_live(Worker(home, op.stage)) else tuple(cluster.live_pipelines(op.stage))


def layer_users(problem: Problem, given: Assignment | None) -> dict[int, list[tuple[int, MicroBatch]]]:
    """The stages and chains that compute a layer, for each layer that is stepped when several stages have used it."""
    held = problem.held_layers
    if held is None or given is None or not problem.techniques.staggered:
        return {}
    users: dict[int, list[tuple[int, MicroBatch]]] = {layer: [] for layer in held.shared}
    positions = np.array(held.sums.bounds)[:, None] + given.offsets
    for stage, chain in np.ndindex(given.pipeline.shape):
        for layer in range(positions[stage, chain], positions[stage + 1, chain]):
            if layer in users:
                users[layer].append((stage, microbatch_of(problem.shape, chain)))
    return {layer: found for layer, found in users.items() if len({stage for stage, _ in found}) > 1}


def head_us(problem: Problem, stage: int, given: Assignment | None = None) -> int:
    """The earliest start of any op at `stage`: the time of the first forward through the stages before."""
    comm = sum(problem.profile.comm_us(s) for s in range(stage))
    if given is None:
        return comm + sum(problem.profile.stages[s].forward_us for s in range(stage))
    return comm + int(given.lengths_us[0, :stage].sum(axis=0).min())


def load_us(problem: Problem, op: Op, given: Assignment | None = None) -> int:
    """The least time that the chain of `op` takes of its worker at the stage."""
    ops = [Op(op.stage, kind, op.microbatch) for kind in kinds_of(problem, op.stage, given)]
    return min(sum(lengths_us(problem, each, given)[how] for each in ops) for how in (0, 1))


def finish_us(problem: Problem, stage: int) -> int:
    """Time from the last end of `stage` to the end of the period."""
    if problem.techniques.staggered:
        return problem.finish_us(stage)
    return problem.reduce_us(stage) + max(map(problem.optimizer_us, range(problem.shape.num_stages)))


def first_dead_stage(problem: Problem, home: int) -> int:
    """The first stage at which `home` has no worker; the number of stages if it has them all."""
    dead = [worker.stage for worker in problem.cluster.failed if worker.pipeline == home]
    return min(dead, default=problem.shape.num_stages)


def arcs(problem: Problem, given: Assignment | None = None) -> Iterator[Arc]:
    """Every precedence of the model: the rules', and those that lose no optimum."""
    for op in ops_of(problem, given):
        for before in needs(op, problem.shape.num_stages):
            yield Arc(before, op, lag_us(before, op, problem))
    if given is not None:
        return  # chains with different cuts are not interchangeable
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
    shape, given = problem.shape, given_by(problem, schedule)
    homes = np.arange(shape.num_chains) // shape.num_microbatches
    for stage in range(shape.num_stages if not problem.speeds else 0):
        live = np.isin(homes, problem.cluster.live_pipelines(stage))
        if (schedule.pipeline[stage] != homes)[live].any():
            return None
    made = _split(problem, schedule, given)
    for home in range(shape.num_pipelines if given is None else 0):
        chains = slice(home * shape.num_microbatches, (home + 1) * shape.num_microbatches)
        dead = first_dead_stage(problem, home)
        if dead == shape.num_stages:
            _sort_all(made, chains)
        else:
            _sort_forwards(made, chains, dead)
    weight_us = np.where(made.is_fused, made.input_us + made.length_us(Kind.B), made.weight_us)
    return replace(made, weight_us=weight_us)


def _split(problem: Problem, schedule: Schedule, given: Assignment | None) -> Schedule:
    """A copy in which the stages that never fuse have an I and its W in the place of a B."""
    weight, is_fused = schedule.weight_us.copy(), schedule.is_fused.copy()
    for stage in range(problem.shape.num_stages):
        if fusing(problem, stage, given) is Fusing.NEVER:
            after_input = schedule.input_us[stage] + schedule.length_us(Kind.I)[stage]
            weight[stage] = np.where(is_fused[stage], after_input, weight[stage])
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
