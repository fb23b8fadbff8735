"""Earliest and latest starts of ops for `milp`, and whole times for rows in the order that its solver decided."""

from itertools import pairwise

import numpy as np

from recycle.core.op import Kind, Op
from recycle.core.plans.plan import chain_of
from recycle.core.problem import Problem
from recycle.planner.exact.exact_model import Arc, arcs, finish_us, kinds_of, layer_users, lengths_us, ops_of
from recycle.planner.model.assignment import Assignment, Ints
from recycle.planner.model.schedule import Schedule


class OpTimes:
    """The ops by number, the arcs between them, and the earliest times that arcs allow."""

    def __init__(self, problem: Problem, given: Assignment | None = None) -> None:
        self.problem, self.given = problem, given
        self.ops = ops_of(problem, given)
        self.number = {op: at for at, op in enumerate(self.ops)}
        self.indices = {op: (op.stage, chain_of(problem.shape, op.microbatch)) for op in self.ops}
        self.arcs = list(arcs(problem, given))
        self.shortest = np.array([min(lengths_us(problem, op, given)) for op in self.ops], dtype=np.int64)

    def edges(self, lengths: Ints) -> Ints:
        """Each arc as (before, after, least time from start to start), if ops take `lengths`."""

        def distance(arc: Arc) -> int:
            return arc.lag_us + (0 if arc.from_start else int(lengths[self.number[arc.before]]))

        return np.array([(self.number[arc.before], self.number[arc.after], distance(arc)) for arc in self.arcs], dtype=np.int64)

    def of_kind(self, stage: int, last: bool) -> list[int]:
        """The ops that begin the work of a chain at `stage`, or those that end it."""
        kind = kinds_of(self.problem, stage, self.given)[-1 if last else 0]
        return [at for at, op in enumerate(self.ops) if op.stage == stage and op.kind is kind]

    def uses_of_layers(self) -> dict[int, list[tuple[int, int]]]:
        """The first and the last op of each use of a layer that several stages compute."""
        kinds = [kinds_of(self.problem, stage, self.given)[-1] for stage in range(self.problem.shape.num_stages)]
        return {
            layer: [
                (self.number[Op(stage, Kind.F, chain)], self.number[Op(stage, kinds[stage], chain)]) for stage, chain in users
            ]
            for layer, users in layer_users(self.problem, self.given).items()
        }


def _earliest(least: Ints, edges: Ints) -> Ints | None:
    """The least starts from `least` on that satisfy all edges; None if they have a cycle of positive length."""
    starts = least.copy()
    for _ in range(len(least) + 1):
        before = starts.copy()
        np.maximum.at(starts, edges[:, 1], starts[edges[:, 0]] + edges[:, 2])
        if (starts == before).all():
            return starts
    return None


def limits_of(timing: OpTimes, upper_us: int) -> tuple[Ints, Ints] | None:
    """The earliest and the latest start of each op within a period of at most `upper_us`; None if there is none."""
    problem, ops = timing.problem, timing.ops
    edges = timing.edges(timing.shortest)
    earliest = _earliest(np.zeros_like(timing.shortest), edges)
    assert earliest is not None, "the model's precedences have a cycle"
    staggered = problem.techniques.staggered
    ends = np.full(len(ops), upper_us * (2 if staggered else 1), dtype=np.int64)
    for stage in range(problem.shape.num_stages):
        # Synchronous and at stage 0, the window opens at 0; else it opens at the latest with the stage's first F.
        latest = _latest(timing, edges, ends)
        opens = min(latest[at] for at in timing.of_kind(stage, last=False)) if staggered and stage else 0
        at = timing.of_kind(stage, last=True)
        ends[at] = np.minimum(ends[at], opens + upper_us - finish_us(problem, stage))
    latest = _latest(timing, edges, ends)
    return (earliest, latest) if (earliest <= latest).all() else None


def _latest(timing: OpTimes, edges: Ints, ends: Ints) -> Ints:
    """The latest starts with which each op ends by `ends` and all edges hold: the earliest ones, backwards in time."""
    backwards = _earliest(timing.shortest - ends, edges[:, [1, 0, 2]])
    assert backwards is not None, "the model's precedences have a cycle"
    return -backwards


def whole_times(timing: OpTimes, schedule: Schedule, rough: list[float], periods: range) -> Ints | None:
    """Whole starts in the order of the rough ones, for the routes and fusing of `schedule`, with the least possible period."""
    problem, indices = timing.problem, timing.indices
    fused = [int(schedule.is_fused[indices[op]]) for op in timing.ops]
    each = [lengths_us(problem, op, timing.given)[how] for op, how in zip(timing.ops, fused, strict=True)]
    lengths = np.array(each, dtype=np.int64)
    rows: dict[tuple[int, int], list[int]] = {}
    for at in sorted(range(len(rough)), key=lambda at: (rough[at], lengths[at])):
        op = timing.ops[at]
        rows.setdefault((op.stage, int(schedule.pipeline[indices[op]])), []).append(at)
    neighbours = [(a, b, lengths[a]) for row in rows.values() for a, b in pairwise(row)]
    fixed = np.concatenate([timing.edges(lengths), np.array(neighbours, dtype=np.int64).reshape(-1, 3)])
    for period_us in periods:
        closing = []
        for stage in range(problem.shape.num_stages if problem.techniques.staggered else 0):
            room_us = period_us - finish_us(problem, stage)
            at_stage = [row for (where, _), row in rows.items() if where == stage]
            closing += [(last[-1], first[0], lengths[last[-1]] - room_us) for last in at_stage for first in at_stage]
        closing += _layer_edges(timing, lengths, period_us)
        starts = _earliest(np.zeros_like(lengths), np.concatenate([fixed, np.array(closing, dtype=np.int64).reshape(-1, 3)]))
        if starts is not None:
            return starts
    return None


def _layer_edges(timing: OpTimes, lengths: Ints, period_us: int) -> list[tuple[int, int, int]]:
    """From the end of every use of a shared layer to the start of every use in the next iteration."""
    held, edges = timing.problem.held_layers, []
    for layer, users in timing.uses_of_layers().items():
        assert held is not None
        room_us = period_us - held.finish_of_layer_us[layer]
        edges += [(last, first, int(lengths[last]) - room_us) for _, last in users for first, _ in users]
    return edges
