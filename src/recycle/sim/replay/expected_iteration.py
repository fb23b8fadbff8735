"""What an iteration is expected to take on the machine that a profile was measured on: its links, its crowd, its unevenness.

Workers that share a machine hold each other up, by how many of them compute at the same moment. So a plan is played, what each
of its ops takes is set by who computed beside it, and it is played again, a dozen times, by when hardly anything changes.

And medians alone promise too much: where some workers are slower than others, an iteration waits for the slowest of them. So it
is played many times, each time with workers as fast as some that were measured, and the median is taken. That single ops vary,
too, is left out: what holds up one worker mostly lets another one run, and what is left evens out within an iteration.
"""

import random
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from recycle.core.plans.plan import Plan
from recycle.core.profile import Link, Profile
from recycle.sim.replay.op_graph import OpGraph, compile_plan
from recycle.sim.replay.replay import Conditions, replay_program
from recycle.sim.replay.replay_result import Replay

_NUM_PLAYS, _NUM_ITERATIONS = 25, 8
# The first iterations are still those of the plan's own costs, and in the last one there is nobody of the next beside.
_STEADY = slice(2, -1)
_NUM_TURNS = 12
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
    program = compile_plan(plan)
    crowded = _crowded(program, profile) if profile.contention else program
    ops_us, links_us, crowded_us = (_played(one).steady_period_us for one in (compile_plan(free), program, crowded))
    uneven_us = _uneven_us(crowded, profile, seed) if profile.factors else crowded_us
    return Expected(ops_us, links_us, crowded_us, uneven_us)


def held_up(played: Replay, profile: Profile) -> NDArray[np.float64]:
    """What each op takes in the crowd of a replay over what it costs, by iteration and op; who reduces and steps counts, too."""
    peers = [len(played.program.rows_of_stage(stage)) for stage in range(played.problem.shape.num_stages)]
    starts, ends = played.starts_us.ravel(), played.ends_us.ravel()
    finishes = (played.reduce_starts_us, played.reduce_ends_us), (played.step_starts_us, played.step_ends_us)
    all_starts, all_ends = (
        np.concatenate([own, *(np.repeat(pair[end], peers, axis=1).ravel() for pair in finishes)])
        for end, own in enumerate((starts, ends))
    )
    times = np.concatenate([all_starts, all_ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(all_starts), np.int64), np.full(len(all_ends), -1)])
    num = np.cumsum(changes[order])
    levels = np.array([profile.held_up(others) for others in range(int(num.max()))])
    # Time as the held up see it: the area under the levels.
    area = np.concatenate([[0.0], np.cumsum(levels[np.maximum(num, 1) - 1][:-1] * np.diff(times[order]))])
    took = np.interp(ends, times[order], area) - np.interp(starts, times[order], area)
    held: NDArray[np.float64] = (took / np.maximum(1, ends - starts)).reshape(played.starts_us.shape)
    return held


def _crowded(program: OpGraph, profile: Profile) -> OpGraph:
    """The program with what ops take in the crowd that it makes itself, in its steady iterations."""
    factors, crowded = np.ones(program.num_ops), program
    for _ in range(_NUM_TURNS):
        # Half of the way at a time: who is held up comes later, and holds up others.
        factors = (factors + held_up(_played(crowded), profile)[_STEADY].mean(axis=0)) / 2
        crowded = replace(program, durations_us=np.maximum(1, np.rint(program.durations_us * factors)).astype(np.int64))
    return crowded


def _played(program: OpGraph) -> Replay:
    return replay_program(program, Conditions(_NUM_ITERATIONS, eager=True))


def _uneven_us(program: OpGraph, profile: Profile, seed: int) -> float:
    chance, periods_us = random.Random(seed), list[float]()
    for _ in range(_NUM_PLAYS):
        slow = {row.worker: chance.choice(profile.factors) for row in program.plan.rows}
        periods_us.append(replay_program(program, Conditions(_NUM_ITERATIONS, slow=slow, eager=True)).steady_period_us)
    return median(periods_us)
