"""A row as its worker plays it: every op with the messages that it takes and gives, derived from the plan once.

A message carries no acknowledgement, and needs none: what comes from a worker at some place of its row says that it has taken
everything that it needed until then. So a sender knows from the plan alone when it can let go of what it sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan, microbatch_of
from recycle.core.plans.routes import Routes


@dataclass(frozen=True, slots=True)
class TensorMessage:
    """A tensor on its way: the activation (F) or the gradient (I) of a chain, for a stage.

    Its sender makes it in the op at place `made_at` of its row, in its warm-up or after it; its receiver takes it for the op at
    place `taken_at`.
    """

    kind: Kind
    stage: int
    chain: int
    sender: Worker
    receiver: Worker
    made_at: int
    taken_at: int
    is_of_warm_up: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op of a row, with what it takes and gives; a stage's first and last have nothing to take or give on one side."""

    kind: Kind
    chain: int
    microbatch: MicroBatch
    label: str
    takes: TensorMessage | None
    gives: TensorMessage | None


def compile_rows(plan: Plan, routes: Routes, warm_ups: Mapping[Worker, int]) -> dict[Worker, Sequence[Instruction]]:
    """Return every worker's turns, in the order of its row."""
    # A gradient is passed on by I or by B, whichever a worker runs.
    places = {
        (row.worker, Kind.F if kind == Kind.F.value else Kind.I, chain): place
        for row in plan.rows
        for place, (kind, chain) in enumerate(zip(row.kinds, row.chains, strict=True))
        if kind != Kind.W.value
    }

    def message(kind: Kind, stage: int, chain: int) -> TensorMessage | None:
        """What reaches `stage` for its op of this kind: forwards from the stage before, backwards from the one after."""
        source = stage - 1 if kind is Kind.F else stage + 1
        if not (0 <= source < plan.problem.shape.num_stages and 0 <= stage < plan.problem.shape.num_stages):
            return None
        sender, receiver = routes.worker(source, chain), routes.worker(stage, chain)
        made_at, taken_at = places[sender, kind, chain], places[receiver, kind, chain]
        return TensorMessage(kind, stage, chain, sender, receiver, made_at, taken_at, made_at < warm_ups[sender])

    def turn(stage: int, kind: Kind, chain: int) -> Instruction:
        microbatch = microbatch_of(plan.problem.shape, chain)
        label = str(Op(stage, kind, microbatch))
        if kind is Kind.W:
            return Instruction(kind, chain, microbatch, label, None, None)
        way, onward = (Kind.F, stage + 1) if kind is Kind.F else (Kind.I, stage - 1)
        return Instruction(kind, chain, microbatch, label, message(way, stage, chain), message(way, onward, chain))

    return {
        row.worker: [turn(row.worker.stage, Kind(kind), chain) for kind, chain in zip(row.kinds, row.chains, strict=True)]
        for row in plan.rows
    }
