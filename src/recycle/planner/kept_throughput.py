"""How much of the fault-free throughput a plan keeps, and how much of the workers' speed is alive."""

from dataclasses import dataclass, replace

from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan
from recycle.core.problem import Problem
from recycle.planner.heuristic.greedy import DEFAULT_EFFORT
from recycle.planner.model.assignment import speeds_of
from recycle.planner.solve import solve


@dataclass(frozen=True, slots=True)
class KeptThroughput:
    """The throughput of a plan over that of the fault-free plan, and the speed of the live workers over that of all.

    `fault_free_us` is the period of the fault-free plan of the same shape and options, in which no worker is slow either.
    """

    kept: float
    live_share: float
    fault_free_us: int


def fault_free_problem(problem: Problem) -> Problem:
    """The same problem with all workers alive and none slow."""
    return replace(without_failures(problem), speeds=())


def fault_free_period_us(problem: Problem, method: str, time_limit_s: float | None, effort: int = DEFAULT_EFFORT) -> int:
    """The period of the fault-free plan of the same shape and options."""
    # Half of the effort, as for each of the distributions that a plan for any failures is chosen from.
    return solve(fault_free_problem(problem), method, time_limit_s, -(-effort // 2)).period_us


def kept_throughput(plan: Plan, fault_free_us: int) -> KeptThroughput:
    """Compare a plan with the fault-free one, whose period is given."""
    return KeptThroughput(fault_free_us / plan.period_us, live_share(plan.problem), fault_free_us)


def live_share(problem: Problem) -> float:
    """The sum of the live workers' speeds over the number of workers."""
    return float(speeds_of(problem).sum()) / problem.shape.num_workers
