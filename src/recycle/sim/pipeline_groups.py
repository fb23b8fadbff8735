"""GroupedPlan: a plan of a large cluster, made of plans for groups of its pipelines.

A search over hundreds of thousands of ops has no time to try more than a few orders. But pipelines are alike, and the work of a
dead worker need not be spread over all of them. So the pipelines are divided into groups, each with its share of the dead
workers, and only groups that differ are planned. A group re-routes among its own pipelines; where nobody is dead, a group is one
pipeline. Groups have nothing in common but the reduction of gradients, so that their rows together are a legal plan: a stage is
at work from the first op in any group to the last one, and then it reduces over all its live workers.
"""

from collections import Counter
from dataclasses import dataclass, replace

from recycle.core.cluster import Cluster, Shape
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import period_from, stage_windows
from recycle.core.problem import Problem
from recycle.planner.failure_normalization import Distribution, most_failures, normalized_problem
from recycle.planner.solve import solve_normalized

# Up to so many ops the whole cluster is planned at once.
MOST_WHOLE_OPS = 200_000
# A group has about so many ops, so that a search tries a dozen orders, but not fewer pipelines than these: in a small group one
# dead worker is a large share of its stage.
_GROUP_OPS, _FEWEST_PIPELINES = 125_000, 16


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """Plans for groups of pipelines of `problem`, each with the number of such groups."""

    problem: Problem
    groups: tuple[tuple[Plan, int], ...]

    @property
    def distribution(self) -> Distribution:
        """The dead workers of each stage in all groups."""
        dead = zip(*([number * dead for dead in plan.problem.cluster.num_failed] for plan, number in self.groups), strict=True)
        return tuple(map(sum, dead))

    @property
    def work_us(self) -> int:
        return sum(number * sum(map(plan.busy_us, plan.rows)) for plan, number in self.groups)

    def times_us(self) -> tuple[int, int]:
        """The period and the makespan of all groups together."""
        whole = normalized_problem(self.problem, self.distribution)
        by_stage = zip(*(stage_windows(plan) for plan, _ in self.groups), strict=True)
        windows = [(min(first for first, _ in each), max(last for _, last in each)) for each in by_stage]
        last_us = max(last + whole.finish_us(stage) for stage, (_, last) in enumerate(windows))
        return period_from(whole, windows), last_us - min(first for first, _ in windows)


def is_planned_in_groups(problem: Problem, num_failures: int) -> bool:
    """Whether `plan_groups` is meant for it: many ops, staggered steps, no shared layers, and no group of dead workers alone."""
    if _num_ops(problem.shape) <= MOST_WHOLE_OPS or problem.shared_layers or not problem.techniques.staggered:
        return False
    groups = pipeline_groups(problem.shape, num_failures)
    return all(dead <= most_failures(replace(problem.shape, num_pipelines=size)) for size, dead in groups)


def plan_groups(problem: Problem, num_failures: int, effort: int) -> GroupedPlan:
    """Plan each kind of group with so much effort, its dead workers where they hurt least."""
    profile, shape = problem.profile, problem.shape
    # A group alone would reduce less than all pipelines do, so that it knows the reduction as a part of its step.
    stages = (
        replace(one, optimizer_us=one.optimizer_us + profile.reduce_us(stage, shape.num_pipelines), gradient_bytes=0)
        for stage, one in enumerate(profile.stages)
    )
    alone = replace(profile, stages=tuple(stages), layers=(), peer_link=replace(profile.peer_link, latency_us=0))
    plans = []
    for (size, dead), number in pipeline_groups(shape, num_failures).items():
        group = Problem(Cluster(replace(shape, num_pipelines=size)), alone, problem.memory, problem.techniques)
        # Beside groups with dead workers, a pipeline without one has time enough.
        own_effort = effort if dead or not num_failures else effort // 8
        plans.append((solve_normalized(group, dead, "greedy", effort=own_effort)[0], number))
    return GroupedPlan(problem, tuple(plans))


def pipeline_groups(shape: Shape, num_failures: int) -> Counter[tuple[int, int]]:
    """How many groups there are of so many pipelines with so many dead workers; pipelines that are left over are alone.

    Groups with dead workers have equally many, so that there may be a few more than `num_failures`: a plan serves fewer, too.
    """
    most = max(_FEWEST_PIPELINES, _GROUP_OPS * shape.num_pipelines // _num_ops(shape))
    num_groups = max(1, shape.num_pipelines // most)
    size, num_hit = shape.num_pipelines // num_groups, min(num_groups, num_failures)
    found = Counter({(1, 0): shape.num_pipelines - num_hit * size})
    if num_hit:
        found[size, -(-num_failures // num_groups)] = num_hit
    return +found


def _num_ops(shape: Shape) -> int:
    return 3 * shape.num_stages * shape.num_chains
