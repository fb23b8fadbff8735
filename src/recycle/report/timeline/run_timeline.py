"""The timeline of an executed iteration, from the record of a replay or of a real run, without ops in vain."""

import math
from collections.abc import Iterable

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import OpRan
from recycle.core.op import Op
from recycle.core.problem import Problem
from recycle.report.timeline.plan_timeline import about
from recycle.report.timeline.timeline import Block, Lane, Span, Timeline


def run_timeline(
    problem: Problem, events: Iterable[OpRan], iteration: int, rating: tuple[str, ...], windows: tuple[Span, ...]
) -> Timeline:
    """Return the timeline of one iteration of a run; `rating` is the line below the title, `windows` are by stage."""
    source = RunBlocks(events, iteration)
    blocks = [block for worker in problem.cluster.live_workers() for block in source.blocks(worker, with_ops=True)]
    ops = [block for block in blocks if block.op]
    if not ops:
        raise UserError(f"the record holds no op of iteration {iteration}, so there is nothing to draw")
    return Timeline(
        problem=problem,
        about=about(problem),
        rating=rating,
        windows=windows,
        looks=frozenset(block.look for block in blocks),
        has_rerouted=any(block.is_rerouted for block in ops),
        num_ops=len(ops),
        shortest_us=max(1, min(block.end_us - block.start_us for block in ops)),  # an op may be shorter than a µs
        source=source,
    )


class RunBlocks:
    """The recorded blocks of one iteration and of its neighbours, by worker."""

    def __init__(self, events: Iterable[OpRan], iteration: int) -> None:
        self.iteration = iteration
        self._blocks: dict[tuple[Worker, int], list[Block]] = {}
        for (worker, number), block in read_blocks(event for event in events if not event.is_in_vain):
            if abs(number - iteration) <= 1:
                self._blocks.setdefault((worker, number), []).append(block)

    def blocks(self, worker: Worker, with_ops: bool) -> list[Block]:
        return self._blocks.get((worker, self.iteration), [])

    def beside(self, lane: Lane) -> list[tuple[list[Block], int]]:
        return [(self._blocks.get((lane.worker, self.iteration + by), []), 0) for by in (-1, 1)]

    def grid_us(self, origin_us: int) -> int:
        blocks = (block for (_, number), blocks in self._blocks.items() if number == self.iteration for block in blocks)
        return math.gcd(*(time - origin_us for block in blocks for time in (block.start_us, block.end_us)))


def read_blocks(events: Iterable[OpRan]) -> Iterable[tuple[tuple[Worker, int], Block]]:
    """Yield each event as a block, with its worker and its iteration."""
    workers: dict[str, Worker] = {}
    ops: dict[str, Op] = {}
    for event in events:
        worker = workers.get(event.worker) or workers.setdefault(event.worker, Worker.parse(event.worker))
        if event.op in (REDUCE, OPTIMIZER):
            block = Block(event.start_us, event.end_us, event.op)
        else:
            op = ops.get(event.op) or ops.setdefault(event.op, Op.parse(event.op))
            is_rerouted = op.microbatch.pipeline != worker.pipeline
            block = Block(event.start_us, event.end_us, op.kind.value, is_rerouted, op)
        yield (worker, event.iteration), block
