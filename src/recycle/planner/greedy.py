"""The greedy method: list scheduling under many settings of its dials, each schedule tightened, the best one kept.

The list scheduler (`kernel.list_schedule`) has four dials by stage. `portfolio` yields settings that are known to work well
together, the strongest first; `improve` then turns single dials of the best one. How long it searches is counted in placed ops,
not in seconds, so that the same problem gives the same plan on every machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from recycle.core.op import Kind
from recycle.core.problem import Problem
from recycle.planner import kernel
from recycle.planner.improve import neighbours
from recycle.planner.route import balanced_routes, ranks
from recycle.planner.schedule import Bools, Ints, Schedule, comms_of, costs_of

UNLIMITED = 1 << 40
DEFAULT_EFFORT = 20_000_000
_MOST_RUNS = 1000  # small problems are better left to an exact method than searched for long


def solve(
    problem: Problem, bound_us: int, effort: int = DEFAULT_EFFORT, out_of_time: Callable[[], bool] = lambda: False
) -> Schedule:
    """Return the best schedule found with about `effort` placed ops; stops early at the bound."""
    search = _Search.of(problem, bound_us)
    num_runs = min(_MOST_RUNS, max(1, effort // search.num_ops))
    for number, dials in enumerate(portfolio(problem)):
        search.consider(dials)
        if search.is_done or number + 1 >= num_runs or out_of_time():
            return search.best_schedule()
    for _ in range(num_runs - number - 1):
        search.consider(neighbours(search.rng, search.best_dials, problem.shape.num_microbatches))
        if search.is_done or out_of_time():
            break
    return search.best_schedule()


@dataclass(slots=True)
class _Search:
    """The best schedule so far, and what is needed to try another setting of the dials."""

    problem: Problem
    bound_us: int
    pipeline: Ints
    rank: Ints
    costs: Ints
    is_fused: Bools
    finish_us: Ints
    rng: np.random.Generator
    best_score: tuple[int, int] = (UNLIMITED * 1000, 0)
    best_dials: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    best_starts: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @staticmethod
    def of(problem: Problem, bound_us: int) -> "_Search":
        size = (problem.shape.num_stages, problem.shape.num_chains)
        is_fused = np.full(size, not problem.techniques.decoupled)
        finish = np.array([problem.finish_us(stage) for stage in range(size[0])], dtype=np.int64)
        routes = balanced_routes(problem)
        return _Search(problem, bound_us, routes, ranks(problem), cost_table(problem), is_fused, finish, np.random.default_rng(0))

    @property
    def num_ops(self) -> int:
        return self.pipeline.size * (3 if self.problem.techniques.decoupled else 2)

    @property
    def is_done(self) -> bool:
        return self.best_score[0] <= self.bound_us

    def consider(self, dials: Ints) -> None:
        """Schedule with `dials`, and keep the result if no better one is known."""
        num_pipelines = self.problem.shape.num_pipelines
        starts = np.zeros((3, *self.pipeline.shape), np.int64)
        order = np.empty(starts.size, np.int64)
        num_ops = kernel.list_schedule(self.pipeline, self.rank, self.costs, dials, num_pipelines, starts, order)
        kernel.tighten(self.pipeline, self.costs, self.is_fused, num_pipelines, order[:num_ops], starts)
        score = self._score(starts)
        if score <= self.best_score:
            self.best_score, self.best_dials, self.best_starts = score, dials, starts

    def _score(self, starts: Ints) -> tuple[int, int]:
        """The period, then by how much the stages together exceed the bound."""
        schedule = self._schedule(starts)
        windows = schedule.windows(self.problem)
        spans = np.array([last - first for first, last in windows]) + self.finish_us
        return schedule.period_us(self.problem), int(np.maximum(0, spans - self.bound_us).sum())

    def _schedule(self, starts: Ints) -> Schedule:
        return Schedule(self.pipeline, starts[kernel.F], starts[kernel.I], starts[kernel.W], self.is_fused)

    def best_schedule(self) -> Schedule:
        return self._schedule(self.best_starts)


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


# (push, stash), each per stage of depth: a stage's depth is how many stages there are from it to the last.
_DIALS = (
    (0, UNLIMITED),
    (1, 0),
    (1.25, 0),
    (1.5, 0),
    (2, 0),
    (1, 0.5),
    (1.25, 0.25),
    (1.5, 0.5),
    (1, UNLIMITED),
    (1.25, UNLIMITED),
    (1.5, UNLIMITED),
    (1.75, UNLIMITED),
    (2, UNLIMITED),
    (0, 0.5),
)


def portfolio(problem: Problem) -> Iterator[Ints]:
    """Yield settings of the dials: classic 1F1B where the backward pass is whole, then the strongest first."""
    depth = problem.shape.num_stages - np.arange(problem.shape.num_stages)
    longest = max(stage.forward_us for stage in problem.profile.stages)
    if not problem.techniques.decoupled:
        yield _dials(depth, 0, UNLIMITED, window=depth)
    for patience_us, patient_for in ((0, 0), (longest, 1), (longest, 2), (longest // 2, UNLIMITED)):
        for push, stash in _DIALS:
            yield _dials(depth, push, stash, patience_us, patient_for)


def _dials(
    depth: Ints, push: float, stash: float, patience_us: int = 0, patient_for: int = 0, window: int | Ints = UNLIMITED
) -> Ints:
    dials = np.zeros((depth.size, kernel.NUM_DIALS), np.int64)
    dials[:, kernel.PUSH] = np.round(push * depth)
    dials[:, kernel.STASH] = np.round(stash * depth)
    dials[:, kernel.PATIENCE_US] = patience_us
    dials[:, kernel.PATIENT_FOR] = patient_for
    dials[:, kernel.WINDOW] = window
    return dials
