"""Assignment: which peer runs each chain at each stage, where chains are cut, and what their ops cost there.

All that a scheduling method has to know about an op is in these arrays, so that no method asks for cuts or speeds itself.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.cuts import Cuts, make_cuts
from recycle.core.problem import Problem

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# The order of kinds in `lengths_us`.
KIND_NUMBERS = {Kind.F: 0, Kind.I: 1, Kind.W: 2, Kind.B: 3}
_THOUSAND = 1000


@dataclass(frozen=True, slots=True)
class Assignment:
    """Arrays by stage and chain.

    `pipeline` runs a chain at a stage. `offsets[s]` is where a chain is cut before stage s, in layers from the base boundary; it
    has a row more than there are stages, and its first and last rows are 0. `lengths_us[kind]` has the lengths of F, I, W and B,
    `taken` the memory that F takes, `kept` the part of it that stays between I and W.
    """

    pipeline: Ints
    offsets: Ints
    lengths_us: Ints
    taken: Ints
    kept: Ints

    @staticmethod
    def of(problem: Problem, pipeline: Ints, offsets: Ints | None = None) -> "Assignment":
        num_stages, num_chains = pipeline.shape
        if offsets is None:
            offsets = np.zeros((num_stages + 1, num_chains), dtype=np.int64)
        lengths, taken, kept = _by_stage(problem) if not offsets.any() else _by_cut(problem, offsets)
        return Assignment(pipeline, offsets, _slowed(problem, pipeline, lengths), taken, kept)

    def routed(self, problem: Problem, pipeline: Ints) -> "Assignment":
        """The same cuts with other routes."""
        if not problem.speeds:
            return replace(self, pipeline=pipeline)
        return Assignment.of(problem, pipeline, self.offsets)

    @property
    def cuts(self) -> Cuts:
        return make_cuts(self.offsets[1:-1].tolist())

    def loads_us(self, problem: Problem) -> Ints:
        """The least work of each worker in an iteration, by stage and pipeline."""
        forward, split, weight, fused = self.lengths_us
        backward = np.minimum(split + weight, fused) if problem.techniques.decoupled else fused
        loads = np.zeros((len(self.pipeline), problem.shape.num_pipelines), dtype=np.int64)
        for stage, pipelines in enumerate(self.pipeline):
            np.add.at(loads[stage], pipelines, (forward + backward)[stage])
        return loads


def _by_stage(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """Lengths and memory where every chain is cut at the base boundaries."""
    stages, num_chains = range(problem.shape.num_stages), problem.shape.num_chains
    columns = [[problem.duration_us(stage, kind) for stage in stages] for kind in KIND_NUMBERS]
    columns += [[problem.held_by_forward(stage) for stage in stages], [problem.held_for_weight(stage) for stage in stages]]
    made = np.repeat(np.array(columns, dtype=np.int64)[:, :, None], num_chains, axis=2)
    return made[:4], made[4], made[5]


def _by_cut(problem: Problem, offsets: Ints) -> tuple[Ints, Ints, Ints]:
    held = problem.held_layers
    assert held is not None, "only shared layers can be cut"
    positions = np.array(held.sums.bounds, dtype=np.int64)[:, None] + offsets

    def totals(sums: tuple[int, ...]) -> Ints:
        at: Ints = np.array(sums, dtype=np.int64)[positions]
        return np.diff(at, axis=0)

    lengths = np.stack([np.maximum(1, totals(held.sums.times(kind))) for kind in KIND_NUMBERS])
    if problem.memory.unit != "bytes":
        num_layers = positions[1:] - positions[:-1]
        return lengths, num_layers, num_layers
    taken = totals(held.sums.sums["activation_bytes"])
    return lengths, taken, np.minimum(taken, totals(held.sums.sums["weight_held_bytes"]))


def _slowed(problem: Problem, pipeline: Ints, lengths: Ints) -> Ints:
    if not problem.speeds:
        return lengths
    thousandths = np.rint(speeds_of(problem) * _THOUSAND).astype(np.int64)
    at = thousandths[np.arange(len(pipeline))[:, None], pipeline]
    slowed: Ints = -(-lengths * _THOUSAND // at)
    return slowed


def speeds_of(problem: Problem) -> npt.NDArray[np.float64]:
    """The speed of each worker, by stage and pipeline; 0 if it is dead."""
    speeds = np.ones((problem.shape.num_stages, problem.shape.num_pipelines))
    for worker, speed in problem.speeds:
        speeds[worker.stage, worker.pipeline] = speed
    for worker in problem.cluster.failed:
        speeds[worker.stage, worker.pipeline] = 0.0
    return speeds


def is_even(problem: Problem, stage: int) -> bool:
    """Whether all live workers of a stage have the same speed."""
    peers = {Worker(pipeline, stage) for pipeline in problem.cluster.live_pipelines(stage)}
    named = [speed for worker, speed in problem.speeds if worker in peers]
    return not named or (len(named) == len(peers) and len(set(named)) == 1)
