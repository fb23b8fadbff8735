"""The other side of a race: torch.distributed.pipelining's schedules, with plain data parallelism around them.

On CPUs all of it is torch's own. On GPU slices torch has no way from one process to the other but through the host: gloo carries
nothing else, and NCCL refuses two processes on one GPU. So there its messages and sums go over our links, within the GPU, and
what is compared is the schedule and the split of the backward pass.
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
from recycle.profiling.worker_pool import TIMEOUT, Station
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.execute.row_program import TensorMessage
from recycle.runtime.execute.spans import now_us
from recycle.runtime.transport.cuda_ipc import CudaIpcTransport
from recycle.runtime.transport.gloo import GlooTransport, GroupView, TensorSpec
from recycle.runtime.worker.worker_spec import CopiedStages

TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV = "torch-1f1b", "torch-zero-bubble", "torch-zbv"
TORCH = (TORCH_1F1B, TORCH_ZERO_BUBBLE, TORCH_ZBV)


class TorchContender:
    """One worker, whichever of the schedules it plays. With `is_linked`, messages and sums go over our links."""

    def __init__(self, setup: Setup, parcels: Mapping[int, TensorSpec], station: Station, is_linked: bool | None = None) -> None:
        self._setup, self._parcels, self._station = setup, parcels, station
        self._is_linked = setup.is_gpu if is_linked is None else is_linked
        self._stages: dict[int, CopiedStages] = {}
        shape = setup.shape
        ranks = [[p * shape.num_stages + s for s in range(shape.num_stages)] for p in range(shape.num_pipelines)]
        self._pipeline = [dist.new_group(own) for own in ranks][station.worker.pipeline]
        self._peers = [dist.new_group(list(own)) for own in zip(*ranks, strict=True)][station.worker.stage]
        self._device = torch.device("cuda", 0) if setup.is_gpu else torch.device("cpu")

    def run(self, number: int, side: str, num_iterations: int) -> tuple[list[int], list[float]]:
        """Train: when each iteration ended, and the mean losses of its pipeline if it has the last stage."""
        setup, shape, worker = self._setup, self._setup.shape, self._station.worker
        batches = MicroBatches(setup.text(), shape, setup.samples, SEED)
        links = self._links(number) if self._is_linked else None
        schedule, modules = self._schedule(side, links)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = make_optimizer(parameters)
        has_last = worker.stage == 0 if side == TORCH_ZBV else worker.stage == shape.num_stages - 1
        ends_us: list[int] = []
        losses: list[float] = []
        for iteration in range(num_iterations):
            parts = [batches.get(iteration, worker.pipeline, index) for index in range(shape.num_microbatches)]
            inputs = [torch.cat([x for x, _ in parts]).to(self._device)] if worker.stage == 0 else []
            own: list[Tensor] = []
            given: dict[str, Any] = (
                {"target": torch.cat([y for _, y in parts]).to(self._device), "losses": own} if has_last else {}
            )
            schedule.step(*inputs, **given)
            self._reduce(parameters, links)
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(torch.stack(own).detach().mean())] if own else []
            if links is not None:
                links.settle()
                links.round += 1
            ends_us.append(self._done_us())
        if links is not None:
            links.abort()
            links.close()
        return ends_us, losses

    def _links(self, number: int) -> GlooTransport:
        """Links for twice as many micro-batches and stages, because a worker of a V has two."""
        station, num_chains = self._station, 2 * self._setup.shape.num_chains
        # Wherever the model is cut, what is passed on has the same form.
        parcels = dict.fromkeys(range(2 * self._setup.stages), self._parcels[0])
        address = GroupView(station.worker, station.workers, number)
        if self._setup.is_gpu:
            return CudaIpcTransport(station.store, address, parcels, num_chains, (), TIMEOUT, self._device)
        return GlooTransport(station.store, address, parcels, num_chains, (), TIMEOUT)

    def _schedule(self, side: str, links: GlooTransport | None) -> tuple[Any, list[nn.Module]]:
        # Here, because nobody else needs them, and they take a second to load.
        from torch.distributed.pipelining import schedules

        shape, stage = self._setup.shape, self._station.worker.stage
        num_stages = shape.num_stages * (2 if side == TORCH_ZBV else 1)
        numbers = [stage, num_stages - 1 - stage] if side == TORCH_ZBV else [stage]
        modules = [self._module(num_stages, number) for number in numbers]
        make = _stage_class(links, shape, self._station.worker.pipeline)
        forms = [self._forms(number, num_stages) if links is not None else {} for number in numbers]
        stages = [
            make(module, number, num_stages, self._device, group=self._pipeline, **form)
            for module, number, form in zip(modules, numbers, forms, strict=True)
        ]
        if side == TORCH_1F1B:
            return schedules.Schedule1F1B(stages[0], shape.num_microbatches, loss_fn=_loss), modules
        kind: Callable[..., Any] = (
            schedules.ScheduleZBVZeroBubble if side == TORCH_ZBV else schedules.ScheduleInterleavedZeroBubble
        )
        return kind(stages, shape.num_microbatches, loss_fn=_loss), modules

    def _forms(self, number: int, num_stages: int) -> dict[str, Tensor]:
        """What a stage takes and makes, said beforehand: torch would else ask its neighbours, over gloo."""
        parcel, setup = self._parcels[0], self._setup
        passed = torch.empty(parcel.shape, dtype=parcel.dtype, device=self._device, requires_grad=True)
        ids = torch.zeros(setup.samples, setup.context, dtype=torch.int64, device=self._device)
        size = setup.samples, setup.context, _VOCABULARY
        logits = torch.empty(size, dtype=parcel.dtype, device=self._device, requires_grad=True)
        return {"input_args": ids if number == 0 else passed, "output_args": logits if number == num_stages - 1 else passed}

    def _module(self, num_stages: int, number: int) -> nn.Module:
        """A stage as it is before the first step, where it computes."""
        if num_stages not in self._stages:
            self._stages[num_stages] = CopiedStages(self._setup.modules(num_stages))
        return self._stages[num_stages].make(number).to(self._device)

    def _reduce(self, parameters: Sequence[Tensor], links: GlooTransport | None) -> None:
        """Replace gradients by their mean over the peers, in one go."""
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        total = flat.float()
        if links is not None:
            links.add_over_peers(total)
        else:
            dist.all_reduce(total, group=self._peers)
        flat.copy_(total / self._setup.pipelines)
        parts = torch.split(flat, [own.numel() for own in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)

    def _done_us(self) -> int:
        if self._setup.is_gpu:
            torch.cuda.synchronize()
        return now_us()


_VOCABULARY = 256


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class _Post(NamedTuple):
    """A message of torch's that goes over our links."""

    links: GlooTransport
    message: TensorMessage
    tensor: Tensor
    is_sent: bool

    def begin(self) -> "_Coming":
        if self.is_sent:
            self.links.send(self.message, self.tensor)
        else:
            self.links.expect(self.message)
        return _Coming(self)


