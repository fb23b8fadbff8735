"""The search space of the greedy method: settings of the priority rule, the schedules they give, and neighbouring settings."""

from dataclasses import dataclass, field

import numpy as np

from recycle.core.errors import UserError
from recycle.core.problem import Problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.model.assignment import Assignment, Bools, Ints
from recycle.planner.model.routing import ranks
from recycle.planner.model.schedule import Schedule, comms_of

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the list scheduler: the rule's parameters by stage, and the urgency of ops by kind, stage and chain."""

    parameters: Ints
    urgency: kernel.Percents


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """A schedule that the list scheduler made: its setting, the starts, the order in which ops were placed, and the score."""

    setting: Setting
    starts: Ints
    order: Ints
    score: tuple[int, int]  # the period, then by how much the stages together exceed the bound


@dataclass(frozen=True, slots=True)
class Search:
    """A problem with its assignment, as arrays for the compiled kernels."""

    problem: Problem
    bound_us: int
    assignment: Assignment
    rank: Ints
    work: Ints
    costs: Ints
    is_fused: Bools
    finish_us: Ints = field(repr=False)
    longest_us: int

    @staticmethod
    def of(problem: Problem, bound_us: int, assignment: Assignment) -> "Search":
        _refuse_endless(problem)
        size = (problem.shape.num_stages, problem.shape.num_chains)
        is_fused = np.full(size, not problem.techniques.decoupled)
        finish = np.array([problem.finish_us(stage) for stage in range(size[0])], dtype=np.int64)
        work = work_table(problem, assignment)
        longest = int(work[: kernel.WEIGHT_US + 1].max())
        costs = cost_table(problem, assignment)
        return Search(problem, bound_us, assignment, ranks(problem), work, costs, is_fused, finish, longest)

    @property
    def pipeline(self) -> Ints:
        return self.assignment.pipeline

    def run(self, setting: Setting) -> ListSchedule:
        num_pipelines = self.problem.shape.num_pipelines
        starts = np.zeros((3, *self.pipeline.shape), np.int64)
        order = np.empty(starts.size, np.int64)
        num_ops = kernel.list_schedule(
            self.pipeline, self.rank, self.work, self.costs, setting.parameters, setting.urgency, num_pipelines, starts, order
        )
        kernel.justify(self.pipeline, self.work, self.costs, self.is_fused, num_pipelines, order[:num_ops], starts)
        return ListSchedule(setting, starts, order[:num_ops], self.score(starts))

    def spans(self, starts: Ints) -> Ints:
        """The span of each stage, with its reduction and step."""
        spans: Ints = kernel.last_ends(self.work, self.is_fused, starts) - starts[kernel.F].min(axis=1) + self.finish_us
        return spans

    def score(self, starts: Ints) -> tuple[int, int]:
        period = self.schedule(starts).period_us(self.problem)
        return period, int(np.maximum(0, self.spans(starts) - self.bound_us).sum())

    def slack(self, found: ListSchedule) -> Ints:
        """How much later each op could start with no span longer than the bound; negative if it is late already."""
        late = found.starts.copy()
        last = found.starts[kernel.F].min(axis=1) + self.bound_us - self.finish_us
        num_pipelines = self.problem.shape.num_pipelines
        kernel.right_shift(self.pipeline, self.work, self.costs, self.is_fused, num_pipelines, found.order, last, late)
        slack: Ints = late - found.starts
        return slack

    def schedule(self, starts: Ints) -> Schedule:
        return Schedule(self.assignment, starts[kernel.F], starts[kernel.I], starts[kernel.W], self.is_fused)


def _refuse_endless(problem: Problem) -> None:
    """Raise if times could outgrow the kernel's 64-bit events; only absurd costs do that."""
    shape, profile = problem.shape, problem.profile
    comm_us = sum(profile.comm_us(stage) for stage in range(shape.num_stages - 1))
    work_us = sum(s.forward_us + max(s.input_us + s.weight_us, s.fused_us) for s in profile.stages)
    work_us = round(work_us / min([1.0, *(speed for _, speed in problem.speeds)]))
    one_by_one = shape.num_chains * (work_us + 2 * comm_us)
    if one_by_one * 5 * shape.num_stages * shape.num_chains >= 1 << 62:
        raise UserError(f"an iteration could take {one_by_one} µs, more than the planner can count: give costs in a coarser unit")


def work_table(problem: Problem, assignment: Assignment) -> Ints:
    """Return the kernel's lengths and memory of ops; without Decoupled BackProp every backward pass is one fused op."""
    # Where all chains are alike, one column stands for all of them: the kernels are faster if they need less memory.
    is_alike = not problem.speeds and not assignment.offsets.any()
    num_columns = 1 if is_alike else assignment.pipeline.shape[1]
    table = np.empty((kernel.NUM_WORK, len(assignment.pipeline), num_columns), np.int64)
    forward, split, weight, fused = assignment.lengths_us[:, :, :num_columns]
    splits = problem.techniques.decoupled
    table[kernel.FORWARD_US] = forward
    table[kernel.INPUT_US] = split if splits else fused
    table[kernel.WEIGHT_US] = weight if splits else 0
    table[kernel.FUSED_US] = fused
    table[kernel.TAKEN], table[kernel.KEPT] = assignment.taken[:, :num_columns], assignment.kept[:, :num_columns]
    return table


def cost_table(problem: Problem, assignment: Assignment) -> Ints:
    """Return the kernel's costs by stage."""
    num_stages = problem.shape.num_stages
    table = np.zeros((num_stages, kernel.NUM_COSTS), np.int64)
    table[:-1, kernel.COMM_US] = comms_of(problem)
    for stage in range(num_stages):
        capacity = problem.capacity(stage)
        table[stage, kernel.CAPACITY] = UNLIMITED if capacity is None else capacity
    table[:, kernel.LEAST], table[:, kernel.MOST] = assignment.taken.min(axis=1), assignment.taken.max(axis=1)
    return table


def neighbour(rng: np.random.Generator, search: Search, best: ListSchedule) -> Setting:
    """Return a random setting near that of `best`: other ops are urgent, or a parameter of the rule differs."""
    if rng.random() < 0.3:
        return Setting(best.setting.parameters, _urgent_by_slack(rng, search, best))
    return Setting(_changed_parameter(rng, best.setting.parameters), best.setting.urgency)


def _changed_parameter(rng: np.random.Generator, parameters: Ints) -> Ints:
    """Return parameters that differ in one column over a run of stages."""
    changed = parameters.copy()
    num_stages = len(parameters)
    first = int(rng.integers(num_stages))
    last = min(num_stages, first + 1 + int(rng.integers(max(1, num_stages // 2))))
    column = int(rng.choice([kernel.PUSH, kernel.PUSH, kernel.STASH, kernel.HOLD, kernel.PATIENCE_US]))
    step = int(rng.choice([-4, -2, -1, 1, 2, 4]))
    changed[first:last, column] = np.maximum(0, changed[first:last, column] + step)
    return changed


def _urgent_by_slack(rng: np.random.Generator, search: Search, found: ListSchedule) -> kernel.Percents:
    """Return as urgent the critical F's and I's of a schedule: those with the least slack."""
    slack = search.slack(found)
    is_urgent = slack <= int(rng.integers(0, 1 + int(search.work[: kernel.WEIGHT_US + 1].sum(axis=0).max())))
    is_urgent[kernel.W] = False
    return np.where(is_urgent, kernel.WHOLE_PATIENCE, 0).astype(np.uint8)
