"""Failure Normalization: where a given number of failures costs least, and whether moving workers there pays."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.plans.library import without_failures
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.core.units import format_us
from recycle.planner.model.assignment import speeds_of
from recycle.planner.model.load_split import layer_work
from recycle.planner.model.lower_bound import Bounds

Distribution = tuple[int, ...]
_Costs = list[list[int]]  # by stage and number of failures there
_IMPOSSIBLE = 1 << 60


def most_failures(shape: Shape) -> int:
    """The number of workers that can fail while every stage keeps a live one."""
    return shape.num_stages * (shape.num_pipelines - 1)


def best_distribution(problem: Problem, num_failures: int) -> Distribution:
    """Return the distribution of `num_failures` over the stages with the least bound, and of those the most promising one."""
    return next(distributions(problem, num_failures))


def most_promising_distribution(problem: Problem, num_failures: int) -> Distribution:
    """Return the distribution with the least estimate, whatever its bound."""
    return _most_promising(_costs_us(problem, num_failures)[1], num_failures)


def _most_promising(estimates_us: _Costs, num_failures: int) -> Distribution:
    """The distribution with the least worst estimate, then the least sum of estimates: two dynamic programs over the stages."""
    worst = _least_worst(estimates_us, num_failures)[0][num_failures]
    least: list[tuple[int, Distribution]] = [(0, ()), *[(_IMPOSSIBLE, ())] * num_failures]
    for row in estimates_us:
        allowed = [(failures, cost) for failures, cost in enumerate(row) if cost <= worst]
        least = [
            min(
                ((least[used - num][0] + cost, (*least[used - num][1], num)) for num, cost in allowed if num <= used),
                default=(_IMPOSSIBLE, ()),
            )
            for used in range(num_failures + 1)
        ]
    return least[num_failures][1]


def distributions(problem: Problem, num_failures: int) -> Iterator[Distribution]:
    """Yield every distribution of `num_failures` over the stages with its bound never falling, the best one first."""
    bounds_us, estimates_us = _costs_us(problem, num_failures)
    rest = _least_worst(bounds_us, num_failures)
    least_us = rest[0][num_failures]
    within = [
        [cost if bound <= least_us else _IMPOSSIBLE for cost, bound in zip(*rows, strict=True)]
        for rows in zip(estimates_us, bounds_us, strict=True)
    ]
    best = _most_promising(within, num_failures)
    yield best
    heap: list[tuple[int, Distribution]] = [(least_us, ())]
    while heap:
        bound, prefix = heapq.heappop(heap)
        stage, left = len(prefix), num_failures - sum(prefix)
        if stage == len(bounds_us):
            if prefix != best:
                yield prefix
            continue
        for failures, here in enumerate(bounds_us[stage][: left + 1]):
            after = rest[stage + 1][left - failures]
            if after < _IMPOSSIBLE:
                heapq.heappush(heap, (max(bound, here, after), (*prefix, failures)))


def least_bound(problem: Problem, num_failures: int) -> int:
    """A lower bound of the period with `num_failures`, for every distribution of them over the stages."""
    if problem.shared_layers or problem.speeds:
        return _least_shared_bound(problem, num_failures)
    return _least_worst(_costs_us(problem, num_failures)[0], num_failures)[0][num_failures]


def _least_shared_bound(problem: Problem, num_failures: int) -> int:
    """The whole work over the speed of the fastest workers that may be left: cuts may move work to any stage."""
    _refuse_too_many(problem.shape, num_failures)
    num_layers = problem.held_layers.sums.num_layers if problem.held_layers else problem.shape.num_stages
    speeds = sorted(speeds_of(without_failures(problem)).ravel().tolist(), reverse=True)
    left = sum(speeds[: len(speeds) - num_failures])
    return math.ceil(problem.shape.num_chains * layer_work(problem, num_layers)[-1] / left - 1e-6)


def _costs_us(problem: Problem, num_failures: int) -> tuple[_Costs, _Costs]:
    """For each stage and number of failures there, the period that it enforces: proven, and in practice."""
    bounds, shape = Bounds(problem), problem.shape
    _refuse_too_many(shape, num_failures)
    most = min(num_failures, shape.num_pipelines - 1)
    live, stages = range(shape.num_pipelines, shape.num_pipelines - most - 1, -1), range(shape.num_stages)
    proven = [[max(bounds.stage_terms(stage, num_live)) for num_live in live] for stage in stages]
    return proven, [[bounds.estimate_us(stage, num_live) for num_live in live] for stage in stages]


def _refuse_too_many(shape: Shape, num_failures: int) -> None:
    if not 0 <= num_failures <= most_failures(shape):
        raise UserError(
            f"{num_failures} failures cannot be planned for: between 0 and {most_failures(shape)} workers of this cluster can "
            "fail while every stage keeps a live one"
        )


def _least_worst(costs_us: _Costs, num_failures: int) -> list[list[int]]:
    """For each stage and number of failures left, the least maximum of the costs of the stages from there on."""
    after = [0, *[_IMPOSSIBLE] * num_failures]
    tables = [after]
    for row in reversed(costs_us):
        after = [
            min(max(here, after[left - failures]) for failures, here in enumerate(row[: left + 1]))
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


def move_time_us(profile: Profile, stages: Sequence[int], num_holders: Callable[[int], int]) -> int:
    """Return the time until every moving worker has the state of its new stage; `stages` are the new stages, one for each.

    The workers copy at the same time, spread over the workers that hold the state of the new stage.
    """
    busiest = {stage: -(-stages.count(stage) // max(1, num_holders(stage))) for stage in set(stages)}
    times = (num * profile.peer_link.time_us(profile.stages[stage].static_bytes) for stage, num in busiest.items())
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