class _Coming(NamedTuple):
    """What torch waits for."""

    post: _Post

    def wait(self) -> None:
        """What is sent waits for nobody; what is received is put where torch wants it."""
        if not self.post.is_sent:
            with torch.no_grad():
                self.post.tensor.copy_(self.post.links.receive(self.post.message))


def _use_posts(schedules: Any) -> None:
    """Let torch's schedules begin posts as they begin their own messages."""
    begin_theirs = schedules._batch_p2p

    def begin(ops: Sequence[Any], desc: str | None = None) -> list[Any]:
        return [op.begin() for op in ops] if ops and isinstance(ops[0], _Post) else begin_theirs(ops, desc)

    schedules._batch_p2p = begin


def _stage_class(links: GlooTransport | None, shape: Shape, pipeline: int) -> Any:
    """torch's stage, with its messages over our links if there are any."""
    from torch.distributed.pipelining import PipelineStage, schedules

    class Stage(PipelineStage):
        """A stage that does not greet its neighbours first: in a V one of them is itself, which gloo refuses."""

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return []

    if links is None:
        return Stage
    _use_posts(schedules)

    num_workers, num_chains, num_microbatches = shape.num_stages, shape.num_chains, shape.num_microbatches

    def worker_of(stage: int) -> Worker:
        return Worker(pipeline, stage if stage < num_workers else 2 * num_workers - 1 - stage)

    def posts(ops: Sequence[Any], kind: Kind, stage: int, index: int, is_sent: bool) -> list[_Post]:
        """`stage` is that which gets the message."""
        source = stage - 1 if kind is Kind.F else stage + 1
        chain = pipeline * num_microbatches + index
        if stage >= num_workers:  # of the two stages that a worker of a V has, the second one has chains of its own
            chain += num_chains
        message = TensorMessage(
            kind, stage, chain, worker_of(source), worker_of(stage), made_at=0, taken_at=1, is_of_warm_up=False
        )
        return [_Post(links, message, op.tensor, is_sent) for op in ops]

    class Linked(Stage):
        """A stage whose messages go over our links."""

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
            return posts(super().get_fwd_recv_ops(fwd_chunk_id), Kind.F, self.stage_index, fwd_chunk_id, False)

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return posts(super().get_fwd_send_ops(fwd_chunk_id), Kind.F, self.stage_index + 1, fwd_chunk_id, True)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
            return posts(super().get_bwd_recv_ops(bwd_chunk_id), Kind.I, self.stage_index, bwd_chunk_id, False)

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return posts(super().get_bwd_send_ops(bwd_chunk_id), Kind.I, self.stage_index - 1, bwd_chunk_id, True)

    return Linked
