"""Set-up of a worker for an epoch: its program of the plan, the state of its stage, its transport and its trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from recycle.control.decide.messages import Ballot, LayerTransfer
from recycle.control.drift.message_times import MessageTimer
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.row_programs import RowProgram
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.microbatches import MicroBatchSource
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.compute.stage import Stage
from recycle.runtime.execute.evaluation import Evaluator
from recycle.runtime.execute.executor import DeviceTime, Executor, OnProgress, SpeedIn
from recycle.runtime.execute.row_program import Instruction, compile_row
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.transport.activity import Activity
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.select import TransportChoice, agree_on_transport, device_of_worker, make_transport
from recycle.runtime.transport.specs import DelayTo, GroupView, MessageLink, TransportSpec
from recycle.runtime.worker.worker_spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """One worker's part of a plan: its instructions, how many are its warm-up, whether stages step on their own, and its sums."""

    instructions: Sequence[Instruction]
    warm_up: int
    is_staggered: bool
    sum_order: Sequence[Sequence[int]] = ()


def worker_program(program: RowProgram, shape: Shape) -> WorkerProgram:
    return WorkerProgram(compile_row(program, shape), program.warm_up, program.is_staggered, program.sum_order)


def make_stage_state(
    spec: WorkerSpec, stage: int, num_steps: int = 0, device: torch.device | None = None, last_ballot: Ballot | None = None
) -> StageState:
    """A stage as it is before the first step, on `device`. `last_ballot` is that of the step before, if this worker has it."""
    options = spec.options
    module = spec.make_stage(stage).to(device)
    sums = make_sums(module.parameters(), spec.shape.num_chains, options.is_exact, options.sum_dtype, device)
    loss = spec.loss if stage == spec.shape.num_stages - 1 else None
    own_layers = spec.layers.ranges[stage] if spec.layers is not None else None
    carries_loss = stage in spec.boundaries and spec.boundaries[stage].carries_loss
    made = Stage(module, sums, stage, loss, options.ops, device, own_layers, carries_loss)
    stepper = Stepper(made.parameters(), spec.make_optimizer, options.schedule, options.has_lean_steps, options.used_loss_scale)
    return StageState(made, stepper, spec.shape, spec.ties, options.max_norm, num_steps, last_ballot)


def connect(
    spec: WorkerSpec,
    program: WorkerProgram,
    view: GroupView,
    store: Any,
    device: torch.device,
    host: str = "127.0.0.1",
    activity: Activity | None = None,
    timer: MessageTimer | None = None,
    delay_s_to: DelayTo = lambda receiver: 0.0,
) -> tuple[Transport, TransportChoice]:
    """The transport of a worker of this machine, which the others reach at `host`; all workers of the epoch must call it."""
    choice = agree_on_transport(store, view, device_of_worker(device), spec.options.transport)
    timeout = timedelta(seconds=spec.options.timeout_s)
    watched = activity or Activity(), timer or MessageTimer()
    transport_spec = TransportSpec(
        spec.boundaries, spec.shape.num_chains, spec.ties, timeout, host, *watched, delay_s_to=delay_s_to
    )
    return make_transport(choice, store, view, transport_spec, links_of(program), device), choice


def links_of(program: WorkerProgram) -> set[MessageLink]:
    """The links by which a worker sends and receives messages."""
    messages = [message for each in program.instructions for message in (each.receives, each.sends) if message is not None]
    return {MessageLink(message.kind, message.sender, message.receiver) for message in messages}


def partners_of(
    worker: Worker, program: WorkerProgram, sources: Mapping[str, str], transfers: Sequence[LayerTransfer] = ()
) -> frozenset[Worker]:
    """The workers with which a worker exchanges messages, or the state of its stage. `sources` are the senders by receiver."""
    ends = {end for link in links_of(program) for end in (link.sender, link.receiver)}
    for pair in (*sources.items(), *((each.receiver, each.sender) for each in transfers)):
        if str(worker) in pair:
            ends.update(map(Worker.parse, pair))
    return frozenset(ends - {worker})


def make_trainer(
    spec: WorkerSpec,
    program: WorkerProgram,
    view: GroupView,
    state: StageState,
    transport: Transport,
    on_progress: OnProgress = lambda iteration, label: None,
    activity: Activity | None = None,
    speed_in: SpeedIn = lambda iteration: 1.0,
    samples: MicroBatchSource | None = None,
    device_us: DeviceTime | None = None,
) -> Trainer:
    """The trainer of a worker in one epoch, on the state of its stage. It reads `samples`, or the job's micro-batches itself."""
    num_stages, seed = spec.shape.num_stages, spec.options.seed
    executor = Executor(
        view.worker,
        program.instructions,
        num_stages,
        state.stage,
        transport.messages,
        samples or spec.microbatches,
        seed,
        on_progress,
        activity,
        speed_in,
        device_us,
    )
    how = program.warm_up, program.is_staggered, program.sum_order
    trainer = Trainer(executor, transport, state, view, spec.shape, spec.ties, *how)
    if spec.evaluation is not None:
        what = state.stage, program.instructions, transport, spec.shape, spec.evaluation
        trainer.evaluator = Evaluator(*what, seed, executor.activity)
    return trainer
