"""The timeline of a plan, and its title. The iterations before and after are the same, one period away."""

import math
from collections.abc import Iterator, Sequence

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.plans.plan import Plan, Row
from recycle.core.plans.rules import stage_windows
from recycle.core.problem import Problem
from recycle.core.units import count_text, format_us
from recycle.report.timeline.timeline import Block, Lane, Span, Timeline


def plan_timeline(plan: Plan) -> Timeline:
    """Return the timeline of a plan, legal or not."""
    _refuse_undrawable(plan)
    source = PlanBlocks(plan)
    kinds = {kind for row in plan.rows for kind in row.kinds}
    finish = {block.look for stage in range(plan.problem.shape.num_stages) for block in source.finish(stage)}
    about, rating = headline(plan)
    return Timeline(
        problem=plan.problem,
        about=about,
        rating=rating,
        windows=source.windows(),
        looks=frozenset(kinds | finish),
        has_rerouted=any(_has_rerouted(plan.problem, row) for row in plan.rows),
        num_ops=plan.num_ops,
        shortest_us=min(source.durations_us, default=plan.period_us),
        source=source,
        has_cuts=bool(plan.cuts),
    )


class PlanBlocks:
    """The blocks of a plan: the slots of its rows, the reductions, the optimizer steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._rows = {row.worker: row for row in plan.rows}
        self._busy = stage_windows(plan)
        costs = plan.costs
        self.durations_us = {each for row in plan.rows for each in set(costs.durations_us(row.worker, row.kinds, row.chains))}

    def windows(self) -> tuple[Span, ...]:
        if self.plan.problem.techniques.staggered:
            return tuple((first, first + self.plan.period_us) for first, _ in self._busy)
        first = min(first for first, _ in self._busy)
        return ((first, first + self.plan.period_us),) * len(self._busy)

    def blocks(self, worker: Worker, with_ops: bool) -> list[Block]:
        row = self._rows.get(worker)
        if row is None:
            return []
        blocks = [*(_op_blocks(self.plan, row) if with_ops else _bare_blocks(self.plan, row)), *self.finish(worker.stage)]
        return sorted(blocks, key=lambda block: block.start_us)

    def finish(self, stage: int) -> list[Block]:
        """The reduction and the optimizer step that follow the last gradient of `stage`."""
        problem, last = self.plan.problem, self._busy[stage][1]
        reduced = starts = last + problem.reduce_us(stage)
        if not problem.techniques.staggered:
            starts = max(end + problem.reduce_us(other) for other, (_, end) in enumerate(self._busy))
        blocks = [
            Block(last, reduced, REDUCE),
            Block(starts, starts + problem.optimizer_us(stage), OPTIMIZER),
        ]
        return [block for block in blocks if block.end_us > block.start_us]

    def beside(self, lane: Lane) -> list[tuple[Sequence[Block], int]]:
        return [(lane.blocks, -self.plan.period_us), (lane.blocks, self.plan.period_us)]

    def grid_us(self, origin_us: int) -> int:
        return math.gcd(*self.durations_us, *(start - origin_us for row in self.plan.rows for start in row.starts_us))


def _refuse_undrawable(plan: Plan) -> None:
    """Refuse a period of 0, and rows of workers that the cluster does not have."""
    shape = plan.problem.shape
    if plan.period_us < 1:
        raise UserError(f"the plan's period is {plan.period_us} µs, so there is nothing to draw: plan again")
    for row in plan.rows:
        if row.worker.pipeline >= shape.num_pipelines or row.worker.stage >= shape.num_stages:
            raise UserError(f"the plan has a row for {row.worker}, but its cluster has no such worker: plan again")


def _has_rerouted(problem: Problem, row: Row) -> bool:
    num = problem.shape.num_microbatches
    home = range(row.worker.pipeline * num, (row.worker.pipeline + 1) * num)
    return bool(row.chains) and not (min(row.chains) in home and max(row.chains) in home)


def _bare_blocks(plan: Plan, row: Row) -> Iterator[Block]:
    num, pipeline = plan.problem.shape.num_microbatches, row.worker.pipeline
    durations = plan.costs.durations_us(row.worker, row.kinds, row.chains)
    for kind, chain, start, duration in zip(row.kinds, row.chains, row.starts_us, durations, strict=True):
        yield Block(start, start + duration, kind, chain // num != pipeline)


def _op_blocks(plan: Plan, row: Row) -> Iterator[Block]:
    costs = plan.costs
    for slot, chain in zip(plan.slots(row), row.chains, strict=True):
        before, after = costs.offsets(row.worker.stage, chain)
        yield Block(slot.start_us, slot.end_us, slot.op.kind.value, slot.is_rerouted, slot.op, after - before)


def idle_share(plan: Plan) -> float:
    """The share of the live workers' time in a period that no op fills."""
    busy_us = sum(plan.busy_us(row) for row in plan.rows)
    num_live = plan.problem.shape.num_workers - len(plan.problem.cluster.failed)
    return 1 - busy_us / (num_live * plan.period_us)


def cut_share(plan: Plan) -> float:
    """The share of cuts between two stages that lie elsewhere than at the base boundary."""
    return sum(len(offsets) - list(offsets).count(0) for offsets in plan.cuts) / sum(map(len, plan.cuts)) if plan.cuts else 0.0


def headline(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return two lists of clauses: the cluster of a plan, and the plan's quality."""
    quality, techniques = plan.quality, plan.problem.techniques
    above = f", {plan.gap - 1:.1%} above it" if 0 < quality.bound_us < plan.period_us else ""
    rating = (
        f"period {format_us(plan.period_us)}",
        f"proven bound {format_us(quality.bound_us)} ({quality.status}{above})",
        f"workers idle {idle_share(plan):.0%}",
        " + ".join(techniques.names) or "no techniques",
        quality.method,
        *([f"{cut_share(plan):.0%} of cuts elsewhere"] if plan.cuts else []),
    )
    return about(plan.problem), rating


def about(problem: Problem) -> tuple[str, ...]:
    """Return clauses on the size of the cluster and its dead workers."""
    shape, dead = problem.shape, sorted(problem.cluster.failed)
    names = ", ".join(map(str, dead[:4])) + (f" and {len(dead) - 4} more" if len(dead) > 4 else "")
    return (
        f"{count_text(shape.num_pipelines, 'pipeline')} × {count_text(shape.num_stages, 'stage')}",
        f"{count_text(shape.num_microbatches, 'micro-batch')} each",
        f"{names} dead" if dead else "no failures",
    )
