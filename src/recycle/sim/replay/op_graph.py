"""OpGraph: the ops of a plan as numbered nodes, with the edges along which ops send messages to other stages.

Dependencies come from `rules.needs`, which is called once for all micro-batches of a kind at a stage. Within a row the order of
the row already implies every dependency. So only dependencies between two stages become edges, and every op has at most one: it
sends its activation to the next stage, or its gradient to the stage before.
"""

from collections.abc import Sequence
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
    """Arrays by op. Ops are numbered row after row: row r has the ops from `bounds[r]` up to but without `bounds[r + 1]`."""

    plan: Plan
    bounds: Ints
    row_of: Ints
    stage_of: Ints
    kinds: Ints  # indices into KINDS
    durations_us: Ints
    planned_us: Ints
    targets: Ints  # the op at another stage that waits for this one, or ABSENT
    lags_us: Ints  # the time of the message to the target

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def num_ops(self) -> int:
        return len(self.row_of)

    def rows_of_stage(self, stage: int) -> list[int]:
        """The rows of a stage's live workers, including rows without an op."""
        return [number for number, row in enumerate(self.plan.rows) if row.worker.stage == stage]

    def ops_of_row(self, row: int) -> slice:
        return slice(*self.bounds[row : row + 2].tolist())

    def first_ops(self, stage: int) -> list[int]:
        """The first op of each row of a stage that has ops."""
        return [int(self.bounds[row]) for row in self.rows_of_stage(stage) if self.plan.rows[row].kinds]

    def op(self, number: int) -> Op:
        row = self.plan.rows[int(self.row_of[number])]
        index = int(number - self.bounds[self.row_of[number]])
        return Op(row.worker.stage, Kind(row.kinds[index]), microbatch_of(self.problem.shape, row.chains[index]))


def build_op_graph(plan: Plan) -> OpGraph:
    """Return the op graph of `plan`, or raise a UserError if an op is missing, double or misplaced."""
    _refuse_bad_rows(plan)
    lengths = [len(row) for row in plan.rows]
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    stage_of = np.array([row.worker.stage for row in plan.rows], dtype=np.int64)[row_of]
    kinds = _CODES[np.frombuffer("".join(row.kinds for row in plan.rows).encode(), dtype=np.uint8)]
    costs = plan.costs
    targets, lags = _edges(plan, row_of, stage_of, kinds)
    return OpGraph(
        plan=plan,
        bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        row_of=row_of,
        stage_of=stage_of,
        kinds=kinds,
        durations_us=_concatenated([costs.durations_us(row.worker, row.kinds, row.chains) for row in plan.rows]),
        planned_us=_concatenated([row.starts_us for row in plan.rows]),
        targets=targets,
        lags_us=lags,
    )


def _concatenated(columns: Sequence[object]) -> Ints:
    return np.concatenate([np.asarray(column, dtype=np.int64) for column in columns])


def _refuse_bad_rows(plan: Plan) -> None:
    shape, seen = plan.problem.shape, set()
    for row in plan.rows:
        worker = row.worker
        if worker not in shape or worker in plan.problem.cluster.failed:
            raise _cannot_replay(f"{worker} has a row, but no live worker of the cluster has that name")
        if worker in seen:
            raise _cannot_replay(f"{worker} has two rows")
        seen.add(worker)
    if idle := set(range(shape.num_stages)) - {row.worker.stage for row in plan.rows if row.kinds}:
        raise _cannot_replay(f"stage {min(idle)} has nothing to do")


def _edges(plan: Plan, row_of: Ints, stage_of: Ints, kinds: Ints) -> tuple[Ints, Ints]:
    """Return for each op the op at another stage that waits for it, and the time of the message between them."""
    shape = plan.problem.shape
    chains = _concatenated([row.chains for row in plan.rows])
    numbers = _numbers(plan, stage_of, kinds, chains)
    targets, lags = np.full(len(chains), ABSENT, dtype=np.int64), np.zeros(len(chains), dtype=np.int64)
    for stage in range(shape.num_stages):
        for kind in Kind:
            sample = Op(stage, kind, MicroBatch(0, 0))
            waiting = numbers[stage, KINDS.index(kind)]
            present = np.flatnonzero(waiting != ABSENT)
            for before in needs(sample, shape.num_stages):
                sources, waits = _sources(numbers, before)[present], waiting[present]
                _refuse(plan, sample, before, present[sources == ABSENT], "{after} waits for {first}, which nobody runs")
                if before.stage == stage:
                    is_late = (row_of[sources] != row_of[waits]) | (sources > waits)
                    _refuse(plan, sample, before, present[is_late], "{after} needs {first} before it in the same row")
                else:
                    targets[sources] = waits
                    lags[sources] = lag_us(before, sample, plan.problem)
    return targets, lags


def _numbers(plan: Plan, stage_of: Ints, kinds: Ints, chains: Ints) -> Ints:
    """The number of each op by stage, kind and chain; ABSENT where there is no such op."""
    shape = plan.problem.shape
    numbers = np.full((shape.num_stages, len(KINDS), shape.num_chains), ABSENT, dtype=np.int64)
    numbers[stage_of, kinds, chains] = np.arange(len(chains))
    twice = np.flatnonzero(numbers[stage_of, kinds, chains] != np.arange(len(chains)))
    if len(twice):
        first = twice[0]
        op = Op(int(stage_of[first]), KINDS[kinds[first]], microbatch_of(shape, int(chains[first])))
        raise _cannot_replay(f"{op} is there twice")
    return numbers


def _sources(numbers: Ints, before: Op) -> Ints:
    """The ops that have the output of `before`, by chain: a fused B replaces an I."""
    split: Ints = numbers[before.stage, KINDS.index(before.kind)]
    if before.kind is not Kind.I:
        return split
    fused = numbers[before.stage, KINDS.index(Kind.B)]
    chosen: Ints = np.where(fused != ABSENT, fused, split)
    return chosen


def _refuse(plan: Plan, sample: Op, before: Op, chains: Ints, sentence: str) -> None:
    if len(chains):
        microbatch = microbatch_of(plan.problem.shape, int(chains[0]))
        after, first = Op(sample.stage, sample.kind, microbatch), Op(before.stage, before.kind, microbatch)
        raise _cannot_replay(sentence.format(after=after, first=first))


def _cannot_replay(why: str) -> UserError:
    return UserError(f"this plan cannot be replayed: {why}; recycle check lists every rule that it breaks")
