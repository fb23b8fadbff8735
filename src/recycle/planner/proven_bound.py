"""prove_bound(): what is proven of a plan's bound, without believing the plan.

The bound of `lower_bound` is computed again from the problem. Only an exact method proves more, so a small problem whose plan
claims more is given to CP-SAT again, with a counted effort: it proves the claim, finds a shorter plan, or leaves the claim open.
"""

from dataclasses import dataclass

from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import Violation
from recycle.planner.exact.exact_model import ExactLimit
from recycle.planner.exact.worker_proof import raise_bound
from recycle.planner.heuristic.greedy import DEFAULT_EFFORT
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.model.schedule import Schedule
from recycle.planner.solve import MOST_OPS_FOR_EXACT


@dataclass(frozen=True, slots=True)
class ProvenBound:
    """The bound that is proven of a plan, the one that it claims, and the period of a shorter plan, if one was found.

    `can_be_raised` says whether an exact method may prove more than is proven here.
    """

    bound_us: int
    claimed_us: int
    can_be_raised: bool
    shorter_us: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the plan claims more than is proven, and nothing contradicts it."""
        return self.claimed_us > self.bound_us and self.shorter_us is None

    def violations(self) -> list[Violation]:
        """The claims that are certainly false: a shorter plan exists, or no method of this planner proves such a claim."""
        if self.shorter_us is not None:
            return [
                Violation("bound", f"the bound is {self.claimed_us} µs, but a plan with a period of {self.shorter_us} µs exists")
            ]
        if self.is_open and not self.can_be_raised:
            return [
                Violation("bound", f"the bound is {self.claimed_us} µs, but the problem proves {self.bound_us} µs and no more")
            ]
        return []


def prove_bound(plan: Plan, effort: int = DEFAULT_EFFORT) -> ProvenBound:
    """Return what is proven of the bound of a legal plan; `effort` is the limit of the search for a proof."""
    problem, claimed, limit = plan.problem, plan.quality.bound_us, ExactLimit(effort=effort)
    bound = lower_bound(problem)
    # With shared layers or speeds, other cuts or routes may be better than what an exact method proves: see `solve`.
    can_be_raised = not problem.shared_layers and not problem.speeds
    if claimed > bound and can_be_raised:
        bound = raise_bound(problem, bound, claimed, limit).bound_us
    if claimed <= bound or not can_be_raised or plan.num_ops > MOST_OPS_FOR_EXACT:
        return ProvenBound(bound, claimed, can_be_raised)
    from recycle.planner.exact import cpsat

    found = cpsat.solve_cpsat(problem, limit, Schedule.of(plan), bound)
    period_us = plan.period_us if found.schedule is None else found.schedule.period_us(problem)
    return ProvenBound(max(bound, found.bound_us), claimed, True, period_us if period_us < claimed else None)
