"""Groups of pipelines: their plans together are one legal plan of the whole cluster, with the period that was said."""

from array import array
from dataclasses import replace

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.plans.plan import Plan, Quality, Row
from recycle.core.plans.rules import check, makespan_us
from recycle.core.profile import Link
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.problem_from_text import problem as describe
from recycle.sim import pipeline_groups as module
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.pipeline_groups import is_planned_in_groups, pipeline_groups, plan_groups
from tests.sim.quick_plans import EFFORT, plan_quickly


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    plan_quickly(monkeypatch)
    monkeypatch.setattr(module, "MOST_WHOLE_OPS", 0)
    monkeypatch.setattr(module, "_GROUP_OPS", 0)
    monkeypatch.setattr(module, "_FEWEST_PIPELINES", 3)


def problem_of(num_pipelines):
    """Stages that reduce for as long as some ops take."""
    made = describe(num_pipelines, 4, 6, costs="10,13,9", comm=1, memory=8)
    stages = tuple(replace(one, gradient_bytes=100, optimizer_us=2 + at) for at, one in enumerate(made.profile.stages))
    return replace(made, profile=replace(made.profile, stages=stages, peer_link=Link(1, 10)))


def composed(grouped):
    """The rows of all groups side by side, as one plan of the whole cluster."""
    shape, rows, dead, first = grouped.problem.shape, [], set(), 0
    for plan, number in grouped.groups:
        for _ in range(number):
            moved = first * shape.num_microbatches
            for row in plan.rows:
                worker = Worker(row.worker.pipeline + first, row.worker.stage)
                rows.append(Row(worker, row.kinds, array("q", [chain + moved for chain in row.chains]), row.starts_us))
            failed = plan.problem.cluster.failed
            dead |= {Worker(worker.pipeline + first, worker.stage) for worker in failed}
            first += plan.problem.shape.num_pipelines
    assert first == shape.num_pipelines
    whole = replace(grouped.problem, cluster=Cluster(shape, frozenset(dead)))
    rows.sort(key=lambda row: (row.worker.pipeline, row.worker.stage))
    return Plan(whole, tuple(rows), grouped.times_us()[0], Quality(lower_bound(whole), "feasible", "groups"))


@pytest.mark.parametrize("num_failures", [0, 1, 2, 5, 9])
def test_the_plans_of_all_groups_are_a_legal_plan_of_the_cluster_with_their_period(num_failures):
    grouped = plan_groups(problem_of(10), num_failures, EFFORT)
    plan = composed(grouped)
    assert check(plan) == []
    period_us, longest_us = grouped.times_us()
    assert (period_us, longest_us) == (plan.period_us, makespan_us(plan))
    assert sum(plan.busy_us(row) for row in plan.rows) == grouped.work_us
    assert num_failures <= sum(grouped.distribution) == len(plan.problem.cluster.failed) < num_failures + 3


def test_groups_are_equal_and_have_all_pipelines_and_at_least_all_dead_workers():
    for num_pipelines in range(3, 40):
        for num_failures in range(30):
            groups = pipeline_groups(Shape(num_pipelines, 4, 6), num_failures)
            assert sum(size * number for (size, _), number in groups.items()) == num_pipelines
            assert sum(dead * number for (_, dead), number in groups.items()) >= num_failures
            sizes = {size for size, dead in groups if dead}
            assert len(sizes) <= 1
            assert all(size >= 3 for size in sizes)


def test_without_a_dead_worker_one_pipeline_is_planned_for_all():
    assert pipeline_groups(Shape(10, 4, 6), 0) == {(1, 0): 10}


def test_iteration_times_of_large_clusters_come_from_groups(monkeypatch):
    problem = problem_of(10)
    grouped = IterationTimes(problem).normalized(2)
    assert grouped.period_us == plan_groups(problem, 2, EFFORT).times_us()[0]
    monkeypatch.setattr(module, "MOST_WHOLE_OPS", 10**6)
    assert IterationTimes(problem).normalized(2).work_us == grouped.work_us


def test_where_a_group_would_be_dead_the_cluster_is_planned_whole():
    problem = problem_of(10)
    assert is_planned_in_groups(problem, 24)
    assert not is_planned_in_groups(problem, 25)  # three groups of three pipelines, with nine dead, of eight that may be
    assert IterationTimes(problem).normalized(30).period_us > 0
