"""BusiestWorker: the worker of a stage that runs most micro-batches, alone, as a relaxation of a problem.

All that is left of the other stages is the time that a micro-batch takes there at least. Every plan gives such a worker a row, so
the least period of its rows is a bound of every plan. docs/planner.md has the terms of it that a formula knows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from recycle.core.problem import Problem
from recycle.planner.model.lower_bound import Bounds


@dataclass(frozen=True, slots=True)
class BusiestWorker:
    """What the row of a worker has to respect.

    `lengths_us` are those of F, of I (or B) and of the rest of the backward pass. From the start of F to that of I passes the
    round trip. F takes memory, I frees all of it but `kept`, and W the rest: hence each F waits for the I `num_before_input`
    micro-batches before it, and for such a W. The period is at least the time to the last I, or to the end, and what follows.
    """

    num_microbatches: int
    lengths_us: tuple[int, int, int]
    round_trip_us: int
    capacity: int | None
    taken: int
    kept: int
    after_input_us: int
    after_end_us: int

    @staticmethod
    def of(problem: Problem, stage: int) -> "BusiestWorker":
        bounds, num_live = Bounds(problem), problem.cluster.num_live(stage)
        lengths = bounds.lengths_us(stage)
        after_end, after_input = bounds.after_us(stage, num_live)
        return BusiestWorker(
            num_microbatches=bounds.load(num_live),
            lengths_us=lengths,
            round_trip_us=bounds.round_trip_us(stage),
            capacity=problem.capacity(stage),
            taken=problem.held_by_forward(stage),
            # A rest that takes no time is done, and frees its memory, when I ends.
            kept=problem.held_for_weight(stage) if lengths[2] else 0,
            after_input_us=after_input,
            after_end_us=after_end,
        )

    @property
    def num_before_input(self) -> int:
        """How many micro-batches fit at once."""
        if self.capacity is None or not self.taken:
            return self.num_microbatches
        return self.capacity // self.taken

    @property
    def num_before_weight(self) -> int:
        """How many micro-batches may be between F and the end of W."""
        if self.capacity is None or not self.kept:
            return self.num_microbatches
        return (self.capacity - self.taken) // self.kept + 1


def busiest_workers(problem: Problem) -> Iterator[BusiestWorker]:
    """Yield the busiest worker of each stage, that of the highest bound first."""
    bounds, num_live = Bounds(problem), problem.cluster.num_live
    by_bound = sorted(range(problem.shape.num_stages), key=lambda stage: -max(bounds.stage_terms(stage, num_live(stage))))
    for stage in by_bound:
        yield BusiestWorker.of(problem, stage)
