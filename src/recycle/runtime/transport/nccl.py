"""Links over NCCL, where every worker has a GPU of its own: activations, gradients and their sums never touch the host.

Written against NCCL's and torch's documentation; it needs two GPUs, and was not run on any. What NCCL asks for:

- Messages have no tags. What one rank sends another arrives in the order of the sends, so receives are posted in the order of
  the sender's row, whatever the order in which they are used.
- A send waits, on the GPU, for its receive. Two ranks that send each other something over one communicator would wait for ever;
  so activations and gradients have one each, on which a pair of workers talks in one direction only.
- The verdict on a step stays with gloo: it is a few numbers in host memory, and must not wait for a GPU.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.execute.row_program import Instruction, TensorMessage
from recycle.runtime.transport.gloo import GlooTransport, GroupView, TensorSpec


class NcclTransport(GlooTransport):
    """The links of one worker in one epoch. `turns` are its own: they say in which order its messages come."""

    def __init__(
        self,
        store: Any,
        address: GroupView,
        parcels: Mapping[int, TensorSpec],
        num_chains: int,
        ties: Sequence[Tie],
        timeout: timedelta,
        turns: Sequence[Instruction],
        device: torch.device,
        host: str = "127.0.0.1",
    ) -> None:
        self._device = device
        super().__init__(store, address, parcels, num_chains, ties, timeout, host)
        self._ways = {kind: self._nccl(store, f"way{kind.value}", address.workers) for kind in (Kind.F, Kind.I)}
        taken = [turn.takes for turn in turns if turn.takes is not None]
        self._order: dict[tuple[Worker, Kind], list[TensorMessage]] = {}
        for message in sorted(taken, key=lambda one: one.made_at):
            self._order.setdefault((message.sender, message.kind), []).append(message)
        self._num_posted: dict[tuple[Worker, Kind], int] = {}
        self._posted_round = -1
        self._greet()

    def _greet(self) -> None:
        """Exchange a number with every neighbour, both ways, all pairs in one order.

        Two ranks make their communicator at their first message, and the host waits for that: a receive that is posted ahead
        would keep its worker from the very op that the sender waits for.
        """
        own, workers = self._address.worker, self._address.workers
        pairs = sorted((lower, upper) for lower in workers for upper in workers if upper.stage == lower.stage + 1)
        for lower, upper in pairs:
            if own not in (lower, upper):
                continue
            other, number = (upper, lower)[own == upper], torch.zeros(1, device=self._device)
            for kind, sender in ((Kind.F, lower), (Kind.I, upper)):
                way = self._ways[kind]
                (way.send if own == sender else way.recv)([number], self._rank[other], 0).wait()
        torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        """NCCL's groups can be aborted for themselves; all of them must be, or one waits for another."""
        if self._is_aborted:
            return
        super().abort()
        for group in (self._peers, *self._ties.values(), *self._ways.values()):
            group.abort()

    def _groups(self) -> list[Any]:
        return [self._all]

    def blank(self, message: TensorMessage) -> Tensor:
        return super().blank(message).to(self._device)

    def _group(self, store: Any, name: str, members: Sequence[Worker]) -> Any:
        """Sums go over NCCL, what concerns all workers over gloo."""
        return super()._group(store, name, members) if name == "all" else self._nccl(store, name, members)

    def _nccl(self, store: Any, name: str, members: Sequence[Worker]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        prefix = dist.PrefixStore(f"e{self._address.epoch}/nccl/{name}", store)  # type: ignore[attr-defined]
        return dist.ProcessGroupNCCL(prefix, members.index(self._address.worker), len(members), options)

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        self._refuse_other_form(message, tensor)
        body = tensor.detach().contiguous()
        self._keep(message, self._ways[message.kind].send([body], self._rank[message.receiver], 0), body)

    def expect(self, message: TensorMessage) -> None:
        """Post the receive, and before it those of all that its sender makes earlier."""
        if self._posted_round != self.round:
            self._posted_round = self.round
            self._num_posted = dict.fromkeys(self._order, 0)
        way = message.sender, message.kind
        order = self._order[way]
        while message not in self._expected:
            earlier = order[self._num_posted[way]]
            self._num_posted[way] += 1
            parcel = self._parcel(earlier)
            body = torch.empty(parcel.shape, dtype=parcel.dtype, device=self._device)
            self._expected[earlier] = self._ways[earlier.kind].recv([body], self._rank[earlier.sender], 0), body
