"""Schedule: the result of every method, as arrays by stage and chain, before it becomes a checked plan."""

from array import array
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.plan import Row
from recycle.core.plans.rules import period_from
from recycle.core.problem import Problem

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All arrays are [stage, chain]: the pipeline that runs it, the three starts, and whether I and W run as one B.

    Where `is_fused`, `input_us` is the start of B and `weight_us` means nothing.
    """

    pipeline: Ints
    forward_us: Ints
    input_us: Ints
    weight_us: Ints
    is_fused: Bools

    @staticmethod
    def zeros(problem: Problem) -> "Schedule":
        """A schedule of the right size, to be filled in."""
        size = problem.shape.num_stages, problem.shape.num_chains
        pipeline, forward, split, weight = (np.zeros(size, dtype=np.int64) for _ in range(4))
        return Schedule(pipeline, forward, split, weight, np.zeros(size, dtype=np.bool_))

    def starts_us(self, kind: Kind) -> Ints:
        """The starts of F, I or W; those of B are those of I."""
        return {Kind.F: self.forward_us, Kind.I: self.input_us, Kind.B: self.input_us, Kind.W: self.weight_us}[kind]

    def ends_us(self, problem: Problem) -> Ints:
        """When each stage is done with each chain: the end of its W or B."""
        fused, weight = costs_of(problem, Kind.B), costs_of(problem, Kind.W)
        return np.where(self.is_fused, self.input_us + fused[:, None], self.weight_us + weight[:, None])

    def windows(self, problem: Problem) -> list[tuple[int, int]]:
        """First start and last end of each stage."""
        firsts, lasts = self.forward_us.min(axis=1), self.ends_us(problem).max(axis=1)
        return [(int(first), int(last)) for first, last in zip(firsts, lasts, strict=True)]

    def period_us(self, problem: Problem) -> int:
        return period_from(problem, self.windows(problem))

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


def costs_of(problem: Problem, kind: Kind) -> Ints:
    return np.array([stage.duration_us(kind) for stage in problem.profile.stages], dtype=np.int64)


def comms_of(problem: Problem) -> Ints:
    """The time between each stage and the next; one entry fewer than stages."""
    return np.array([problem.profile.comm_us(stage) for stage in range(problem.shape.num_stages - 1)], dtype=np.int64)
