"""TorchContender: torch.distributed.pipelining's schedules as contenders of a race, with plain data parallelism around them.

On GPU slices its messages and sums go over ReCycle's transport, within the GPU: gloo would carry them through the host, and NCCL
refuses two processes on one GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from recycle.core.cluster import Shape, Worker
from recycle.core.op import Kind
from recycle.evaluate.hardware.setup import SEED, Setup, make_optimizer
from recycle.profiling.worker_pool import TIMEOUT, MemberContext
from recycle.runtime.boundary.boundary_spec import BoundarySpec
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.execute.spans import now_us
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.gpu.cuda_ipc import CudaIpcTransport, SharedMemory
from recycle.runtime.transport.message_queue import MessageQueue
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportSpec
from recycle.runtime.worker.worker_spec import copied_stage

TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV = "torch-1f1b", "torch-zero-bubble", "torch-zbv"
TORCH = (TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV)


class TorchContender:
    """One worker, whichever of the schedules it runs. With `uses_transport`, messages and sums go over ReCycle's transport."""

    def __init__(
        self,
        setup: Setup,
        boundaries: Mapping[int, BoundarySpec],
        context: MemberContext,
        uses_transport: bool | None = None,
    ) -> None:
        # Wherever the model is cut, the tensor between two stages has the same spec.
        self._setup, self._boundary, self._context = setup, boundaries[0], context
        self._uses_transport = setup.is_gpu if uses_transport is None else uses_transport
        self._stages: dict[tuple[int, tuple[int, ...]], Sequence[nn.Module]] = {}
        shape = setup.shape
        ranks = [[p * shape.num_stages + s for s in range(shape.num_stages)] for p in range(shape.num_pipelines)]
        self._pipeline = [dist.new_group(own) for own in ranks][context.worker.pipeline]
        self._peers = [dist.new_group(list(own)) for own in zip(*ranks, strict=True)][context.worker.stage]
        self._device = torch.device("cuda", 0) if setup.is_gpu else torch.device("cpu")

    def run(self, number: int, variant: str, num_iterations: int, layers: tuple[int, ...] = ()) -> tuple[list[int], list[float]]:
        """Train; return the end of each iteration, and the mean losses of the worker's pipeline if it has the last stage.

        `layers` are those of each stage, of which a V has twice as many; by default they are balanced by FLOPs.
        """
        setup, shape, worker = self._setup, self._setup.shape, self._context.worker
        batches = MicroBatches(setup.text(), shape, setup.samples, SEED)
        transport = self._make_transport(number) if self._uses_transport else None
        schedule, modules = self._schedule(variant, transport, layers)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = make_optimizer(parameters)
        has_last = worker.stage == 0 if variant == TORCH_ZBV else worker.stage == shape.num_stages - 1
        ends_us: list[int] = []
        losses: list[float] = []
        for iteration in range(num_iterations):
            parts = [batches.get(iteration, worker.pipeline, index) for index in range(shape.num_microbatches)]
            inputs = [torch.cat([x for x, _ in parts]).to(self._device)] if worker.stage == 0 else []
            own: list[Tensor] = []
            given: dict[str, Any] = {}
            if has_last:
                given = {"target": torch.cat([y for _, y in parts]).to(self._device), "losses": own}
            schedule.step(*inputs, **given)
            self._reduce(parameters, transport)
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(torch.stack(own).detach().mean())] if own else []
            if transport is not None:
                transport.messages.flush()
                transport.messages.round += 1
            if setup.is_gpu:
                torch.cuda.synchronize()
            ends_us.append(now_us())
        if transport is not None:
            transport.abort()
            transport.close()
        return ends_us, losses

    def _make_transport(self, number: int) -> Transport:
        """A transport for twice as many micro-batches and stages, because a worker of a V has two stages."""
        store, view = self._context.store, GroupView(self._context.worker, self._context.workers, number)
        boundaries = dict.fromkeys(range(2 * self._setup.stages), self._boundary)
        spec = TransportSpec(boundaries, 2 * self._setup.shape.num_chains, (), TIMEOUT)
        if self._setup.is_gpu:
            return CudaIpcTransport(store, view, spec, SharedMemory(store, view, self._device))
        return GlooTransport(store, view, spec)

    def _schedule(self, variant: str, transport: Transport | None, layers: tuple[int, ...]) -> tuple[Any, list[nn.Module]]:
        # Here, because nobody else needs them, and they take a second to load.
        from torch.distributed.pipelining import schedules

        shape, stage = self._setup.shape, self._context.worker.stage
        num_stages = shape.num_stages * (2 if variant == TORCH_ZBV else 1)
        numbers = [stage, num_stages - 1 - stage] if variant == TORCH_ZBV else [stage]
        modules = [self._module(num_stages, number, layers) for number in numbers]
        make = _stage_class(transport.messages if transport is not None else None, shape, self._context.worker.pipeline)
        examples = [self._examples(number, num_stages) if transport is not None else {} for number in numbers]
        stages = [
            make(module, number, num_stages, self._device, group=self._pipeline, **example)
            for module, number, example in zip(modules, numbers, examples, strict=True)
        ]
        if variant == TORCH_1F1B:
            return schedules.Schedule1F1B(stages[0], shape.num_microbatches, loss_fn=_loss), modules
        zbv, zero_bubble = schedules.ScheduleZBVZeroBubble, schedules.ScheduleInterleavedZeroBubble
        schedule: Callable[..., Any] = zbv if variant == TORCH_ZBV else zero_bubble
        return schedule(stages, shape.num_microbatches, loss_fn=_loss), modules

    def _examples(self, number: int, num_stages: int) -> dict[str, Tensor]:
        """Example inputs and outputs of a stage: without them torch would ask its neighbours, over gloo."""
        (spec,), setup = self._boundary.tensors, self._setup
        between = torch.empty(spec.shape, dtype=spec.dtype, device=self._device, requires_grad=True)
        ids = torch.zeros(setup.samples, setup.context, dtype=torch.int64, device=self._device)
        size = setup.samples, setup.context, setup.vocabulary
        logits = torch.empty(size, dtype=spec.dtype, device=self._device, requires_grad=True)
        return {"input_args": ids if number == 0 else between, "output_args": logits if number == num_stages - 1 else between}

    def _module(self, num_stages: int, number: int, layers: tuple[int, ...]) -> nn.Module:
        """A stage as it is before the first step, on its device."""
        key = num_stages, layers
        if key not in self._stages:
            self._stages[key] = self._setup.modules(num_stages, layers or None)
        return copied_stage(self._stages[key], number).to(self._device)

    def _reduce(self, parameters: Sequence[Tensor], transport: Transport | None) -> None:
        """Replace gradients by their mean over the peers, in one all-reduce; without peers they stay as they are."""
        if self._setup.pipelines == 1:
            return
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        total = flat.float()
        if transport is not None:
            transport.reducer.all_reduce(total)
        else:
            dist.all_reduce(total, group=self._peers)
        flat.copy_(total / self._setup.pipelines)
        parts = torch.split(flat, [own.numel() for own in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class _ChannelOp(NamedTuple):
    """A send or receive of torch's schedule that goes over ReCycle's transport; it is its own work, for which torch waits."""

    channel: MessageQueue
    message: TensorMessage
    tensor: Tensor
    is_send: bool

    def begin(self) -> "_ChannelOp":
        if self.is_send:
            self.channel.send(self.message, self.tensor)
        else:
            self.channel.post_receive(self.message)
        return self

    def wait(self) -> None:
        """A send waits for nobody; a received tensor is copied to the buffer that torch has for it."""
        if not self.is_send:
            with torch.no_grad():
                self.tensor.copy_(self.channel.receive(self.message))


def _begin_channel_ops(schedules: Any) -> None:
    """Make torch's schedules begin a _ChannelOp as they begin their own sends and receives."""
    begin_torch_ops = schedules._batch_p2p

    def begin(ops: Sequence[Any], desc: str | None = None) -> list[Any]:
        return [op.begin() for op in ops] if ops and isinstance(ops[0], _ChannelOp) else begin_torch_ops(ops, desc)

    schedules._batch_p2p = begin


def _stage_class(channel: MessageQueue | None, shape: Shape, pipeline: int) -> Any:
    """torch's stage, whose messages go over the channel if there is one."""
    from torch.distributed.pipelining import PipelineStage, schedules

    class Stage(PipelineStage):
        """A stage that does not contact its neighbours first: in a V one of them is itself, which gloo refuses."""

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return []

    if channel is None:
        return Stage
    _begin_channel_ops(schedules)

    num_workers = shape.num_stages

    def worker_of(stage: int) -> Worker:
        return Worker(pipeline, stage if stage < num_workers else 2 * num_workers - 1 - stage)

    def convert(ops: Sequence[Any], kind: Kind, stage: int, index: int, is_send: bool) -> list[_ChannelOp]:
        """`stage` is the receiver's."""
        chain = pipeline * shape.num_microbatches + index
        if stage >= num_workers:  # of the two stages that a worker of a V has, the second one has chains of its own
            chain += shape.num_chains
        ends = worker_of(stage - 1 if kind is Kind.F else stage + 1), worker_of(stage)
        message = TensorMessage(kind, stage, chain, *ends, made_at=0, taken_at=1, is_of_warm_up=False)
        return [_ChannelOp(channel, message, op.tensor, is_send) for op in ops]

    class ChannelStage(Stage):
        """A stage whose messages go over the channel."""

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
            return convert(super().get_fwd_recv_ops(fwd_chunk_id), Kind.F, self.stage_index, fwd_chunk_id, False)

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return convert(super().get_fwd_send_ops(fwd_chunk_id), Kind.F, self.stage_index + 1, fwd_chunk_id, True)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
            return convert(super().get_bwd_recv_ops(bwd_chunk_id), Kind.I, self.stage_index, bwd_chunk_id, False)

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return convert(super().get_bwd_send_ops(bwd_chunk_id), Kind.I, self.stage_index - 1, bwd_chunk_id, True)

    return ChannelStage
