"""Row programs: each row of a plan with the messages of its ops, so that a worker needs no other row.

A row program also says how many ops at the head of the row are its warm-up: they may run before the verdict on the last step is
known. A warm-up holds forward passes only, so that no gradient is touched, and only forward passes that need nothing but other
forward passes of a warm-up. So every worker can play all of its warm-up whatever the verdict will be. If the verdict is that the
step was wrong, all workers begin the iteration again, and no worker waits for a message that is never sent.

And it says in which order the gradients of layers are summed that several stages hold.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.core.plans.op_costs import OpCosts
from recycle.core.plans.plan import Plan, Row
from recycle.core.plans.sum_order import sum_orders

NO_MESSAGE = -1
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class RowProgram:
    """The ops of a row in order, as columns of equal length.

    The message of an op comes from the worker of pipeline `senders`, which makes it with its op number `made_at`, in its warm-up
    or not (`is_early`). Its result goes to the worker of pipeline `receivers`, which takes it with its op number `taken_at`. The
    pipeline is `NO_MESSAGE` where there is no message.

    If the plan cuts micro-batches, an op computes the layers from `first_layers` up to but without `end_layers`; these columns
    are empty if every op computes exactly the layers of its stage.

    If the stage shares layers with others, `sum_order` has these, and `OWN_SUM`, in the order in which they are summed over
    workers: those that are summed in one go together.
    """

    worker: Worker
    warm_up: int
    is_staggered: bool
    kinds: str
    chains: Sequence[int]
    senders: Sequence[int]
    made_at: Sequence[int]
    is_early: str
    receivers: Sequence[int]
    taken_at: Sequence[int]
    first_layers: Sequence[int] = ()
    end_layers: Sequence[int] = ()
    sum_order: Sequence[Sequence[int]] = ()

    def dumps(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("first_layers", "end_layers", "sum_order"):
            if not values[name]:
                del values[name]
        return _encode(values | {"worker": str(self.worker)})

    @staticmethod
    def parse(text: str) -> "RowProgram":
        """Return the program of a text that `dumps` of this release made."""
        values = json.loads(text)
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        values["sum_order"] = tuple(map(tuple, values.get("sum_order", ())))
        return RowProgram(**values | {"worker": Worker.parse(values["worker"])})


def row_programs(plan: Plan) -> dict[Worker, RowProgram]:
    """Return the program of every row of a legal plan."""
    shape = plan.problem.shape
    stages = [_StageColumns(shape.num_chains) for _ in range(shape.num_stages)]
    for row in plan.rows:
        stages[row.worker.stage].add(row)
    lengths = _warm_up_lengths(plan, stages)
    costs, orders = plan.costs, sum_orders(plan)
    return {row.worker: _program(row, plan, costs, stages, lengths[row.worker], orders) for row in plan.rows}


def warm_ups(plan: Plan) -> dict[Worker, int]:
    """Return how many ops at the head of each row are its warm-up."""
    return {worker: program.warm_up for worker, program in row_programs(plan).items()}


class _StageColumns:
    """By chain, at one stage: where its passes are, as pipeline and number in the row, and whether F is in a warm-up.

    `messages` has that of the backward pass (I or B) at False, and that of the forward pass at True.
    """

    def __init__(self, num_chains: int) -> None:
        self.messages: list[list[tuple[int, int]]] = [[(NO_MESSAGE, 0)] * num_chains for _ in range(2)]
        self.is_early = [False] * num_chains

    def add(self, row: Row) -> None:
        pipeline, (backward, forward) = row.worker.pipeline, self.messages
        for index, (kind, chain) in enumerate(zip(row.kinds, row.chains, strict=True)):
            if kind == Kind.F.value:
                forward[chain] = pipeline, index
            elif kind != Kind.W.value:
                backward[chain] = pipeline, index


def _warm_up_lengths(plan: Plan, stages: Sequence[_StageColumns]) -> dict[Worker, int]:
    """The warm-up of each row: a forward pass needs that of the stage before, so that the stages follow one after the other."""
    lengths: dict[Worker, int] = {}
    for row in sorted(plan.rows, key=lambda row: row.worker.stage):
        stage, length = row.worker.stage, len(row.kinds) - len(row.kinds.lstrip(Kind.F.value))
        if stage > 0:
            before = stages[stage - 1].is_early
            length = next((index for index, chain in enumerate(row.chains[:length]) if not before[chain]), length)
        for chain in row.chains[:length]:
            stages[stage].is_early[chain] = True
        lengths[row.worker] = length
    return lengths


def _program(
    row: Row,
    plan: Plan,
    costs: OpCosts,
    stages: Sequence[_StageColumns],
    length: int,
    orders: Sequence[Sequence[Sequence[int]]],
) -> RowProgram:
    # An activation comes from the stage before and goes to the one after; a gradient, which I or B sends, the other way.
    stage, none, forward = row.worker.stage, (NO_MESSAGE, 0), Kind.F.value
    before = stages[stage - 1] if stage > 0 else None
    after = stages[stage + 1] if stage + 1 < len(stages) else None
    sources, targets = [], []
    for kind, chain in zip(row.kinds, row.chains, strict=True):
        source, target = (before, after) if kind == forward else (after, before) if kind != Kind.W.value else (None, None)
        sources.append(source.messages[kind == forward][chain] if source is not None else none)
        targets.append(target.messages[kind == forward][chain] if target is not None else none)
    ops = zip(row.kinds, row.chains, strict=True)
    is_early = ["1" if kind == forward and before is not None and before.is_early[chain] else "0" for kind, chain in ops]
    senders, made_at = zip(*sources, strict=True) if sources else ((), ())
    receivers, taken_at = zip(*targets, strict=True) if targets else ((), ())
    layers = [costs.layers(stage, chain) for chain in row.chains] if costs.cuts else []
    firsts, ends = tuple(each.start for each in layers), tuple(each.stop for each in layers)
    columns = (row.kinds, tuple(row.chains), senders, made_at, "".join(is_early), receivers, taken_at, firsts, ends)
    return RowProgram(row.worker, length, plan.problem.techniques.staggered, *columns, tuple(orders[stage]))
