"""One failure of a recorded run as blocks by worker: the discarded attempt, the pause, the same iteration by the live workers.

The record does not hold the ops that the dead worker ran in the discarded attempt, because they were lost with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.record import Event, OpRan, Recovered
from recycle.report.timeline.run_timeline import read_blocks
from recycle.report.timeline.timeline import Block, Span


@dataclass(frozen=True, slots=True)
class WorkerActivity:
    """The blocks of one worker around a failure, by time: discarded, counted, and of the iterations before and after."""

    worker: Worker
    discarded: tuple[Block, ...]
    counted: tuple[Block, ...]
    beside: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A recovery from dead workers, with every worker's blocks from the start of the discarded attempt to the end of the next."""

    recovered: Recovered
    shape: Shape
    extent: Span
    activities: tuple[WorkerActivity, ...]

    @property
    def dead(self) -> frozenset[Worker]:
        return frozenset(Worker.parse(name) for name in self.recovered.workers)

    @property
    def emptied(self) -> frozenset[Worker]:
        """The places that are empty afterwards: those of the dead, or the former places of the workers that moved there."""
        return frozenset(Worker.parse(name) for name in self.recovered.emptied)

    def takers(self, emptied: Worker) -> tuple[Worker, ...]:
        """The workers that run the micro-batches of an emptied place's pipeline at its stage after the recovery."""
        return tuple(
            one.worker
            for one in self.activities
            if one.worker.stage == emptied.stage
            and any(block.op and block.op.microbatch.pipeline == emptied.pipeline for block in one.counted)
        )


def events_around(events: Iterable[Event], recovered: Recovered) -> list[OpRan | Recovered]:
    """Return the events that the picture of a recovery needs, with times from the start of the discarded iteration."""
    ops = [event for event in events if isinstance(event, OpRan)]
    first, last = _extent(ops, recovered)
    near = [op for op in ops if abs(op.iteration - recovered.iteration) <= 1 and op.end_us > first and op.start_us < last]
    moved = replace(recovered, at_us=recovered.at_us - first, end_us=recovered.end_us - first)
    return [*(replace(op, start_us=op.start_us - first, end_us=op.end_us - first) for op in near), moved]


def read_failure(events: Iterable[Event], number: int = 0) -> Failure:
    """Return failure `number` of a record, counted from 0."""
    events = list(events)
    failures = [event for event in events if isinstance(event, Recovered) and not event.joins]
    if number >= len(failures):
        raise UserError(f"the record holds {len(failures)} failures, so there is no number {number} to draw")
    recovered = failures[number]
    ops = [event for event in events if isinstance(event, OpRan)]
    extent = _extent(ops, recovered)
    return Failure(recovered, _shape(ops), extent, tuple(_activities(ops, recovered, extent)))


def _extent(ops: Sequence[OpRan], recovered: Recovered) -> Span:
    """From the first op of the attempt, or the failure, to the end of the repeated iteration."""
    own = [op for op in ops if op.iteration == recovered.iteration]
    again = [op.end_us for op in own if op.start_us >= recovered.at_us and not op.is_in_vain]
    if not again:
        raise UserError(f"the record ends before step {recovered.iteration + 1} was done again: there is nothing to draw")
    return min(recovered.at_us, *(op.start_us for op in own)), max(again)


def _shape(ops: Sequence[OpRan]) -> Shape:
    workers = {Worker.parse(name) for name in {op.worker for op in ops}}
    chains = {block.op.microbatch.index for _, block in read_blocks(ops) if block.op}
    return Shape(1 + max(one.pipeline for one in workers), 1 + max(one.stage for one in workers), 1 + max(chains))


def _activities(ops: Sequence[OpRan], recovered: Recovered, extent: Span) -> Iterable[WorkerActivity]:
    first, last = extent
    found: dict[Worker, tuple[list[Block], list[Block], list[Block]]] = {worker: ([], [], []) for worker in _shape(ops).workers()}
    near = [op for op in ops if op.end_us > first and op.start_us < last]
    for op, ((worker, iteration), block) in zip(near, read_blocks(near), strict=True):
        kind = 2 if iteration != recovered.iteration else 0 if op.is_in_vain or op.start_us < recovered.at_us else 1
        found[worker][kind].append(block.clipped(first, last))
    for worker, kinds in found.items():
        yield WorkerActivity(worker, *(tuple(sorted(blocks, key=lambda block: block.start_us)) for blocks in kinds))
