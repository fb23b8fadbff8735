"""solve() and solve_normalized(): from a problem to a checked plan with a proven bound."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan, Quality
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.planner.dead_placement import spread_failures
from recycle.planner.exact.exact_model import Exact, ExactLimit
from recycle.planner.exact.worker_proof import raise_bound
from recycle.planner.failure_normalization import (
    Distribution,
    distributions,
    least_bound,
    most_promising_distribution,
    normalized_problem,
)
from recycle.planner.heuristic import greedy
from recycle.planner.heuristic.fuse_backward import fuse, split_where_cheaper
from recycle.planner.model.assignment import Assignment
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.model.schedule import Schedule

METHODS = ("auto", "greedy", "cpsat", "milp")

# Chosen, not measured: CP-SAT proved problems of some hundred ops, so beyond this `auto` does not spend time on it.
MOST_OPS_FOR_EXACT = 3000
# The share of the exact effort with which the bound is raised by the rows of single workers: before whole plans are searched, and
# where there are too many ops for that.
_WORKER_SHARE, _WORKER_SHARE_ALONE = 0.2, 0.05


@dataclass(frozen=True, slots=True)
class _Result:
    """The schedule of a problem that the methods found, with its bound, before it becomes a checked plan."""

    problem: Problem
    schedule: Schedule
    bound_us: int
    method: str
    exact_effort: int = 0

    @property
    def period_us(self) -> int:
        return self.schedule.period_us(self.problem)

    def plan(self, began: float) -> Plan:
        """Return the checked plan; an illegal one would be a bug of the planner, and is never returned."""
        schedule = self.schedule.from_zero()
        status = "optimal" if self.period_us == self.bound_us else "feasible"
        quality = Quality(self.bound_us, status, self.method, round(time.monotonic() - began, 3))
        rows, cuts = schedule.rows(self.problem), schedule.assignment.cuts
        plan = Plan(self.problem, rows, self.period_us, quality, cuts)
        violations = check(plan)
        assert not violations, f"{self.method} made an illegal plan: {violations[0]}"
        return plan


@dataclass(frozen=True, slots=True)
class _Limits:
    """How long a search goes on: placed ops of the greedy method, effort of an exact one, and perhaps a deadline."""

    effort: int
    exact_effort: int
    deadline: float | None

    @staticmethod
    def of(effort: int, time_limit_s: float | None) -> "_Limits":
        return _Limits(effort, effort, None if time_limit_s is None else time.monotonic() + time_limit_s)

    def is_over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def half(self) -> "_Limits":
        """Half of everything that is left."""
        deadline = None if self.deadline is None else (time.monotonic() + self.deadline) / 2
        return _Limits(self.effort // 2, self.exact_effort // 2, deadline)

    def for_exact(self, share: float = 1.0) -> ExactLimit:
        """A share of what is left: with a deadline, of the time until then; of the counted effort otherwise."""
        if self.deadline is None:
            return ExactLimit(effort=int(share * self.exact_effort))
        return ExactLimit.seconds(max(0.1, share * (self.deadline - time.monotonic())))


def solve(problem: Problem, method: str = "auto", time_limit_s: float | None = None, effort: int = greedy.DEFAULT_EFFORT) -> Plan:
    """Return a legal plan of `problem`, with a proven lower bound of its period.

    Args:
        problem: The cluster with its failures, the profile, the memory limit and the techniques.
        method: "greedy" (heuristic, any size), "cpsat" or "milp" (exact, small problems), or "auto": greedy, then CP-SAT where a
            shorter plan is possible and the problem is small.
        time_limit_s: A limit in seconds. With it, a plan depends on the speed of the machine and on what else runs there: the
            search stops when the time is over, and an exact method does not stop before. Without it, effort is counted.
        effort: How long the search goes on, counted in ops that the greedy method places; an exact method gets as much again.
            So the same problem gives the same plan on every machine.

    Returns:
        A plan that `check` finds legal; `plan.quality` has the bound and whether the plan is proven optimal.

    Raises:
        UserError: The method is unknown, or the time limit is not above 0.

    Example:
        >>> import recycle
        >>> plan = recycle.solve(recycle.problem(3, 4, 6, fail="W1_2", costs="1,1,1", memory=6))
        >>> plan.period_us, plan.quality.status
        (27, 'optimal')
    """
    refuse_misuse(method, time_limit_s)
    began = time.monotonic()
    return _solve(problem, method, _Limits.of(effort, time_limit_s)).plan(began)


def _solve(problem: Problem, method: str, limits: _Limits, least_us: int | None = None) -> _Result:
    bound = lower_bound(problem)
    schedule = _search(problem, bound, limits.effort, limits.is_over, least_us)
    raised = _raise_bound(problem, schedule, bound, method, limits)
    bound, limits = raised.bound_us, replace(limits, exact_effort=max(0, limits.exact_effort - raised.used))
    exact = _exact_method(problem, schedule, bound, method)
    if exact is None:
        return _Result(problem, schedule, bound, "greedy", raised.used)
    result = exact(problem, limits.for_exact(), schedule, bound)
    result = replace(result, used=result.used + raised.used)
    if not (problem.shared_layers or problem.speeds):  # else other cuts or routes may be better than what the method proved
        bound = max(bound, result.bound_us)
    if result.schedule is None:
        made_by = "greedy" if method == "auto" else f"greedy (nothing from {method} in time)"
        return _Result(problem, schedule, bound, made_by, result.used)
    if method == "auto" and not _is_shorter(problem, result.schedule, schedule):
        return _Result(problem, schedule, bound, "greedy", result.used)
    return _Result(problem, fuse(problem, result.schedule), bound, "cpsat" if method == "auto" else method, result.used)


def _search(problem: Problem, bound: int, effort: int, out_of_time: Callable[[], bool], least_us: int | None = None) -> Schedule:
    """Return the greedy schedule, with backward passes split only where that pays."""
    schedule = fuse(problem, greedy.solve_greedy(problem, bound, effort, out_of_time, least_us))
    if (tighter := _freed_by_weights_only(problem)) is not None and schedule.period_us(problem) > bound:
        # More memory must never make a plan longer: one that has memory left when I ends is legal here, too.
        in_less = fuse(tighter, greedy.solve_greedy(tighter, bound, effort, out_of_time, least_us))
        in_less = replace(in_less, assignment=Assignment.of(problem, in_less.pipeline))
        schedule = in_less if _is_shorter(problem, in_less, schedule) else schedule
    if problem.techniques.decoupled and any(s.fused_us < s.input_us + s.weight_us for s in problem.profile.stages):
        # Splitting costs time here, so a schedule without any split may be shorter.
        whole = replace(problem, techniques=replace(problem.techniques, decoupled=False))
        unsplit = split_where_cheaper(problem, greedy.solve_greedy(whole, bound, effort, out_of_time, least_us))
        return unsplit if _is_shorter(problem, unsplit, schedule) else schedule
    return schedule


def _freed_by_weights_only(problem: Problem) -> Problem | None:
    """The same problem in less memory: I frees nothing, W all. None if that is so anyway, or with cuts."""
    stages = problem.profile.stages
    frees_some = problem.memory.unit == "bytes" and any(stage.weight_held_bytes < stage.activation_bytes for stage in stages)
    if not frees_some or not problem.techniques.decoupled or problem.shared_layers:
        return None
    held = tuple(replace(stage, weight_held_bytes=stage.activation_bytes) for stage in stages)
    return replace(problem, profile=replace(problem.profile, stages=held))


def _raise_bound(problem: Problem, schedule: Schedule, bound: int, method: str, limits: _Limits) -> Exact:
    """Return the bound that follows from single workers, proven with a share of the exact effort; as it was for other methods."""
    period = schedule.period_us(problem)
    if method not in ("auto", "cpsat") or problem.shared_layers or problem.speeds or period <= bound:
        return Exact(None, bound)
    share = _WORKER_SHARE if _is_small(problem) else _WORKER_SHARE_ALONE
    return raise_bound(problem, bound, period, limits.for_exact(share))


def _is_small(problem: Problem) -> bool:
    """Whether `auto` gives the whole problem to CP-SAT."""
    num_ops = problem.shape.num_stages * problem.shape.num_chains * (3 if problem.techniques.decoupled else 2)
    return num_ops <= MOST_OPS_FOR_EXACT


def _exact_method(
    problem: Problem, schedule: Schedule, bound: int, method: str
) -> Callable[[Problem, ExactLimit, Schedule, int], Exact] | None:
    """Return the exact method to run, if any: the chosen one, or for `auto` CP-SAT where a shorter plan is possible."""
    if method == "greedy" or (method == "auto" and (problem.shared_layers or problem.speeds)):
        return None
    if method == "milp":
        from recycle.planner.exact import milp

        return milp.solve_milp
    if method == "cpsat" or (schedule.period_us(problem) > bound and _is_small(problem)):
        from recycle.planner.exact import cpsat

        return cpsat.solve_cpsat
    return None


def _is_shorter(problem: Problem, one: Schedule, other: Schedule) -> bool:
    return one.period_us(problem) < other.period_us(problem)


def solve_normalized(
    problem: Problem,
    num_failures: int,
    method: str = "auto",
    time_limit_s: float | None = None,
    effort: int = greedy.DEFAULT_EFFORT,
) -> tuple[Plan, Distribution]:
    """Return the best plan for any `num_failures` dead workers, and how many of them it assumes at each stage.

    Planned are the most promising distribution and the one with the least bound, each with half of the effort, then the others
    by rising bound, as many as the effort allows: in a small problem all that could be shorter.

    Args:
        problem: The problem; its own failures are ignored.
        num_failures: How many workers are dead.
        method, time_limit_s, effort: As for `solve`.

    Returns:
        The plan, and the number of dead workers at each stage.

    Raises:
        UserError: So many workers cannot fail, the method is unknown, or the time limit is not above 0.

    Example:
        >>> import recycle
        >>> plan, distribution = recycle.solve_normalized(recycle.problem(3, 4, 6, costs="1,1,1", memory=6), 1)
        >>> plan.period_us, sum(distribution)
        (27, 1)
    """
    refuse_misuse(method, time_limit_s)
    began = time.monotonic()
    limits = _Limits.of(effort, time_limit_s)
    # A plan is compared with the least bound of all distributions, so the search goes on until it is close to that.
    least_us = least_bound(problem, num_failures)
    best: tuple[_Result, Distribution] | None = None
    for number, distribution in enumerate(_candidates(problem, num_failures)):
        candidate = normalized_problem(problem, distribution)
        if best is not None:
            is_affordable = number < 2 or number * problem.shape.num_stages * problem.shape.num_chains < effort // 20_000
            if limits.is_over() or not is_affordable or lower_bound(candidate) >= best[0].period_us:
                break
        # An exact method would take all that there is, so each distribution gets half of the rest.
        result = _solve(candidate, method, limits.half(), least_us)
        limits = replace(limits, exact_effort=limits.exact_effort - result.exact_effort)
        if best is None or result.period_us < best[0].period_us:
            best = result, distribution
    assert best is not None
    return best[0].plan(began), best[1]


def _candidates(problem: Problem, num_failures: int) -> Iterator[Distribution]:
    """Distributions in the order in which they are tried: with shared layers first the one that spreads the failures."""
    first = [most_promising_distribution(problem, num_failures)]
    if problem.held_layers is not None:
        first.insert(0, spread_failures(problem, num_failures))
    first = list(dict.fromkeys(first))
    yield from first
    yield from (distribution for distribution in distributions(problem, num_failures) if distribution not in first)


def refuse_misuse(method: str, time_limit_s: float | None) -> None:
    if method not in METHODS:
        raise UserError(f"{method!r} is not a method: choose from {', '.join(METHODS)}")
    if time_limit_s is not None and not 0 < time_limit_s < math.inf:
        raise UserError(f"the time limit is {time_limit_s!r} seconds, but it must be a number above 0")
