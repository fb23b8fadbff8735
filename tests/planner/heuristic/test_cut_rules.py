"""Cut rules: whatever their numbers, schedules are legal; and with many stages they are shorter than those of the portfolio."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import recycle
from recycle import Plan, Problem
from recycle.core.plans.plan import Quality
from recycle.core.plans.rules import check
from recycle.planner.dead_placement import spread_failures
from recycle.planner.failure_normalization import normalized_problem
from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.known_settings import CutRule, portfolio
from recycle.planner.heuristic.search import ListSchedule, Search, Setting
from recycle.planner.model.chain_cuts import assign, assignments
from recycle.planner.model.lower_bound import lower_bound
from tests.planner.test_cut_plans import cut_problems


def by_rule(problem: Problem, rule: CutRule) -> tuple[Search, ListSchedule]:
    search = Search.of(problem, lower_bound(problem), rule.assignment(problem))
    return search, search.run(rule.setting(problem))


def deep_problem() -> Problem:
    """A pipeline of 16 stages with memory for 32 micro-batches, and four dead workers far apart."""
    cut = recycle.problem(4, 16, 32, costs=(40, 52, 36), comm=1, memory=32, layers=64, shared_layers=2)
    return normalized_problem(cut, spread_failures(cut, 4))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cut_problems(), st.integers(0, 1000))
def test_schedules_of_rules_are_legal_whatever_their_numbers(problem: Problem, seed: int) -> None:
    assume(problem.held_layers is not None)
    rng, rule = np.random.default_rng(seed), CutRule()
    for _ in range(4):
        search, found = by_rule(problem, rule)
        schedule = search.schedule(found.starts).from_zero()
        quality = Quality(search.bound_us, "feasible", "greedy", 0)
        plan = Plan(problem, schedule.rows(problem), found.score[0], quality, schedule.assignment.cuts)
        assert check(plan) == []
        rule = rule.neighbour(rng)


def test_a_rule_keeps_its_cuts_while_only_the_urgency_of_ops_changes() -> None:
    problem, rule = deep_problem(), CutRule()
    patient, lighter = replace(rule, last=100.0), replace(rule, last_idle=rule.last_idle + 1)
    assert rule.has_cuts_of(patient)
    assert not rule.has_cuts_of(lighter)
    assert (rule.assignment(problem).offsets == patient.assignment(problem).offsets).all()
    last_stage = rule.assignment(problem).loads_us(problem)[-1]
    assert lighter.assignment(problem).loads_us(problem)[-1].sum() < last_stage.sum()


def test_the_first_and_the_last_ops_of_a_pipeline_are_the_most_urgent() -> None:
    shape = deep_problem().shape
    urgency = CutRule().setting(deep_problem()).urgency.reshape(3, shape.num_stages, shape.num_pipelines, shape.num_microbatches)
    inputs = urgency[kernel.I, 0, 0].tolist()
    middle = inputs.index(min(inputs))
    assert inputs[:middle] == sorted(inputs[:middle], reverse=True)
    assert inputs[-8:] == sorted(inputs[-8:])
    assert not urgency[kernel.W].any()


@pytest.mark.parametrize("percent", [0, 25, 50])
def test_urgency_is_the_share_of_its_patience_that_a_worker_waits(percent: int) -> None:
    problem = deep_problem()
    search, setting = Search.of(problem, lower_bound(problem), assign(problem)), next(portfolio(problem))
    shorter = setting.parameters.copy()
    shorter[:, kernel.PATIENCE_US] = setting.parameters[:, kernel.PATIENCE_US] * percent // 100
    partly = (setting.urgency // kernel.WHOLE_PATIENCE * percent).astype(np.uint8)
    found = search.run(Setting(setting.parameters, partly))
    assert (found.starts == search.run(Setting(shorter, setting.urgency)).starts).all()


def test_rules_find_shorter_schedules_than_the_portfolio_where_a_pipeline_is_deep() -> None:
    problem = deep_problem()
    bound = lower_bound(problem)
    searches = [Search.of(problem, bound, one) for one in assignments(problem)]
    by_portfolio = min(search.run(setting).score[0] for search in searches for setting in portfolio(problem))
    rng, rule, periods = np.random.default_rng(0), CutRule(), []
    for _ in range(80):  # of the portfolio there are as many
        periods.append(by_rule(problem, rule)[1].score[0])
        rule = CutRule().neighbour(rng)
    assert min(periods) < 0.99 * by_portfolio
