"""NcclTransport: a transport over NCCL, where every worker has a GPU of its own: tensors and their sums never touch the host.

Written against NCCL's and torch's documentation; it needs two GPUs, and was not run on any. NCCL's constraints:

- Messages have no tags. The sends of one rank to another arrive in their order, so receives are posted in the order of the
  sender's row, whatever the order in which they are used.
- A send waits, on the GPU, for its receive. Two ranks that send to each other over one communicator would wait for ever; so
  activations and gradients have one each, on which a pair of workers communicates in one direction only.
- The ballot on a step stays with gloo: it is a few numbers in host memory, and must not wait for a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.message_queue import MessageQueue, Posted
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportSpec


class NcclTransport:
    """The connections of one worker in one epoch. `incoming` are all messages that it receives in an iteration."""

    def __init__(
        self, store: Any, view: GroupView, spec: TransportSpec, incoming: Sequence[TensorMessage], device: torch.device
    ) -> None:
        self.host, self._view = GlooGroups(store, view, spec), view

        def make_group(name: str, members: Sequence[Worker]) -> Any:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = spec.timeout
            prefix = dist.PrefixStore(f"e{view.epoch}/nccl/{name}", store)  # type: ignore[attr-defined]
            return dist.ProcessGroupNCCL(prefix, members.index(view.worker), len(members), options)

        self._sums = {tie: make_group(name, members) for tie, (name, members) in view.sum_groups(spec.ties).items()}
        self._directions = {kind: make_group(f"way{kind.value}", view.workers) for kind in (Kind.F, Kind.I)}
        carrier = NcclCarrier(self._directions, view, spec, incoming, device)
        self.messages = MessageQueue(view, spec, self.host, carrier)
        carrier.connect()

    def all_reduce(self, tensor: Tensor, tie: Tie | None = None) -> None:
        work = self.host.begin(self._sums[tie].allreduce, [tensor], dist.AllreduceOptions())
        self.host.wait(work, self._view.others_in_sum(tie))

    def abort(self) -> None:
        """Abort every group: an NCCL group that is left would wait for another one."""
        if self.host.is_aborted:
            return
        self.host.abort()
        for group in (*self._sums.values(), *self._directions.values()):
            group.abort()

    def close(self) -> None:
        self.messages.close()
        self.host.close()
        self._sums.clear()


class NcclCarrier:
    """Sends tensors from GPU to GPU, over one communicator for each direction (F: forwards, I: backwards)."""

    def __init__(
        self,
        directions: Mapping[Kind, Any],
        view: GroupView,
        spec: TransportSpec,
        incoming: Sequence[TensorMessage],
        device: torch.device,
    ) -> None:
        self.device = device
        self._directions, self._view, self._spec = directions, view, spec
        self._rank = {other: number for number, other in enumerate(view.workers)}
        self._order: dict[tuple[Worker, Kind], list[TensorMessage]] = {}
        for message in sorted(incoming, key=lambda one: one.made_at):
            self._order.setdefault((message.sender, message.kind), []).append(message)
        self._num_posted: dict[tuple[Worker, Kind], int] = {}
        self._posted_round = -1

    def connect(self) -> None:
        """Exchange a number with every neighbour, in both directions, all pairs in one order.

        Two ranks make their communicator at their first message, and the host waits for that: a receive that is posted ahead
        would keep its worker from the very op that the sender waits for.
        """
        own, workers = self._view.worker, self._view.workers
        pairs = sorted((lower, upper) for lower in workers for upper in workers if upper.stage == lower.stage + 1)
        for lower, upper in pairs:
            if own not in (lower, upper):
                continue
            other, number = (upper, lower)[own == upper], torch.zeros(1, device=self.device)
            for kind, sender in ((Kind.F, lower), (Kind.I, upper)):
                group = self._directions[kind]
                (group.send if own == sender else group.recv)([number], self._rank[other], 0).wait()
        torch.cuda.synchronize(self.device)

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted:
        body = tensor.detach().contiguous()
        return Posted(self._directions[message.kind].send([body], self._rank[message.receiver], 0), body)

    def post_receives(self, message: TensorMessage, round_: int) -> dict[TensorMessage, Posted]:
        """Post the receive, and before it those of all messages that its sender makes earlier."""
        if self._posted_round != round_:
            self._posted_round = round_
            self._num_posted = dict.fromkeys(self._order, 0)
        key = message.sender, message.kind
        posted: dict[TensorMessage, Posted] = {}
        while message not in posted:
            earlier = self._order[key][self._num_posted[key]]
            self._num_posted[key] += 1
            spec = self._spec.tensor_spec(earlier)
            body = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            posted[earlier] = Posted(self._directions[earlier.kind].recv([body], self._rank[earlier.sender], 0), body)
        return posted

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        return body
