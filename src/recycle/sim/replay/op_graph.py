"""A plan as a program that can be played: every op of every row by number, and what each one sets free.

What waits for what is asked of `rules.needs`, once for all micro-batches of a kind at a stage. Of two ops in one row the order
of the row says all that a need could say, so that needs between two stages are the only arrows that remain, and
every op sends at most one message: its activation down, or its gradient up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recycle.core.errors import UserError
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan, microbatch_of
from recycle.core.plans.rules import lag_us, needs
from recycle.core.problem import Problem

Ints = NDArray[np.int64]
ABSENT = -1
KINDS = tuple(Kind)
_CODES = np.zeros(128, dtype=np.int64)
_CODES[[ord(kind.value) for kind in KINDS]] = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class OpGraph:
    """Ops are numbered row after row: row r holds `bounds[r]` to `bounds[r + 1]`. Arrays are by op unless they say otherwise."""

    plan: Plan
    bounds: Ints
    row_of: Ints
    stage_of: Ints
    kinds: Ints  # places in KINDS
    durations_us: Ints
    planned_us: Ints
    targets: Ints  # the op at another stage that waits for this one, or ABSENT
    lags_us: Ints  # the way to the target

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def num_ops(self) -> int:
        return len(self.row_of)

    def rows_of_stage(self, stage: int) -> list[int]:
        """The rows of a stage's live workers, those without any op included."""
        return [number for number, row in enumerate(self.plan.rows) if row.worker.stage == stage]

    def op(self, number: int) -> Op:
        row = self.plan.rows[int(self.row_of[number])]
        place = int(number - self.bounds[self.row_of[number]])
        return Op(row.worker.stage, Kind(row.kinds[place]), microbatch_of(self.problem.shape, row.chains[place]))


def compile_plan(plan: Plan) -> OpGraph:
    """Return the program of `plan`; raise if no order of time could play it, because an op is missing, double or misplaced."""
    _refuse_strangers(plan)
    lengths = [len(row) for row in plan.rows]
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    stage_of = np.array([row.worker.stage for row in plan.rows], dtype=np.int64)[row_of]
    kinds = _CODES[np.frombuffer("".join(row.kinds for row in plan.rows).encode(), dtype=np.uint8)]
    stages = range(plan.problem.shape.num_stages)
    costs = np.array([[plan.problem.duration_us(stage, kind) for kind in KINDS] for stage in stages], dtype=np.int64)
    targets, lags = _arrows(plan, row_of, stage_of, kinds)
    return OpGraph(
        plan=plan,
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        row_of=row_of,
        stage_of=stage_of,
        kinds=kinds,
        durations_us=costs[stage_of, kinds],
        planned_us=_joined([row.starts_us for row in plan.rows]),
        targets=targets,
        lags_us=lags,
    )


def _joined(columns: list[object]) -> Ints:
    return np.concatenate([np.asarray(column, dtype=np.int64) for column in columns])


def _refuse_strangers(plan: Plan) -> None:
    shape, seen = plan.problem.shape, set()
    for row in plan.rows:
        worker = row.worker
        if worker.pipeline >= shape.num_pipelines or worker.stage >= shape.num_stages or worker in plan.problem.cluster.failed:
            raise _unplayable(f"{worker} has a row, but no live worker of the cluster has that name")
        if worker in seen:
            raise _unplayable(f"{worker} has two rows")
        seen.add(worker)
    if silent := set(range(shape.num_stages)) - {row.worker.stage for row in plan.rows if row.kinds}:
        raise _unplayable(f"stage {min(silent)} has nothing to do")


def _arrows(plan: Plan, row_of: Ints, stage_of: Ints, kinds: Ints) -> tuple[Ints, Ints]:
    """Return for each op which op at another stage waits for it, and the time that its message takes."""
    shape = plan.problem.shape
    chains = _joined([row.chains for row in plan.rows])
    numbers = _numbers(plan, stage_of, kinds, chains)
    targets, lags = np.full(len(chains), ABSENT, dtype=np.int64), np.zeros(len(chains), dtype=np.int64)
    for stage in range(shape.num_stages):
        for kind in Kind:
            sample = Op(stage, kind, MicroBatch(0, 0))
            waiting = numbers[stage, KINDS.index(kind)]
            held = np.flatnonzero(waiting != ABSENT)
            for before in needs(sample, shape.num_stages):
                sources, waits = _sources(numbers, before)[held], waiting[held]
                _refuse_missing(plan, sample, before, held[sources == ABSENT])
                if before.stage == stage:
                    _refuse_backward(plan, sample, before, held[(row_of[sources] != row_of[waits]) | (sources > waits)])
                else:
                    targets[sources] = waits
                    lags[sources] = lag_us(before, sample, plan.problem)
    return targets, lags


def _numbers(plan: Plan, stage_of: Ints, kinds: Ints, chains: Ints) -> Ints:
    """The number of the op by stage, kind and chain; ABSENT where there is none."""
    shape = plan.problem.shape
    numbers = np.full((shape.num_stages, len(KINDS), shape.num_chains), ABSENT, dtype=np.int64)
    numbers[stage_of, kinds, chains] = np.arange(len(chains))
    twice = np.flatnonzero(numbers[stage_of, kinds, chains] != np.arange(len(chains)))
    if len(twice):
        at = twice[0]
        op = Op(int(stage_of[at]), KINDS[kinds[at]], microbatch_of(shape, int(chains[at])))
        raise _unplayable(f"{op} is there twice")
    return numbers


def _sources(numbers: Ints, before: Op) -> Ints:
    """The ops that give what `before` gives, by chain: a fused B stands for its I."""
    found: Ints = numbers[before.stage, KINDS.index(before.kind)]
    if before.kind is not Kind.I:
        return found
    fused = numbers[before.stage, KINDS.index(Kind.B)]
    chosen: Ints = np.where(fused != ABSENT, fused, found)
    return chosen


def _refuse_missing(plan: Plan, sample: Op, before: Op, chains: Ints) -> None:
    for after, first in _named(plan, sample, before, chains):
        raise _unplayable(f"{after} waits for {first}, which nobody runs")


def _refuse_backward(plan: Plan, sample: Op, before: Op, chains: Ints) -> None:
    for after, first in _named(plan, sample, before, chains):
        raise _unplayable(f"{after} needs {first} before it in the same row")


def _named(plan: Plan, sample: Op, before: Op, chains: Ints) -> Iterator[tuple[Op, Op]]:
    for chain in chains.tolist():
        microbatch = microbatch_of(plan.problem.shape, chain)
        yield Op(sample.stage, sample.kind, microbatch), Op(before.stage, before.kind, microbatch)


def _unplayable(why: str) -> UserError:
    return UserError(f"this plan cannot be played: {why}; recycle check lists every rule that it breaks")
