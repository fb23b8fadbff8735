"""compile_row: a row program as instructions: every op with the messages that it receives and sends, derived once."""

from collections.abc import Sequence
from dataclasses import dataclass

from recycle.core.cluster import Shape, Worker
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import microbatch_of
from recycle.core.plans.row_programs import NO_MESSAGE, RowProgram
from recycle.runtime.transport.specs import TensorMessage


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op of a row, with the messages that it receives and sends; the first and the last stage lack some of them.

    `layers` are those of the model that it computes, if they are not those of its stage in all micro-batches.
    """

    kind: Kind
    chain: int
    microbatch: MicroBatch
    label: str
    receives: TensorMessage | None
    sends: TensorMessage | None
    layers: range | None = None


def compile_row(program: RowProgram, shape: Shape) -> Sequence[Instruction]:
    """Return the instructions of a worker, in the order of its row."""
    worker, stage = program.worker, program.worker.stage
    columns = (program.chains, program.senders, program.made_at, program.is_early, program.receivers, program.taken_at)
    found = []
    for index, (letter, chain, sender, made_at, is_early, receiver, taken_at) in enumerate(
        zip(program.kinds, *columns, strict=True)
    ):
        kind, microbatch, receives, sends = Kind(letter), microbatch_of(shape, chain), None, None
        # An activation comes from the stage before and goes to the one after; a gradient goes the other way.
        carried, step = (Kind.F, 1) if kind is Kind.F else (Kind.I, -1)
        if sender != NO_MESSAGE:
            source = Worker(sender, stage - step)
            receives = TensorMessage(carried, stage, chain, source, worker, made_at, index, is_early == "1")
        if receiver != NO_MESSAGE:
            target = Worker(receiver, stage + step)
            sends = TensorMessage(carried, stage + step, chain, worker, target, index, taken_at, index < program.warm_up)
        layers = range(program.first_layers[index], program.end_layers[index]) if program.first_layers else None
        found.append(Instruction(kind, chain, microbatch, str(Op(stage, kind, microbatch)), receives, sends, layers))
    return found
