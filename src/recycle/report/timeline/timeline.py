"""An iteration as lanes of blocks, the input of every picture: of a plan (`plan_timeline`) or as executed (`run_timeline`).

A lane is one worker; its window is the time from the start of the iteration at the worker's stage to the start of the next one
there. With the staggered optimizer the windows of the stages are shifted: blocks outside a window belong to the iteration before
or after.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Protocol

from recycle.core.cluster import Worker
from recycle.core.op import Op
from recycle.core.problem import Problem

Span = tuple[int, int]
Look = tuple[str, bool]
_IDLE: Look = ("", False)


@dataclass(frozen=True, slots=True)
class Block:
    """A span of time with one look on a worker. `op` is None for reductions, steps and merged ops.

    `more_layers` is how many layers more than its stage's own an op computes; fewer, if it is negative.
    """

    start_us: int
    end_us: int
    look: str
    is_rerouted: bool = False
    op: Op | None = None
    more_layers: int = 0

    def shifted(self, by_us: int) -> "Block":
        return replace(self, start_us=self.start_us + by_us, end_us=self.end_us + by_us)

    def clipped(self, first_us: int, last_us: int) -> "Block":
        return replace(self, start_us=max(self.start_us, first_us), end_us=min(self.end_us, last_us))

    def labels(self, letter: str) -> list[str]:
        """The letter with the micro-batch, the home pipeline if re-routed, and the layers more or fewer, by how much they say."""
        if self.op is None:
            return []
        short = f"{letter}{self.op.microbatch.index}"
        names = [f"{short}@{self.op.microbatch.pipeline}", short] if self.is_rerouted else [short]
        return [f"{name}{self.more_layers:+d}" for name in names] + names if self.more_layers else names


@dataclass(frozen=True, slots=True)
class Lane:
    """The blocks of one worker in its window, in order of time."""

    worker: Worker
    is_dead: bool
    window: Span
    blocks: tuple[Block, ...]


class Source(Protocol):
    """The supplier of a timeline's blocks."""

    def blocks(self, worker: Worker, with_ops: bool) -> list[Block]:
        """Return the blocks of a worker in the iteration, in order of time; without ops, they may have only their look."""

    def beside(self, lane: Lane) -> Iterable[tuple[Iterable[Block], int]]:
        """Return blocks that give, shifted by a time, the iterations before and after the lane's."""

    def grid_us(self, origin_us: int) -> int:
        """Return the largest unit that divides every start, counted from `origin_us`, and every duration."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """An iteration to draw. Lanes are made one by one, because there may be a million slots."""

    problem: Problem
    about: tuple[str, ...]  # clauses of the title
    rating: tuple[str, ...]  # and of the line below it
    windows: tuple[Span, ...]  # by stage
    looks: frozenset[str]
    has_rerouted: bool
    num_ops: int
    shortest_us: int  # of the ops
    source: Source
    has_cuts: bool = False

    @property
    def extent(self) -> Span:
        return min(first for first, _ in self.windows), max(last for _, last in self.windows)

    def lane(self, worker: Worker, with_ops: bool = True) -> Lane:
        """Return the lane of `worker`; without ops it is faster, for pictures without labels."""
        blocks = tuple(self.source.blocks(worker, with_ops))
        is_dead = not blocks and not self.problem.cluster.is_live(worker)
        return Lane(worker, is_dead, self.windows[worker.stage], blocks)

    def neighbours(self, lane: Lane) -> list[Block]:
        """The blocks of the iterations before and after the lane's window, inside the extent."""
        first, last = self.extent
        return [
            block.shifted(by_us).clipped(first, last)
            for blocks, by_us in (self.source.beside(lane) if lane.window != self.extent else ())
            for block in blocks
            if block.end_us + by_us > first and block.start_us + by_us < last
        ]


def merged(blocks: Iterable[Block], extent: Span, num_columns: int) -> list[Block]:
    """Cut the extent into equal columns, give each one of its looks, and join equal neighbours to one block.

    A column shows the look with the most time that no column has shown yet. So looks keep their shares of time; showing the
    longest look of each column would hide every F of a steady 1F1B behind its B.
    """
    first, length = extent[0], extent[1] - extent[0]
    joined: list[Block] = []
    shown = enumerate(_shown(blocks, extent, num_columns))
    # Neighbours have the same difference of column and index.
    for (_, look), run in groupby(shown, key=lambda item: (item[1][0] - item[0], item[1][1])):
        columns = [column for _, (column, _) in run]
        start_us, end_us = (first + column * length // num_columns for column in (columns[0], columns[-1] + 1))
        joined.append(Block(start_us, end_us, *look))
    return joined


def _shown(blocks: Iterable[Block], extent: Span, num_columns: int) -> Iterator[tuple[int, Look]]:
    """Yield each column that is not idle, with its look."""
    length = extent[1] - extent[0]
    due: dict[Look, int] = {}
    for column, filled in _columns(blocks, extent, num_columns):
        if (idle := length - sum(filled.values())) > 0:
            filled[_IDLE] = idle
        for look, time in filled.items():
            due[look] = due.get(look, 0) + time
        best = max(filled, key=due.__getitem__)
        due[best] -= length
        if best != _IDLE:
            yield column, best


def _columns(blocks: Iterable[Block], extent: Span, num_columns: int) -> Iterator[tuple[int, dict[Look, int]]]:
    """Yield each column with a block, and the time of each look in it, in a scale in which a column has the length `length`."""
    first, length = extent[0], extent[1] - extent[0]
    filled: dict[Look, int] = {}
    current = 0
    for block in blocks:
        position, end = (block.start_us - first) * num_columns, (block.end_us - first) * num_columns
        while position < end:
            column = position // length
            if column != current:
                if filled:
                    yield current, filled
                filled, current = {}, column
            stop = min(end, (column + 1) * length)
            look = (block.look, block.is_rerouted)
            filled[look] = filled.get(look, 0) + stop - position
            position = stop
    if filled:
        yield current, filled


def axis_ticks(extent: Span, most: int) -> tuple[str, list[tuple[int, str]]]:
    """Return the unit of a time axis, and at most `most` round ticks with their texts, counted from the start of the extent."""
    length = extent[1] - extent[0]
    round_steps = (digit * 10**power for power in count() for digit in (1, 2, 5))
    step = next(step for step in round_steps if length // step < max(1, most))
    units = (("s", 10**6), ("ms", 10**3), ("µs", 1))
    unit, size = next((unit, size) for unit, size in units if size == 1 or length >= 10 * size)
    return unit, [(extent[0] + at, f"{at / size:g}") for at in range(0, length + 1, step)]
