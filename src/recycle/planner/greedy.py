"""The greedy method: list scheduling under many settings, each schedule tightened, the best one kept.

A `Setting` holds the dials of the list scheduler by stage, and which ops are urgent. `portfolio` yields settings that are known
to work well, the strongest first; `improve` then changes the best ones step by step. How long it searches is counted in placed
ops, not in seconds, so that the same problem gives the same plan on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner import kernel
from recycle.planner.improve import turn_a_dial, urgent_by_slack
from recycle.planner.route import balanced_routes, ranks
from recycle.planner.schedule import Bools, Ints, Schedule, comms_of, costs_of

UNLIMITED = 1 << 40
DEFAULT_EFFORT = 60_000_000
# Beyond this share of the effort a search goes on only while its best schedule is not this close to the bound.
_FIRST_SHARE, _CLOSE = 0.15, 1.005
# Small problems are better left to an exact method than searched for long; large ones get the first share at most.
_MOST_RUNS, _LARGE_OPS = 2000, 400_000
_NUM_STARTS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What the list scheduler is told: its dials by stage, and by kind, stage and chain whom to wait for."""

    dials: Ints
    is_urgent: Bools


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule as the kernel left it: the starts, the order in which ops were placed, and how good it is."""

    setting: Setting
    starts: Ints
    order: Ints
    score: tuple[int, int]  # the period, then by how much the stages together exceed the bound


def solve(
    problem: Problem, bound_us: int, effort: int = DEFAULT_EFFORT, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the best schedule found with at most about `effort` placed ops; stops early at the bound.

    The portfolio's best few settings are improved side by side, because a single one often gets stuck.
    """
    search = Search.of(problem, bound_us)
    num_runs = min(_MOST_RUNS, max(1, effort // search.num_ops))
    first_runs = max(1, round(num_runs * _FIRST_SHARE))
    if search.num_ops > _LARGE_OPS:
        num_runs = first_runs
    settings = portfolio(problem)
    starts = [search.run(next(settings))]
    rng = np.random.default_rng(0)
    for number in range(1, num_runs):
        best = min(starts, key=lambda found: found.score)
        is_close = number >= first_runs and best.score[0] <= _CLOSE * bound_us
        if best.score[0] <= bound_us or is_close or out_of_time():
            break
        if (setting := next(settings, None)) is not None:
            starts = sorted([*starts, search.run(setting)], key=lambda found: found.score)[:_NUM_STARTS]
        else:
            at = number % len(starts)
            found = search.run(_changed(rng, search, starts[at]))
            starts[at] = min(found, starts[at], key=lambda found: found.score)
    return search.schedule(min(starts, key=lambda found: found.score).starts)


def _changed(rng: np.random.Generator, search: "Search", best: Found) -> Setting:
    """A setting near the best one: other ops urgent, or a dial turned."""
    if rng.random() < 0.3:
        return Setting(best.setting.dials, urgent_by_slack(rng, search, best))
    return Setting(turn_a_dial(rng, best.setting.dials), best.setting.is_urgent)


@dataclass(frozen=True, slots=True)
class Search:
    """A problem with its routing, as the kernel wants it."""

    problem: Problem
    bound_us: int
    pipeline: Ints
    rank: Ints
    costs: Ints
    is_fused: Bools
    finish_us: Ints = field(repr=False)

    @staticmethod
    def of(problem: Problem, bound_us: int) -> "Search":
        size = (problem.shape.num_stages, problem.shape.num_chains)
        is_fused = np.full(size, not problem.techniques.decoupled)
        finish = np.array([problem.finish_us(stage) for stage in range(size[0])], dtype=np.int64)
        return Search(problem, bound_us, balanced_routes(problem), ranks(problem), cost_table(problem), is_fused, finish)

    @property
    def num_ops(self) -> int:
        return self.pipeline.size * (3 if self.problem.techniques.decoupled else 2)

    def run(self, setting: Setting) -> Found:
        """Schedule with `setting`, and tighten."""
        num_pipelines = self.problem.shape.num_pipelines
        starts = np.zeros((3, *self.pipeline.shape), np.int64)
        order = np.empty(starts.size, np.int64)
        dials, is_urgent = setting.dials, setting.is_urgent
        num_ops = kernel.list_schedule(self.pipeline, self.rank, self.costs, dials, is_urgent, num_pipelines, starts, order)
        kernel.tighten(self.pipeline, self.costs, self.is_fused, num_pipelines, order[:num_ops], starts)
        return Found(setting, starts, order[:num_ops], self._score(starts))

    def spans(self, starts: Ints) -> Ints:
        """The span of each stage, with its reduction and step."""
        spans: Ints = kernel.last_ends(self.costs, self.is_fused, starts) - starts[kernel.F].min(axis=1) + self.finish_us
        return spans

    def _score(self, starts: Ints) -> tuple[int, int]:
        period = self.schedule(starts).period_us(self.problem)
        return period, int(np.maximum(0, self.spans(starts) - self.bound_us).sum())

    def slack(self, found: Found) -> Ints:
        """How much later each op could start with no span longer than the bound; negative if it is late already."""
        late = found.starts.copy()
        last = found.starts[kernel.F].min(axis=1) + self.bound_us - self.finish_us
        kernel.postpone(self.pipeline, self.costs, self.is_fused, self.problem.shape.num_pipelines, found.order, last, late)
        slack: Ints = late - found.starts
        return slack

    def schedule(self, starts: Ints) -> Schedule:
        return Schedule(self.pipeline, starts[kernel.F], starts[kernel.I], starts[kernel.W], self.is_fused)


def cost_table(problem: Problem) -> Ints:
    """The kernel's cost columns; without Decoupled BackProp every backward pass is one fused op."""
    num_stages = problem.shape.num_stages
    table = np.zeros((num_stages, kernel.NUM_COSTS), np.int64)
    fused = costs_of(problem, Kind.B)
    splits = problem.techniques.decoupled
    table[:, kernel.FORWARD_US] = costs_of(problem, Kind.F)
    table[:, kernel.INPUT_US] = costs_of(problem, Kind.I) if splits else fused
    table[:, kernel.WEIGHT_US] = costs_of(problem, Kind.W) if splits else 0
    table[:, kernel.FUSED_US] = fused
    table[:-1, kernel.COMM_US] = comms_of(problem)
    for stage in range(num_stages):
        capacity = problem.capacity(stage)
        table[stage, kernel.CAPACITY] = UNLIMITED if capacity is None else capacity
        table[stage, kernel.TAKEN] = problem.held_by_forward(stage)
        table[stage, kernel.KEPT] = problem.held_for_weight(stage)
    return table


class _Entry(NamedTuple):
    """A setting of the portfolio, for any problem.

    Whom to wait for: a pipeline's first and last micro-batches, so many (or, below 1, so many for each stage there is), for so
    long a share of the longest F. Then push and stash, for each stage of depth: how many stages there are from one to the last.
    """

    num_first: float
    num_last: float
    patience: float
    push: float
    stash: float


# In this order each entry adds most to those before it, measured over 104 problems of 12 to 256 workers, four cost ratios, and
# memory for S and for 2S micro-batches: the first alone is 2.9 % above the bound on average, the first ten together 2.0 %.
_PORTFOLIO = (
    _Entry(1, 0.5, 1, 1.25, UNLIMITED),
    _Entry(0, 0, 0, 0, UNLIMITED),
    _Entry(1, 8, 1, 2, UNLIMITED),
    _Entry(1, 2, 1, 1, 0.5),
    _Entry(0, 0, 0, 2, UNLIMITED),
    _Entry(1, 0.5, 1, 1.5, 0),
    _Entry(1, 8, 1, 0, 0.5),
    _Entry(1, 8, 1, 1, UNLIMITED),
    _Entry(0, 0, 0, 1.25, 0),
    _Entry(1, 0.5, 1, 1.25, 0),
    _Entry(UNLIMITED, 0, 0.5, 1.25, 0),
    _Entry(1, 8, 1, 1.5, UNLIMITED),
    _Entry(1, 0.5, 1, 1, 0),
    _Entry(0, 8, 1, 1, 0.5),
    _Entry(UNLIMITED, 0, 0.5, 1.5, UNLIMITED),
    _Entry(1, 2, 1, 2, 0),
    _Entry(1, 0.5, 1, 1.25, 0.25),
    _Entry(1, 0.5, 1, 1.5, UNLIMITED),
    _Entry(1, 8, 1, 1.5, 0),
    _Entry(0, 0, 0, 1, 0),
    _Entry(1, 2, 1, 1.75, UNLIMITED),
)


def portfolio(problem: Problem) -> Iterator[Setting]:
    """Yield settings: classic 1F1B where the backward pass is whole, then the strongest first."""
    num_stages = problem.shape.num_stages
    depth = num_stages - np.arange(num_stages)
    longest = max(stage.forward_us for stage in problem.profile.stages)
    if not problem.techniques.decoupled:
        yield Setting(_dials(depth, 0, UNLIMITED, window=depth), urgent_ends(problem, 0, 0))
    for entry in _PORTFOLIO:
        first, last = (round(n * num_stages) if 0 < n < 1 else int(n) for n in (entry.num_first, entry.num_last))
        dials = _dials(depth, entry.push, entry.stash, round(entry.patience * longest))
        yield Setting(dials, urgent_ends(problem, first, last))


def _dials(depth: Ints, push: float, stash: float, patience_us: int = 0, window: int | Ints = UNLIMITED, hold: int = 0) -> Ints:
    dials = np.zeros((depth.size, kernel.NUM_DIALS), np.int64)
    dials[:, kernel.PUSH] = np.round(push * depth)
    dials[:, kernel.STASH] = np.round(stash * depth)
    dials[:, kernel.PATIENCE_US] = patience_us
    dials[:, kernel.WINDOW] = window
    dials[:, kernel.HOLD] = hold
    return dials


def urgent_ends(problem: Problem, num_first: int, num_last: int) -> Bools:
    """The I's of each pipeline's first micro-batches, and the F's and I's of its last ones."""
    shape = problem.shape
    index = np.arange(shape.num_chains) % shape.num_microbatches
    is_first, is_last = index < num_first, index >= shape.num_microbatches - num_last
    by_kind = np.stack([is_last, is_first | is_last, np.zeros_like(is_last)])
    return np.repeat(by_kind[:, None, :], shape.num_stages, axis=1)
