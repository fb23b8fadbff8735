"""The greedy method: list scheduling under a portfolio of settings, then local search from the best few schedules.

The search effort is counted in placed ops, not in seconds, so that the same problem gives the same plan on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np

from recycle.core.cluster import Cluster, Shape
from recycle.core.problem import Problem, Techniques
from recycle.core.profile import Profile
from recycle.planner.heuristic.forward_backward import ForwardBackwardSchedule, forward_backward, splits_all_backwards
from recycle.planner.heuristic.known_settings import CutRule, portfolio
from recycle.planner.heuristic.order_search import improve
from recycle.planner.heuristic.row_search import improve_rows
from recycle.planner.heuristic.search import ListSchedule, Search, neighbour
from recycle.planner.model.chain_cuts import assignments
from recycle.planner.model.schedule import Schedule

DEFAULT_EFFORT = 60_000_000
# Beyond this share of the effort a search goes on only while its best schedule is not this close to the bound.
_FIRST_SHARE, _CLOSE = 0.15, 1.005
# Small problems are better left to an exact method than searched for long; large ones get the first share at most.
_MOST_RUNS, _LARGE_OPS = 2000, 400_000
# The portfolio gets this share of the runs at most. The best _NUM_PASSED of its schedules get two passes forward and backward
# each, and _NUM_STARTS are improved step by step, because a single one often ends in a local optimum.
_PORTFOLIO_SHARE, _NUM_PASSED, _NUM_STARTS = 0.5, 8, 4
# All assignments together are tried with this share of the runs, before the best of them is searched.
_ASSIGNMENT_SHARE = 0.3
# Where chains may be cut, list scheduling gets this share of its runs, and the rest goes to steps that change orders and cuts.
# These compute so many starts for each op that the runs would place, because they choose nothing.
_RUNS_SHARE_WITH_CUTS, _STARTS_OF_AN_OP = 0.4, 10
# If there are enough runs, this share of them, in addition, is for a search over cut rules. Only the ends of deep pipelines take
# long enough to be worth it.
_RULES_SHARE, _LEAST_RUNS_FOR_RULES, _LEAST_STAGES_FOR_RULES = 0.5, 100, 16
# Where chains are not cut, list scheduling gets this share of its runs, and steps that change orders compute at most so many
# starts, for each op and in all. With more ops than this there would not be enough steps for each.
_RUNS_SHARE_WITHOUT_CUTS, _MOST_STARTS_OF_AN_OP, _MOST_STARTS, _MOST_OPS_FOR_STEPS = 0.7, 20_000, 24_000_000, 20_000
# A search of this many runs calls every kernel.
_RUNS_OF_ALL = 100

_Scheduled = ListSchedule | ForwardBackwardSchedule


def solve_greedy(
    problem: Problem,
    bound_us: int,
    effort: int = DEFAULT_EFFORT,
    out_of_time: Callable[[], bool] = lambda: False,
    least_us: int | None = None,
) -> Schedule:
    """Return the best schedule found with at most about `effort` placed ops; stops early at the bound.

    After the first share of the effort, the search also stops close to `least_us`, or without it close to the bound.
    """
    num_ops = _num_ops(problem)
    num_runs = min(_MOST_RUNS, max(1, effort // num_ops))
    first_runs = max(1, round(num_runs * _FIRST_SHARE))
    if num_ops > _LARGE_OPS:
        num_runs = first_runs
    order_effort, is_cut = _order_effort(problem, effort), problem.held_layers is not None
    is_deep = problem.shape.num_stages >= _LEAST_STAGES_FOR_RULES
    num_rule_runs = round(num_runs * _RULES_SHARE) if order_effort and is_deep and num_runs >= _LEAST_RUNS_FOR_RULES else 0
    if order_effort:
        num_runs = max(1, round(num_runs * (_RUNS_SHARE_WITH_CUTS if is_cut else _RUNS_SHARE_WITHOUT_CUTS)))
    search = _most_promising(problem, bound_us, num_runs)
    best: _Scheduled | None = None
    for number, found in _schedules(search, num_runs):
        best = found if best is None else min(best, found, key=lambda one: one.score)
        is_close = number >= first_runs and best.score[0] <= _CLOSE * (bound_us if least_us is None else least_us)
        if best.score[0] <= bound_us or is_close or out_of_time():
            break
    assert best is not None
    if is_cut and splits_all_backwards(search):
        for tried, found in _by_cut_rules(problem, bound_us, num_rule_runs):
            if found.score < best.score:
                search, best = tried, found
            if best.score[0] <= _CLOSE * (bound_us if least_us is None else least_us) or out_of_time():
                break
    schedule = search.schedule(best.starts)
    is_close = best.score[0] <= _CLOSE * (bound_us if least_us is None else least_us)
    if not order_effort or is_close or (is_cut and not splits_all_backwards(search)):
        return schedule
    return (improve if is_cut else improve_rows)(problem, schedule, bound_us, order_effort, out_of_time)


def _by_cut_rules(problem: Problem, bound_us: int, num_runs: int) -> Iterator[tuple[Search, ListSchedule]]:
    """Yield schedules by cut rules, each with its search: the first rule, then random changes of the best so far."""
    rng, rule, tried = np.random.default_rng(0), CutRule(), CutRule()
    best: tuple[Search, ListSchedule] | None = None
    for _ in range(num_runs):
        if best is not None and tried.has_cuts_of(rule):
            search = best[0]
        else:
            search = Search.of(problem, bound_us, tried.assignment(problem))
        found = search.run(tried.setting(problem))
        yield search, found
        if best is None or found.score <= best[1].score:
            rule, best = tried, (search, found)
        tried = rule.neighbour(rng)


def _num_ops(problem: Problem) -> int:
    return problem.shape.num_stages * problem.shape.num_chains * (3 if problem.techniques.decoupled else 2)


def _order_effort(problem: Problem, effort: int) -> int:
    """How many starts the search over orders and cuts computes: none for very many ops, nor if whole backward passes are cut."""
    if problem.shape.num_stages == 1 or _num_ops(problem) > _LARGE_OPS:
        return 0
    if problem.held_layers is not None:
        return int(effort * (1 - _RUNS_SHARE_WITH_CUTS) * _STARTS_OF_AN_OP) if problem.techniques.decoupled else 0
    if _num_ops(problem) > _MOST_OPS_FOR_STEPS:
        return 0
    most = min(_MOST_STARTS, _MOST_STARTS_OF_AN_OP * _num_ops(problem))
    return min(most, int(effort * (1 - _RUNS_SHARE_WITHOUT_CUTS) * _STARTS_OF_AN_OP))


def _most_promising(problem: Problem, bound_us: int, num_runs: int) -> Search:
    """The search over the assignment whose first few schedules are best; there is one only, unless micro-batches may be cut."""
    num_assignments = 1 if _num_ops(problem) > _LARGE_OPS else None
    searches = [Search.of(problem, bound_us, one) for one in islice(assignments(problem), num_assignments)]
    if len(searches) == 1:
        return searches[0]
    num_tried = max(1, round(num_runs * _ASSIGNMENT_SHARE / len(searches)))
    return min(searches, key=lambda search: min(found.score for _, found in _schedules(search, num_tried)))


@cache
def compile_kernels(like: Problem | None = None) -> None:
    """Compile all kernels, or load them from the cache, so that no later search has to wait for the compiler.

    Compiling takes up to a minute, once on a machine. If searches are for problems `like` one, other kernels are left out.
    """
    for is_decoupled in (True, False) if like is None else (like.techniques.decoupled,):
        profile = Profile.uniform(2, 1, 1, 1).with_equal_layers(2)
        small = Problem(Cluster(Shape(2, 2, 2)), profile, techniques=Techniques(decoupled=is_decoupled))
        # A bound that no schedule reaches, so that everything is tried.
        for shared_layers in (0, 1) if like is None else (min(1, like.shared_layers),):
            problem = replace(small, shared_layers=shared_layers)
            solve_greedy(problem, bound_us=0, effort=_RUNS_OF_ALL * _num_ops(small))


def _schedules(search: Search, num_runs: int) -> Iterator[tuple[int, _Scheduled]]:
    """Yield schedules, each with the number of runs of the list scheduler so far."""
    starts: list[ListSchedule] = []
    for setting in islice(portfolio(search.problem), max(1, round(num_runs * _PORTFOLIO_SHARE))):
        starts.append(search.run(setting))
        yield len(starts), starts[-1]
    improve = _forward_backward_search if splits_all_backwards(search) else _local_search
    yield from improve(search, sorted(starts, key=lambda found: found.score), len(starts), num_runs)


def _forward_backward_search(
    search: Search, starts: list[ListSchedule], number: int, num_runs: int
) -> Iterator[tuple[int, ForwardBackwardSchedule]]:
    """Improve the best few twice as they are, then the best of those with random changes, side by side."""
    last = [ForwardBackwardSchedule.of(search, found) for found in starts[:_NUM_PASSED]]
    best = list(last)
    rng = np.random.default_rng(0)
    for step in range((num_runs - number) // 2):
        if step == 2 * len(last):
            best = sorted(best, key=lambda one: one.score)[:_NUM_STARTS]
        at = step % len(best)
        if step < 2 * len(last):
            # The second time even from a schedule that got worse: the next two passes often make it better.
            last[at] = found = forward_backward(search, last[at])
        else:
            found = forward_backward(search, best[at], rng)
        best[at] = min(found, best[at], key=lambda one: one.score)
        yield number + 2 * (step + 1), found


def _local_search(search: Search, starts: list[ListSchedule], number: int, num_runs: int) -> Iterator[tuple[int, ListSchedule]]:
    """Try neighbouring settings of the best few, side by side."""
    starts = starts[:_NUM_STARTS]
    rng = np.random.default_rng(0)
    for step in range(num_runs - number):
        at = step % len(starts)
        found = search.run(neighbour(rng, search, starts[at]))
        starts[at] = min(found, starts[at], key=lambda one: one.score)
        yield number + step + 1, found
