"""A plan as lanes of blocks: what every picture of it draws, whatever it draws with.

A lane is one worker; its window is the time between the start of this iteration at the worker's stage and the start of the
next one there. With the staggered optimizer the windows of the stages are shifted against each other: what lies outside a
window belongs to the iteration before or after.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.op import Kind, Op
from recycle.core.plan import Plan, Row
from recycle.core.rules import stage_windows
from recycle.core.units import format_us

REDUCE, OPTIMIZER = "reduce", "optimizer"
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


class Timeline:
    """The lanes of a plan, made one by one because a plan may have a million slots."""

    def __init__(self, plan: Plan) -> None:
        _refuse_undrawable(plan)
        self.plan = plan
        self._rows = {row.worker: row for row in plan.rows}
        self._busy = stage_windows(plan)
        self.windows = _iteration_windows(plan, self._busy)
        self.extent: Span = min(first for first, _ in self.windows), max(last for _, last in self.windows)

    def lane(self, worker: Worker, with_ops: bool = True) -> Lane:
        """Return what `worker` does; without ops, blocks know only their look, which is quicker where nothing is labelled."""
        row = self._rows.get(worker)
        window = self.windows[worker.stage]
        if row is None:
            return Lane(worker, not self.plan.problem.cluster.is_live(worker), window, ())
        blocks = [*(_op_blocks(self.plan, row) if with_ops else _bare_blocks(self.plan, row)), *self.finish(worker.stage)]
        return Lane(worker, False, window, tuple(sorted(blocks, key=lambda block: block.start_us)))

    def finish(self, stage: int) -> list[Block]:
        """The reduction and the optimizer step that follow the last gradient of `stage`."""
        problem, last = self.plan.problem, self._busy[stage][1]
        reduced = last + problem.reduce_us(stage)
        starts = reduced
        if not problem.techniques.staggered:
            starts = max(end + problem.reduce_us(other) for other, (_, end) in enumerate(self._busy))
        blocks = [
            Block(last, reduced, REDUCE),
            Block(starts, starts + problem.profile.stages[stage].optimizer_us, OPTIMIZER),
        ]
        return [block for block in blocks if block.end_us > block.start_us]

    def neighbours(self, lane: Lane) -> list[Block]:
        """The parts of the iterations before and after that lie beside the lane's window, inside the extent."""
        if lane.window == self.extent:
            return []
        first, last = self.extent
        period = self.plan.period_us
        before = [block.shifted(-period).clipped(first, last) for block in lane.blocks if block.end_us - period > first]
        after = [block.shifted(period).clipped(first, last) for block in lane.blocks if block.start_us + period < last]
        return before + after


def _refuse_undrawable(plan: Plan) -> None:
    """Refuse what has no place on paper: a period of nothing, or rows of workers that the cluster does not have."""
    shape = plan.problem.shape
    if plan.period_us < 1:
        raise UserError(f"the plan's period is {plan.period_us} µs, so there is nothing to draw: plan again")
    for row in plan.rows:
        if row.worker.pipeline >= shape.num_pipelines or row.worker.stage >= shape.num_stages:
            raise UserError(f"the plan has a row for {row.worker}, but its cluster has no such worker: plan again")


def _iteration_windows(plan: Plan, busy: list[Span]) -> list[Span]:
    if plan.problem.techniques.staggered:
        return [(first, first + plan.period_us) for first, _ in busy]
    first = min(first for first, _ in busy)
    return [(first, first + plan.period_us)] * len(busy)


def _bare_blocks(plan: Plan, row: Row) -> Iterator[Block]:
    num, pipeline = plan.problem.shape.num_microbatches, row.worker.pipeline
    duration = {kind.value: plan.problem.duration_us(row.worker.stage, kind) for kind in Kind}
    for kind, chain, start in zip(row.kinds, row.chains, row.starts_us, strict=True):
        yield Block(start, start + duration[kind], kind, chain // num != pipeline)


def _op_blocks(plan: Plan, row: Row) -> Iterator[Block]:
    for slot in plan.slots(row):
        yield Block(slot.start_us, slot.end_us, slot.op.kind.value, slot.is_rerouted, slot.op)


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


def idle_share(plan: Plan) -> float:
    """The share of the live workers' time in a period that no op fills."""
    busy = 0
    for row in plan.rows:
        busy += sum(row.kinds.count(kind.value) * plan.problem.duration_us(row.worker.stage, kind) for kind in Kind)
    num_live = plan.problem.shape.num_workers - len(plan.problem.cluster.failed)
    return 1 - busy / (num_live * plan.period_us)


def headline(plan: Plan) -> tuple[list[str], list[str]]:
    """Say in two lists of clauses what the plan is of, and how good it is."""
    shape, quality, techniques = plan.problem.shape, plan.quality, plan.problem.techniques
    dead = sorted(plan.problem.cluster.failed)
    names = ", ".join(map(str, dead[:4])) + (f" and {len(dead) - 4} more" if len(dead) > 4 else "")
    about = [
        f"{_count(shape.num_pipelines, 'pipeline')} × {_count(shape.num_stages, 'stage')}",
        f"{_count(shape.num_microbatches, 'micro-batch')} each",
        f"{names} dead" if dead else "no failures",
    ]
    above = f", {plan.gap - 1:.1%} above it" if 0 < quality.bound_us < plan.period_us else ""
    rating = [
        f"period {format_us(plan.period_us)}",
        f"proven bound {format_us(quality.bound_us)} ({quality.status}{above})",
        f"workers idle {idle_share(plan):.0%}",
        " + ".join(techniques.names) or "no techniques",
        quality.method,
    ]
    return about, rating


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


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
