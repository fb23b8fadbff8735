"""Schedule: the result of every method, as arrays by stage and chain, before it becomes a checked plan."""

from array import array
from dataclasses import dataclass, replace

import numpy as np

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.plan import Plan, Row
from recycle.core.plans.rules import period_from
from recycle.core.problem import Problem
from recycle.planner.model.assignment import KIND_NUMBERS, Assignment, Bools, Ints


@dataclass(frozen=True, slots=True)
class Schedule:
    """An assignment of chains to workers with the three starts of each, by stage and chain, and whether I and W run as one B.

    Where `is_fused`, `input_us` is the start of B and `weight_us` means nothing.
    """

    assignment: Assignment
    forward_us: Ints
    input_us: Ints
    weight_us: Ints
    is_fused: Bools

    @staticmethod
    def zeros(problem: Problem, assignment: Assignment) -> "Schedule":
        """A schedule of the right size, to be filled in, routes included."""
        size = assignment.pipeline.shape
        forward, split, weight = (np.zeros(size, dtype=np.int64) for _ in range(3))
        routes = assignment.routed(problem, assignment.pipeline.copy())
        return Schedule(routes, forward, split, weight, np.zeros(size, dtype=np.bool_))

    @staticmethod
    def of(plan: Plan) -> "Schedule":
        """The schedule of a legal plan without cuts."""
        shape = plan.problem.shape
        schedule = Schedule.zeros(
            plan.problem, Assignment.of(plan.problem, np.zeros((shape.num_stages, shape.num_chains), np.int64))
        )
        for row in plan.rows:
            stage = row.worker.stage
            for letter, chain, start_us in zip(row.kinds, row.chains, row.starts_us, strict=True):
                schedule.starts_us(Kind(letter))[stage, chain] = start_us
                schedule.pipeline[stage, chain] = row.worker.pipeline
                schedule.is_fused[stage, chain] |= letter == Kind.B
        return schedule

    @property
    def pipeline(self) -> Ints:
        return self.assignment.pipeline

    def length_us(self, kind: Kind) -> Ints:
        """The lengths of the ops of a kind."""
        lengths: Ints = self.assignment.lengths_us[KIND_NUMBERS[kind]]
        return lengths

    def starts_us(self, kind: Kind) -> Ints:
        """The starts of F, I or W; those of B are those of I."""
        return {Kind.F: self.forward_us, Kind.I: self.input_us, Kind.B: self.input_us, Kind.W: self.weight_us}[kind]

    def ends_us(self) -> Ints:
        """When each stage is done with each chain: the end of its W or B."""
        return np.where(self.is_fused, self.input_us + self.length_us(Kind.B), self.weight_us + self.length_us(Kind.W))

    def windows(self) -> list[tuple[int, int]]:
        """First start and last end of each stage."""
        firsts, lasts = self.forward_us.min(axis=1), self.ends_us().max(axis=1)
        return [(int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]

    def layer_windows(self, problem: Problem) -> dict[int, tuple[int, int]]:
        """First start and last end of the ops that use a layer, for each layer that is computed at several stages."""
        held, offsets = problem.held_layers, self.assignment.offsets
        if held is None or not problem.techniques.staggered or not offsets.any():
            return {}
        ends, chains, windows = self.ends_us(), np.arange(offsets.shape[1]), {}
        for layer in held.shared:
            first, *others = held.holders[layer]
            stage = first + sum((held.sums.bounds[other] + offsets[other] <= layer).astype(np.int64) for other in others)
            if stage.min() < stage.max():
                windows[layer] = int(self.forward_us[stage, chains].min()), int(ends[stage, chains].max())
        return windows

    def period_us(self, problem: Problem) -> int:
        return period_from(problem, self.windows(), self.layer_windows(problem))

    def from_zero(self) -> "Schedule":
        """The same schedule, shifted so that its first op starts at 0."""
        first = self.forward_us.min()
        return replace(self, forward_us=self.forward_us - first, input_us=self.input_us - first, weight_us=self.weight_us - first)

    def rows(self, problem: Problem) -> tuple[Row, ...]:
        """One row for each live worker, in order of time."""
        by_worker: dict[Worker, Row] = {}
        for stage in range(problem.shape.num_stages):
            by_worker |= self._rows_of_stage(problem, stage)
        return tuple(by_worker[worker] for worker in problem.cluster.live_workers())

    def _rows_of_stage(self, problem: Problem, stage: int) -> dict[Worker, Row]:
        fused = self.is_fused[stage]
        chains = np.arange(problem.shape.num_chains, dtype=np.int64)
        split = chains[~fused]
        chain = np.concatenate([chains, chains, split])
        kinds = np.concatenate(
            [np.full(len(chains), ord("F")), np.where(fused, ord("B"), ord("I")), np.full(len(split), ord("W"))]
        )
        starts = np.concatenate([self.forward_us[stage], self.input_us[stage], self.weight_us[stage][~fused]])
        order = np.lexsort((starts, self.pipeline[stage][chain]))
        chain, kinds, starts = chain[order], kinds[order].astype(np.uint8), starts[order]
        cuts = np.searchsorted(self.pipeline[stage][chain], np.arange(problem.shape.num_pipelines + 1))
        rows = {}
        for pipeline in problem.cluster.live_pipelines(stage):
            part = slice(cuts[pipeline], cuts[pipeline + 1])
            worker = Worker(pipeline, stage)
            columns = array("q", chain[part].tobytes()), array("q", starts[part].tobytes())
            rows[worker] = Row(worker, kinds[part].tobytes().decode("ascii"), *columns)
        return rows


def comms_of(problem: Problem) -> Ints:
    """The time between each stage and the next; one entry fewer than stages."""
    return np.array([problem.profile.comm_us(stage) for stage in range(problem.shape.num_stages - 1)], dtype=np.int64)
