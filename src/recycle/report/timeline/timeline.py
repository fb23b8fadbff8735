"""An iteration as lanes of blocks: what every picture draws, whatever it draws with.

The iteration is a plan's (`plan_timeline`) or one that was executed (`run_timeline`). A lane is one worker; its window is the
time between the start of the iteration at the worker's stage and the start of the next one there. With the staggered optimizer
the windows of the stages are shifted against each other: what lies outside a window belongs to the iteration before or after.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from recycle.core.cluster import Worker
from recycle.core.op import Op
from recycle.core.problem import Problem

Span = tuple[int, int]
Look = tuple[str, bool]
_IDLE: Look = ("", False)


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of one look on a worker. `op` is None for reduce and optimizer, and where several ops are merged."""

    start_us: int
    end_us: int
    look: str
    is_rerouted: bool = False
    op: Op | None = None

    def shifted(self, by_us: int) -> "Block":
        return replace(self, start_us=self.start_us + by_us, end_us=self.end_us + by_us)

    def clipped(self, first_us: int, last_us: int) -> "Block":
        return replace(self, start_us=max(self.start_us, first_us), end_us=min(self.end_us, last_us))


@dataclass(frozen=True, slots=True)
class Lane:
    """What one worker does in its window, in order of time."""

    worker: Worker
    is_dead: bool
    window: Span
    blocks: tuple[Block, ...]


class Source(Protocol):
    """Where a timeline has its blocks from."""

    def blocks(self, worker: Worker, with_ops: bool) -> list[Block]:
        """Return what a worker does in the iteration, in order of time; without ops, blocks know only their look."""

    def beside(self, lane: Lane, extent: Span) -> list[Block]:
        """Return what the worker of a lane does in the iterations before and after, as far as it lies inside the extent."""

    def grid_us(self, origin_us: int) -> int:
        """Return the largest unit of which every op starts and lasts a whole number, counted from `origin_us`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a picture needs to know of an iteration. Lanes are made one by one, because there may be a million slots."""

    problem: Problem
    about: tuple[str, ...]  # clauses of the title
    rating: tuple[str, ...]  # and of the line below it
    windows: tuple[Span, ...]  # by stage
    looks: frozenset[str]
    has_rerouted: bool
    num_ops: int
    shortest_us: int  # of the ops
    source: Source

    @property
    def extent(self) -> Span:
        return min(first for first, _ in self.windows), max(last for _, last in self.windows)

    def lane(self, worker: Worker, with_ops: bool = True) -> Lane:
        """Return what `worker` does; without ops it is quicker, where nothing is labelled."""
        blocks = tuple(self.source.blocks(worker, with_ops))
        is_dead = not blocks and not self.problem.cluster.is_live(worker)
        return Lane(worker, is_dead, self.windows[worker.stage], blocks)

    def neighbours(self, lane: Lane) -> list[Block]:
        """The parts of the iterations before and after that lie beside the lane's window, inside the extent."""
        return self.source.beside(lane, self.extent) if lane.window != self.extent else []


def merged(blocks: Iterable[Block], extent: Span, num_columns: int) -> list[Block]:
    """Cut the extent into equal columns, give each one look of those in it, and join equal neighbours to one block.

    A column shows what is most due in it: the time that a look fills, and what of it earlier columns did not show. So looks keep
    their shares of a longer stretch; showing the longest alone would hide every F of a steady 1F1B behind its B.
    """
    first, length = extent[0], extent[1] - extent[0]
    shown = list(_shown(blocks, extent, num_columns))
    made: list[Block] = []
    start = 0
    for at, (column, look) in enumerate(shown):
        if at + 1 < len(shown) and shown[at + 1] == (column + 1, look):
            continue
        begin, end = shown[start][0], column + 1
        made.append(Block(first + begin * length // num_columns, first + end * length // num_columns, *look))
        start = at + 1
    return made


def _shown(blocks: Iterable[Block], extent: Span, num_columns: int) -> Iterator[tuple[int, Look]]:
    """Yield each column that shows a look, with that look."""
    length = extent[1] - extent[0]
    due: dict[Look, int] = {}
    for column, filled in _columns(blocks, extent, num_columns):
        for look, time in filled.items():
            due[look] = due.get(look, 0) + time
        best = max(filled, key=due.__getitem__)
        due[best] -= length
        if best != _IDLE:
            yield column, best


def _columns(blocks: Iterable[Block], extent: Span, num_columns: int) -> Iterator[tuple[int, dict[Look, int]]]:
    """Yield each column that holds a block, with the time of each look in it; times are scaled so that a column is `length`."""
    first, length = extent[0], extent[1] - extent[0]
    filled: dict[Look, int] = {}
    current = 0
    for block in blocks:
        position, end = (block.start_us - first) * num_columns, (block.end_us - first) * num_columns
        while position < end:
            column = position // length
            if column != current:
                if filled:
                    yield current, _with_idle(filled, length)
                filled, current = {}, column
            stop = min(end, (column + 1) * length)
            look = (block.look, block.is_rerouted)
            filled[look] = filled.get(look, 0) + stop - position
            position = stop
    if filled:
        yield current, _with_idle(filled, length)


def _with_idle(filled: dict[Look, int], length: int) -> dict[Look, int]:
    idle = length - sum(filled.values())
    return {**filled, _IDLE: idle} if idle > 0 else filled


@dataclass(frozen=True, slots=True)
class Axis:
    """The ticks of a time axis, counted from the start of the extent, and the unit they are written in."""

    unit: str
    ticks: tuple[tuple[int, str], ...]

    @staticmethod
    def over(extent: Span, most_ticks: int) -> "Axis":
        """Choose a round step that gives at most `most_ticks` ticks."""
        length = extent[1] - extent[0]
        step = next(step for step in _round_steps() if length // step < max(1, most_ticks))
        unit, size = next(
            (unit, size) for unit, size in (("s", 10**6), ("ms", 10**3), ("µs", 1)) if size == 1 or length >= 10 * size
        )
        return Axis(unit, tuple((extent[0] + at, f"{at / size:g}") for at in range(0, length + 1, step)))


def _round_steps() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10
