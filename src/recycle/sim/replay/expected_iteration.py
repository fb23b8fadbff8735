"""`expected_iteration`: the period of a plan on the machine of its profile, with links, contention and slow workers.

Workers on one machine slow each other down, depending on how many compute at the same moment. So the plan is replayed, each op is
lengthened by the contention that the replay shows, and the plan is replayed again; after a dozen rounds hardly anything changes.

Median costs alone are too optimistic: if some workers are slower than others, an iteration waits for the slowest. So the plan is
replayed many times, each time with random factors of measured workers, and the median period is taken. Variation of single ops is
left out: a delay of one worker mostly lets another one run, and the rest evens out within an iteration.
"""

import random
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from recycle.core.plans.plan import Plan
from recycle.core.profile import FREE_LINK, Profile
from recycle.sim.replay.op_graph import OpGraph, build_op_graph
from recycle.sim.replay.replay import Conditions, replay_graph
from recycle.sim.replay.replay_result import ReplayResult

_NUM_REPLAYS, _NUM_ITERATIONS = 25, 8
# The first iterations are not yet steady, and no next iteration contends with the last one.
_STEADY = slice(2, -1)
_NUM_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class ExpectedIteration:
    """The period in µs: of ops alone, and with each of links, contention and uneven workers added."""

    ops_us: float
    links_us: float
    contended_us: float
    uneven_us: float


def expected_iteration(plan: Plan, seed: int = 1) -> ExpectedIteration:
    """Return the expected period of `plan` by its profile; `seed` draws the factors of the workers."""
    profile = plan.problem.profile
    free = replace(plan, problem=replace(plan.problem, profile=replace(profile, stage_link=FREE_LINK)))
    graph = build_op_graph(plan)
    contended = _with_contention(graph, profile) if profile.contention else graph
    ops_us, links_us, contended_us = (_replayed(one).steady_period_us for one in (build_op_graph(free), graph, contended))
    uneven_us = _uneven_us(contended, profile, seed) if profile.factors else contended_us
    return ExpectedIteration(ops_us, links_us, contended_us, uneven_us)


def contention_factors(result: ReplayResult, profile: Profile) -> NDArray[np.float64]:
    """The slowdown of each op by contention, by iteration and op; workers that reduce or step contend, too."""
    peers = [len(result.graph.rows_of_stage(stage)) for stage in range(result.problem.shape.num_stages)]
    starts, ends = result.starts_us.ravel(), result.ends_us.ravel()
    finishes = (result.reduce_starts_us, result.reduce_ends_us), (result.step_starts_us, result.step_ends_us)
    all_starts, all_ends = (
        np.concatenate([own, *(np.repeat(pair[end], peers, axis=1).ravel() for pair in finishes)])
        for end, own in enumerate((starts, ends))
    )
    times = np.concatenate([all_starts, all_ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(all_starts), np.int64), np.full(len(all_ends), -1)])
    num = np.cumsum(changes[order])
    levels = np.array([profile.held_up(others) for others in range(int(num.max()))])
    # The integral of the slowdown over time.
    area = np.concatenate([[0.0], np.cumsum(levels[np.maximum(num, 1) - 1][:-1] * np.diff(times[order]))])
    took = np.interp(ends, times[order], area) - np.interp(starts, times[order], area)
    factors: NDArray[np.float64] = (took / np.maximum(1, ends - starts)).reshape(result.starts_us.shape)
    return factors


def _with_contention(graph: OpGraph, profile: Profile) -> OpGraph:
    """The graph with the durations that ops have under its own contention, in steady iterations."""
    factors, contended = np.ones(graph.num_ops), graph
    for _ in range(_NUM_ROUNDS):
        # Half of the change at a time, because a delayed op delays other ops in turn.
        factors = (factors + contention_factors(_replayed(contended), profile)[_STEADY].mean(axis=0)) / 2
        contended = replace(graph, durations_us=np.maximum(1, np.rint(graph.durations_us * factors)).astype(np.int64))
    return contended


def _replayed(graph: OpGraph) -> ReplayResult:
    return replay_graph(graph, Conditions(_NUM_ITERATIONS, eager=True))


def _uneven_us(graph: OpGraph, profile: Profile, seed: int) -> float:
    chance, periods_us = random.Random(seed), list[float]()
    for _ in range(_NUM_REPLAYS):
        slow = {row.worker: chance.choice(profile.factors) for row in graph.plan.rows}
        periods_us.append(replay_graph(graph, Conditions(_NUM_ITERATIONS, slow=slow, eager=True)).steady_period_us)
    return median(periods_us)
