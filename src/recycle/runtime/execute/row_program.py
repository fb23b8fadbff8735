"""compile_rows: a row of a plan as instructions: every op with the messages that it receives and sends, derived once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recycle.core.cluster import Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan, microbatch_of
from recycle.core.plans.routes import Routes
from recycle.runtime.transport.specs import TensorMessage


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op of a row, with the messages that it receives and sends; the first and the last stage lack some of them."""

    kind: Kind
    chain: int
    microbatch: MicroBatch
    label: str
    receives: TensorMessage | None
    sends: TensorMessage | None


def compile_rows(plan: Plan, routes: Routes, warm_ups: Mapping[Worker, int]) -> dict[Worker, Sequence[Instruction]]:
    """Return the instructions of every worker, in the order of its row."""
    # A gradient is sent by I or by B, whichever a worker runs.
    indices = {
        (row.worker, Kind.F if kind == Kind.F.value else Kind.I, chain): index
        for row in plan.rows
        for index, (kind, chain) in enumerate(zip(row.kinds, row.chains, strict=True))
        if kind != Kind.W.value
    }

    def message(kind: Kind, stage: int, chain: int) -> TensorMessage | None:
        """The message for an op of `stage`: an activation from the stage before, or a gradient from the one after."""
        source = stage - 1 if kind is Kind.F else stage + 1
        if not (0 <= source < plan.problem.shape.num_stages and 0 <= stage < plan.problem.shape.num_stages):
            return None
        sender, receiver = routes.worker(source, chain), routes.worker(stage, chain)
        made_at, taken_at = indices[sender, kind, chain], indices[receiver, kind, chain]
        return TensorMessage(kind, stage, chain, sender, receiver, made_at, taken_at, made_at < warm_ups[sender])

    def instruction(stage: int, kind: Kind, chain: int) -> Instruction:
        microbatch = microbatch_of(plan.problem.shape, chain)
        label = str(Op(stage, kind, microbatch))
        if kind is Kind.W:
            return Instruction(kind, chain, microbatch, label, None, None)
        direction, onward = (Kind.F, stage + 1) if kind is Kind.F else (Kind.I, stage - 1)
        return Instruction(kind, chain, microbatch, label, message(direction, stage, chain), message(direction, onward, chain))

    return {
        row.worker: [instruction(row.worker.stage, Kind(kind), chain) for kind, chain in zip(row.kinds, row.chains, strict=True)]
        for row in plan.rows
    }
