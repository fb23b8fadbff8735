"""`critical_ops`: the chain of executed ops that decided how long an iteration took."""

from collections.abc import Iterator, Mapping, Sequence

from recycle.core.errors import UserError
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.events.record import OpRan
from recycle.core.op import Kind, Op
from recycle.core.plans.rules import needs

Where = tuple[str, int]


def critical_ops(by_worker: Mapping[str, Sequence[OpRan]], num_stages: int) -> list[tuple[str, str]]:
    """Return the worker and the op of each link of the chain, the first one first.

    The chain ends with the op that ended last. Before each op comes what it waited for: of the op before it on its worker and
    of the ops that it needs, the one that ended last. Ops must be in order of their starts; those in vain do not count.
    """
    rows = {name: [op for op in ops if not op.is_in_vain and _is_computed(op.op)] for name, ops in by_worker.items()}
    where = {op.op: (name, number) for name, ops in rows.items() for number, op in enumerate(ops)}
    last = max(((ops[-1].end_us, (name, len(ops) - 1)) for name, ops in rows.items() if ops), default=None)
    chain: list[tuple[str, str]] = []
    at = last[1] if last is not None else None
    while at is not None:
        name, number = at
        op = rows[name][number]
        chain.append((name, op.op))
        causes = [cause for cause in _causes(rows, where, at, num_stages) if rows[cause[0]][cause[1]].start_us < op.start_us]
        at = max(causes, key=lambda cause: rows[cause[0]][cause[1]].end_us, default=None)
    return chain[::-1]


def _is_computed(text: str) -> bool:
    """Whether this is an op of a plan: no reduction, no step, and none of a kind that this release does not know."""
    if text in (REDUCE, OPTIMIZER):
        return False
    try:
        return Op.parse(text).stage >= 0
    except UserError:
        return False


def _causes(rows: Mapping[str, Sequence[OpRan]], where: Mapping[str, Where], at: Where, num_stages: int) -> Iterator[Where]:
    name, number = at
    if number:
        yield name, number - 1
    for need in needs(Op.parse(rows[name][number].op), num_stages):
        found = where.get(str(need))
        if found is None and need.kind is Kind.I:  # it may be part of a whole backward
            found = where.get(str(Op(need.stage, Kind.B, need.microbatch)))
        if found is not None and found != at:
            yield found
