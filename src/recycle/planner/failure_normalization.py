"""Failure Normalization: where a given number of failures costs least, and whether moving workers there pays."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.problem import Problem
from recycle.core.units import format_us
from recycle.planner.model.lower_bound import Bounds

Distribution = tuple[int, ...]
_IMPOSSIBLE = 1 << 60


class _Cost(NamedTuple):
    """The period that a stage enforces with some failures: proven, and in practice."""

    bound_us: int
    estimate_us: int


def most_failures(shape: Shape) -> int:
    """The number of workers that can fail while every stage keeps a live one."""
    return shape.num_stages * (shape.num_pipelines - 1)


def best_distribution(problem: Problem, num_failures: int) -> Distribution:
    """Return the distribution of `num_failures` over the stages with the least bound, and of those the most promising one.

    Dynamic programs over the stages: one finds the least bound, one the least estimate among the distributions that reach it
    (both joined by maximum over the stages), and one the least sum of estimates among those.
    """
    table = _cost_table(problem, num_failures)
    limit = _Cost(_least_worst(table, num_failures, lambda cost: cost.bound_us)[0][num_failures], _IMPOSSIBLE)
    return _most_promising(table, num_failures, limit)


def most_promising_distribution(problem: Problem, num_failures: int) -> Distribution:
    """Return the distribution with the least estimate, whatever its bound."""
    return _most_promising(_cost_table(problem, num_failures), num_failures, _Cost(_IMPOSSIBLE, _IMPOSSIBLE))


def _most_promising(table: list[list[_Cost]], num_failures: int, limit: _Cost) -> Distribution:
    """The distribution with the least worst estimate, then the least sum of estimates, in which no stage exceeds `limit`."""

    def estimate(cost: _Cost) -> int:
        return cost.estimate_us if cost.bound_us <= limit.bound_us else _IMPOSSIBLE

    worst = _least_worst(table, num_failures, estimate)[0][num_failures]
    least: list[tuple[int, Distribution] | None] = [(0, ()), *[None] * num_failures]
    for row in table:
        allowed = [cost.estimate_us if estimate(cost) <= worst else None for cost in row]
        least = [_least_sum(allowed, least, used) for used in range(num_failures + 1)]
    best = least[num_failures]
    assert best is not None
    return best[1]


def _least_sum(
    costs: list[int | None], before: list[tuple[int, Distribution] | None], used: int
) -> tuple[int, Distribution] | None:
    """The least sum of the stages up to this one with `used` failures."""
    options = []
    for failures, cost in enumerate(costs[: used + 1]):
        known = before[used - failures]
        if known is not None and cost is not None:
            options.append((known[0] + cost, (*known[1], failures)))
    return min(options, default=None)


def distributions(problem: Problem, num_failures: int) -> Iterator[Distribution]:
    """Yield every distribution of `num_failures` over the stages with its bound never falling, the best one first."""
    best = best_distribution(problem, num_failures)
    yield best
    table = _cost_table(problem, num_failures)
    rest = _least_worst(table, num_failures, lambda cost: cost.bound_us)
    heap: list[tuple[int, Distribution]] = [(rest[0][num_failures], ())]
    while heap:
        bound, prefix = heapq.heappop(heap)
        stage, left = len(prefix), num_failures - sum(prefix)
        if stage == len(table):
            if prefix != best:
                yield prefix
            continue
        for failures, cost in enumerate(table[stage][: left + 1]):
            after = rest[stage + 1][left - failures]
            if after < _IMPOSSIBLE:
                heapq.heappush(heap, (max(bound, cost.bound_us, after), (*prefix, failures)))


def least_bound(problem: Problem, num_failures: int) -> int:
    """A lower bound of the period with `num_failures`, for every distribution of them over the stages."""
    table = _cost_table(problem, num_failures)
    return _least_worst(table, num_failures, lambda cost: cost.bound_us)[0][num_failures]


def _cost_table(problem: Problem, num_failures: int) -> list[list[_Cost]]:
    """For each stage and number of failures there, the period that it enforces."""
    bounds, shape = Bounds(problem), problem.shape
    if not 0 <= num_failures <= most_failures(shape):
        raise UserError(
            f"{num_failures} failures cannot be planned for: between 0 and {most_failures(shape)} workers of this cluster can "
            "fail while every stage keeps a live one"
        )
    most = min(num_failures, shape.num_pipelines - 1)
    return [
        [
            _Cost(max(bounds.stage_terms(stage, num_live)), bounds.estimate_us(stage, num_live))
            for num_live in range(shape.num_pipelines, shape.num_pipelines - most - 1, -1)
        ]
        for stage in range(shape.num_stages)
    ]


def _least_worst(table: list[list[_Cost]], num_failures: int, value: Callable[[_Cost], int]) -> list[list[int]]:
    """For each stage and number of failures left, the least maximum of `value` over the stages from there on."""
    after = [0, *[_IMPOSSIBLE] * num_failures]
    tables = [after]
    for row in reversed(table):
        values = [value(cost) for cost in row]
        after = [
            min(max(here, after[left - failures]) for failures, here in enumerate(values[: left + 1]))
            for left in range(num_failures + 1)
        ]
        tables.append(after)
    return tables[::-1]


def normalized_problem(problem: Problem, distribution: Distribution) -> Problem:
    """The problem in which the last pipelines of each stage are dead, as many as `distribution` says."""
    last = problem.shape.num_pipelines - 1
    dead = frozenset(Worker(last - i, stage) for stage, num in enumerate(distribution) for i in range(num))
    return replace(problem, cluster=Cluster(problem.shape, dead))


@dataclass(frozen=True, slots=True)
class MoveDecision:
    """Whether workers change stage, and the sentence why."""

    moves: bool
    reason: str


def move_time_us(problem: Problem, stages: Sequence[int]) -> int:
    """Return the time until every moving worker has the state of its new stage; `stages` are the new stages, one for each.

    The workers copy at the same time, spread over the live peers of the new stage.
    """
    busiest = {stage: -(-stages.count(stage) // max(1, problem.cluster.num_live(stage))) for stage in set(stages)}
    times = (n * problem.profile.peer_link.time_us(problem.profile.stages[s].static_bytes) for s, n in busiest.items())
    return max(times, default=0)


def decide_move(as_is_us: int, normalized_us: int, move_us: int, num_iterations: int) -> MoveDecision:
    """Decide whether moving pays within `num_iterations`, the iterations expected until the next failure."""
    saved = (as_is_us - normalized_us) * num_iterations
    if saved > move_us:
        return MoveDecision(
            True, f"moving takes {format_us(move_us)} and saves {format_us(saved)} over {num_iterations} iterations"
        )
    if as_is_us <= normalized_us:
        return MoveDecision(
            False, f"the failures as they are cost no more than the normalised ones: {format_us(as_is_us)} an iteration"
        )
    return MoveDecision(
        False, f"moving takes {format_us(move_us)}, but saves only {format_us(saved)} over {num_iterations} iterations"
    )
