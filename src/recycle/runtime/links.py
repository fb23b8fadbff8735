"""Links between processes: one gloo group of all live workers and one for each stage's peers, made fresh for an epoch.

Groups are objects under a prefix of the store, never torch's global ones, so that an epoch's groups can be dropped and others
made. A message is sent without waiting; what was sent is kept until its receiver must have taken it, an iteration later, so that
no stage waits for another at the end of its own iteration.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.executor import Message

# Messages of so many iterations may be on their way at once: stages run at most one iteration apart.
_ITERATIONS = 4


@dataclass(frozen=True, slots=True)
class Parcel:
    """The form of what a stage sends on: the gradient that comes back has the same."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class GlooLinks:
    """The links of one worker in one epoch. `workers` are all live ones, in the same order everywhere."""

    def __init__(
        self,
        store: Any,
        epoch: int,
        worker: Worker,
        workers: Sequence[Worker],
        parcels: Mapping[int, Parcel],
        num_chains: int,
        timeout: timedelta,
    ) -> None:
        self._rank = {other: number for number, other in enumerate(workers)}
        self._parcels, self._num_chains = parcels, num_chains
        self._sent: deque[tuple[int, Any, Tensor]] = deque()
        self._all = _group(store, f"e{epoch}/all", self._rank[worker], len(workers), timeout)
        peers = [other for other in workers if other.stage == worker.stage]
        self._peers = _group(store, f"e{epoch}/stage{worker.stage}", peers.index(worker), len(peers), timeout)

    def send(self, message: Message, tensor: Tensor, to: Worker) -> None:
        body = tensor.detach().contiguous()
        work = self._all.send([body], self._rank[to], self._tag(message))
        self._sent.append((message.iteration, work, body))

    def receive(self, message: Message, sender: Worker) -> Tensor:
        # What reaches a stage forwards was made by the stage before; what comes back is as large as what it made itself.
        parcel = self._parcels[message.stage - 1 if message.kind is Kind.F else message.stage]
        body = torch.empty(parcel.shape, dtype=parcel.dtype)
        self._all.recv([body], self._rank[sender], self._tag(message)).wait()
        return body

    def settle(self, iteration: int) -> None:
        """Wait until everything sent in iterations before `iteration` was taken, and let go of it."""
        while self._sent and self._sent[0][0] < iteration:
            _, work, _ = self._sent.popleft()
            work.wait()

    def add_over_peers(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the peers of the stage."""
        for tensor in tensors:
            self._peers.allreduce([tensor]).wait()

    def add_over_all(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all live workers."""
        self._all.allreduce([tensor]).wait()

    def _tag(self, message: Message) -> int:
        """A number that tells apart all messages between two workers that can be on their way at once."""
        direction = 0 if message.kind is Kind.F else 1
        return (message.iteration % _ITERATIONS * 2 + direction) * self._num_chains + message.chain


def _group(store: Any, prefix: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of its own; torch's stubs do not say what it can do."""
    return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, size, timeout)  # type: ignore[attr-defined]
