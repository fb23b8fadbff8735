"""One iteration as JSON: what each worker executed beside what its plan says, and the ops that decided its length."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import OpRan
from recycle.core.plans.plan import Plan
from recycle.dashboard.reading.run_reader import RunReader
from recycle.dashboard.views.critical_ops import critical_ops
from recycle.report.timeline.plan_timeline import plan_timeline

MOST_LANES = 256


@dataclass(frozen=True)
class IterationOps:
    """All ops of one iteration by worker, and its plan; `plan_problem` says why there is no plan."""

    number: int
    by_worker: dict[str, list[OpRan]]
    plan: Plan | None
    plan_problem: str

    @staticmethod
    def of(run: RunReader, number: int) -> "IterationOps":
        if number not in run.op_ranges:
            bounds = run.op_ranges.bounds
            among = f"there are {bounds[0]} to {bounds[1]}" if bounds else "the record holds no ops"
            raise UserError(f"the record holds no op of iteration {number}: {among}")
        by_worker: dict[str, list[OpRan]] = {}
        for op in run.ops(number):
            by_worker.setdefault(op.worker, []).append(op)
        discarded = _discarded_before_us(run, number)
        by_worker = {name: _ordered(ops, discarded) for name, ops in by_worker.items()}
        try:
            return IterationOps(number, by_worker, run.plan_of(number), "")
        except UserError as problem:
            return IterationOps(number, by_worker, None, str(problem))

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first start and the last end of the ops that counted; of all, if none did."""
        counted = [op for ops in self.by_worker.values() for op in ops if not op.is_in_vain]
        shown = counted or [op for ops in self.by_worker.values() for op in ops]
        return min(op.start_us for op in shown), max(op.end_us for op in shown)

    @cached_property
    def names(self) -> list[str]:
        """The workers, in the order of the plan's cluster; without a plan those of the record."""
        if self.plan is not None:
            return [str(worker) for worker in self.plan.problem.shape.workers()]
        return sorted(self.by_worker, key=_place)

    @cached_property
    def slowdown(self) -> float | None:
        """The measured over the planned time of all ops."""
        if self.plan is None:
            return None
        took_us = sum(
            op.end_us - op.start_us
            for ops in self.by_worker.values()
            for op in ops
            if not op.is_in_vain and op.op not in (REDUCE, OPTIMIZER)
        )
        planned_us = sum(self.plan.busy_us(row) for row in self.plan.rows)
        return took_us / planned_us if took_us and planned_us else None

    @cached_property
    def critical(self) -> list[tuple[str, str]]:
        num_stages = self.plan.problem.shape.num_stages if self.plan is not None else 0
        return critical_ops(self.by_worker, num_stages) if num_stages else []

    def about(self) -> dict[str, Any]:
        """Return all but the lanes."""
        plan, (first, last) = self.plan, self.span
        extent = plan_timeline(plan).extent if plan is not None else (0, 0)
        return {
            "number": self.number,
            "workers": self.names,
            "dead": sorted(map(str, plan.problem.cluster.failed)) if plan is not None else [],
            "start_us": first,
            "length_us": last - first,
            "period_us": plan.period_us if plan is not None else None,
            "planned_length_us": extent[1] - extent[0],
            "slowdown": self.slowdown,
            "num_ops": sum(len(ops) for ops in self.by_worker.values()),
            "num_in_vain": sum(op.is_in_vain for ops in self.by_worker.values() for op in ops),
            "vain_from_us": min(
                (op.start_us - first for ops in self.by_worker.values() for op in ops if op.is_in_vain), default=0
            ),
            "critical": [f"{worker} {op}" for worker, op in self.critical],
            "plan_problem": self.plan_problem,
        }

    def lanes(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the lanes of the workers from number `first` up to `last`: executed, and planned, each as columns."""
        names = self.names[first : min(last, first + MOST_LANES)]
        planned = _planned(self.plan, names) if self.plan is not None else {}
        start_us = self.span[0]
        critical = set(self.critical)
        return [
            {
                "worker": name,
                "executed": _columns(self.by_worker.get(name, ()), start_us),
                "planned": planned.get(name),
                "critical": [
                    number
                    for number, op in enumerate(self.by_worker.get(name, ()))
                    if (name, op.op) in critical and not op.is_in_vain
                ],
            }
            for name in names
        ]


def plan_lanes(plan: Plan, first: int = 0, last: int = MOST_LANES) -> dict[str, Any]:
    """Return a plan as lanes of planned ops."""
    names = [str(worker) for worker in plan.problem.shape.workers()]
    shown = names[first : min(last, first + MOST_LANES)]
    planned, extent = _planned(plan, shown), plan_timeline(plan).extent
    return {
        "workers": names,
        "dead": sorted(map(str, plan.problem.cluster.failed)),
        "period_us": plan.period_us,
        "planned_length_us": extent[1] - extent[0],
        "lanes": [{"worker": name, "executed": None, "planned": planned.get(name), "critical": []} for name in shown],
    }


def _discarded_before_us(run: RunReader, number: int) -> int:
    """Ops of this iteration that began before this time were discarded by a recovery that repeated the iteration."""
    return max((one.at_us + one.detect_us + one.abort_us for one in run.recoveries if number >= one.iteration), default=0)


def _ordered(ops: Iterable[OpRan], discarded_us: int) -> list[OpRan]:
    marked = (
        OpRan(op.iteration, op.worker, op.op, op.start_us, op.end_us, True) if op.start_us < discarded_us else op for op in ops
    )
    return sorted(marked, key=lambda op: op.start_us)


def _columns(ops: Sequence[OpRan], start_us: int) -> dict[str, Any]:
    return {
        "ops": " ".join(op.op.replace(" ", "\u00a0") for op in ops),
        "starts": [op.start_us - start_us for op in ops],
        "lengths": [op.end_us - op.start_us for op in ops],
        "vain": [number for number, op in enumerate(ops) if op.is_in_vain],
    }


def _planned(plan: Plan, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    timeline = plan_timeline(plan)
    first, found = timeline.extent[0], {}
    for name in names:
        blocks = timeline.source.blocks(Worker.parse(name), with_ops=True)
        found[name] = {
            "ops": " ".join(str(block.op) if block.op is not None else block.look for block in blocks),
            "starts": [block.start_us - first for block in blocks],
            "lengths": [block.end_us - block.start_us for block in blocks],
            "vain": [],
        }
    return found


def _place(name: str) -> tuple[int, int, str]:
    try:
        worker = Worker.parse(name)
        return worker.pipeline, worker.stage, name
    except UserError:
        return 1 << 30, 0, name
