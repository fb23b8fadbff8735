"""What an iteration is expected to take on the machine that a profile was measured on: its links, its crowd, its unevenness.

Workers that share a machine hold each other up, the more so the more of them compute at once. And medians alone promise too
much: where workers differ by chance, an iteration waits for the slowest of them. So a plan is played many times,
each time with workers as fast as some that were measured, and ops that vary as those did, and the median is taken.
"""

import random
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.plan import Plan
from recycle.core.profile import Link
from recycle.sim.replay.play import Conditions, replay
from recycle.sim.replay.result import Replay

_NUM_PLAYS, _NUM_ITERATIONS = 25, 8
_FREE = Link(bytes_per_us=1e9)


@dataclass(frozen=True, slots=True)
class Expected:
    """The time of an iteration in µs: of ops alone; with links; with the crowd of this plan; and with uneven workers, too."""

    ops_us: float
    links_us: float
    crowded_us: float
    uneven_us: float


def expected(plan: Plan, seed: int = 1) -> Expected:
    """What an iteration of `plan` takes by its profile."""
    profile = plan.problem.profile
    free = replace(plan, problem=replace(plan.problem, profile=replace(profile, stage_link=_FREE)))
    played = replay(plan, Conditions(_NUM_ITERATIONS, eager=True))
    factor = profile.contention.factor(num_others(played))
    crowded = replay(plan, Conditions(_NUM_ITERATIONS, slow=dict.fromkeys(_workers(plan), factor), eager=True))
    ops_us = replay(free, Conditions(_NUM_ITERATIONS, eager=True)).steady_period_us
    uneven_us = _uneven_us(plan, factor, seed) if profile.factors or profile.jitter else crowded.steady_period_us
    return Expected(ops_us, played.steady_period_us, crowded.steady_period_us, uneven_us)


def num_others(played: Replay) -> float:
    """How many other workers compute while one does, on average over the ops of the steady iterations."""
    first = played.num_iterations // 2
    begin_us, end_us = played.completions_us[first - 1], played.completions_us[-1]
    starts = np.clip(played.starts_us, begin_us, end_us).ravel()
    ends = np.clip(played.ends_us, begin_us, end_us).ravel()
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    active = np.cumsum(np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])[order])[:-1]
    lengths = np.diff(times[order])
    return float((active * active * lengths).sum() / (active * lengths).sum()) - 1


def _uneven_us(plan: Plan, factor: float, seed: int) -> float:
    profile, chance, periods_us = plan.problem.profile, random.Random(seed), list[float]()
    for number in range(_NUM_PLAYS):
        slow = {worker: factor * chance.choice(profile.factors or (1.0,)) for worker in _workers(plan)}
        conditions = Conditions(_NUM_ITERATIONS, min(1.0, profile.jitter), slow, eager=True, seed=seed + number)
        periods_us.append(replay(plan, conditions).steady_period_us)
    return median(periods_us)


def _workers(plan: Plan) -> list[Worker]:
    return [row.worker for row in plan.rows]
