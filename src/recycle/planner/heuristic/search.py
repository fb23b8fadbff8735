"""A search point and how it is tried: a problem as the kernel wants it, a setting, and the schedule that comes of it."""

from dataclasses import dataclass, field

import numpy as np

from recycle.core.errors import UserError
from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.model.routing import balanced_routes, ranks
from recycle.planner.model.schedule import Bools, Ints, Schedule, comms_of, costs_of

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Setting:
    """What the list scheduler is told: its dials by stage, and by kind, stage and chain whom to wait for."""

    dials: Ints
    is_urgent: Bools


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule as the kernel left it: the starts, the order in which ops were placed, and how good it is."""

    setting: Setting
    starts: Ints
    order: Ints
    score: tuple[int, int]  # the period, then by how much the stages together exceed the bound


@dataclass(frozen=True, slots=True)
class Search:
    """A problem with its routing, as the kernel wants it."""

    problem: Problem
    bound_us: int
    pipeline: Ints
    rank: Ints
    costs: Ints
    is_fused: Bools
    finish_us: Ints = field(repr=False)

    @staticmethod
    def of(problem: Problem, bound_us: int) -> "Search":
        _refuse_endless(problem)
        size = (problem.shape.num_stages, problem.shape.num_chains)
        is_fused = np.full(size, not problem.techniques.decoupled)
        finish = np.array([problem.finish_us(stage) for stage in range(size[0])], dtype=np.int64)
        return Search(problem, bound_us, balanced_routes(problem), ranks(problem), cost_table(problem), is_fused, finish)

    @property
    def num_ops(self) -> int:
        return self.pipeline.size * (3 if self.problem.techniques.decoupled else 2)

    def run(self, setting: Setting) -> Found:
        """Schedule with `setting`, and tighten."""
        num_pipelines = self.problem.shape.num_pipelines
        starts = np.zeros((3, *self.pipeline.shape), np.int64)
        order = np.empty(starts.size, np.int64)
        dials, is_urgent = setting.dials, setting.is_urgent
        num_ops = kernel.list_schedule(self.pipeline, self.rank, self.costs, dials, is_urgent, num_pipelines, starts, order)
        kernel.tighten(self.pipeline, self.costs, self.is_fused, num_pipelines, order[:num_ops], starts)
        return Found(setting, starts, order[:num_ops], self.score(starts))

    def spans(self, starts: Ints) -> Ints:
        """The span of each stage, with its reduction and step."""
        spans: Ints = kernel.last_ends(self.costs, self.is_fused, starts) - starts[kernel.F].min(axis=1) + self.finish_us
        return spans

    def score(self, starts: Ints) -> tuple[int, int]:
        period = self.schedule(starts).period_us(self.problem)
        return period, int(np.maximum(0, self.spans(starts) - self.bound_us).sum())

    def slack(self, found: Found) -> Ints:
        """How much later each op could start with no span longer than the bound; negative if it is late already."""
        late = found.starts.copy()
        last = found.starts[kernel.F].min(axis=1) + self.bound_us - self.finish_us
        kernel.postpone(self.pipeline, self.costs, self.is_fused, self.problem.shape.num_pipelines, found.order, last, late)
        slack: Ints = late - found.starts
        return slack

    def schedule(self, starts: Ints) -> Schedule:
        return Schedule(self.pipeline, starts[kernel.F], starts[kernel.I], starts[kernel.W], self.is_fused)


def _refuse_endless(problem: Problem) -> None:
    """Raise if times could outgrow the kernel's 64-bit events; only absurd costs do that."""
    shape, profile = problem.shape, problem.profile
    comm_us = sum(profile.comm_us(stage) for stage in range(shape.num_stages - 1))
    work_us = sum(s.forward_us + max(s.input_us + s.weight_us, s.fused_us) for s in profile.stages)
    one_by_one = shape.num_chains * (work_us + 2 * comm_us)
    if one_by_one * 5 * shape.num_stages * shape.num_chains >= 1 << 62:
        raise UserError(f"an iteration could take {one_by_one} µs, more than the planner can count: give costs in a coarser unit")


def cost_table(problem: Problem) -> Ints:
    """The kernel's cost columns; without Decoupled BackProp every backward pass is one fused op."""
    num_stages = problem.shape.num_stages
    table = np.zeros((num_stages, kernel.NUM_COSTS), np.int64)
    fused = costs_of(problem, Kind.B)
    splits = problem.techniques.decoupled
    table[:, kernel.FORWARD_US] = costs_of(problem, Kind.F)
    table[:, kernel.INPUT_US] = costs_of(problem, Kind.I) if splits else fused
    table[:, kernel.WEIGHT_US] = costs_of(problem, Kind.W) if splits else 0
    table[:, kernel.FUSED_US] = fused
    table[:-1, kernel.COMM_US] = comms_of(problem)
    for stage in range(num_stages):
        capacity = problem.capacity(stage)
        table[stage, kernel.CAPACITY] = UNLIMITED if capacity is None else capacity
        table[stage, kernel.TAKEN] = problem.held_by_forward(stage)
        table[stage, kernel.KEPT] = problem.held_for_weight(stage)
    return table
