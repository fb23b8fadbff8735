"""NcclTransport: a transport over NCCL, where every worker has a GPU of its own: tensors and their sums never touch the host.

It cannot deadlock, for two reasons. All that CUDA and NCCL do lazily is done while the transport is made: modules are loaded
eagerly (`prepare_process`), and `_connect` lets every communicator exchange a number. After that, no kernel of NCCL is launched
before all its partners are known to launch theirs without waiting for anything: see `NcclCarrier` for messages; before a sum, the
workers of its group meet over gloo. So the operation that was launched first always ends, and then the next.

A worker takes part in the vote on a step only if the sum and all tensors before it came whole: a communicator that is aborted
leaves its tensors half filled, and says nothing.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.nccl_carrier import NcclCarrier
from recycle.runtime.transport.message_queue import MessageQueue
from recycle.runtime.transport.rendezvous import Rendezvous
from recycle.runtime.transport.specs import GroupView, TransportBroken, TransportSpec

# Until all communicators are aborted, which takes about half a second; after that nobody waits for it.
_ABORT_S = 5.0


def prepare_process(interface: str = "") -> None:
    """Set what CUDA and NCCL read once in a process, before its first use of a GPU. What a user has set stays.

    NCCL's watchdog only cleans up after an error, since the coordinator decides who is dead. Tensors go by `interface`, if given.
    """
    settings = {
        "CUDA_MODULE_LOADING": "EAGER",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "NCCL_SOCKET_IFNAME": interface,
    }
    for name, value in settings.items():
        if value:
            os.environ.setdefault(name, value)


def share_gpus(worker: Worker) -> None:
    """Let this process share its GPU with other ranks, which NCCL refuses to ranks of one host. It must not have used NCCL."""
    os.environ.setdefault("NCCL_HOSTID", f"{worker} {os.getpid()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class NcclTransport:
    """The connections of one worker in one epoch. `senders` are the workers whose messages it receives."""

    def __init__(self, store: Any, view: GroupView, spec: TransportSpec, senders: Iterable[Worker], device: torch.device) -> None:
        self._store, self._view, self._spec, self._device = store, view, spec, device
        self._groups: list[Any] = []
        self._aborting: list[threading.Thread] = []
        self._ending = threading.Lock()
        self._directions: dict[Kind, Any] = {}
        self.host = GlooGroups(store, view, spec)
        self._carrier = NcclCarrier(self._directions, self.host, view, spec, device, senders)
        self.messages = MessageQueue(view, spec, self.host, self._carrier)
        if isinstance(store, Rendezvous):
            store.on_abort(self.abort)  # a worker may die while the others make their communicators
        self.host.add_sum_groups()
        sum_groups = view.sum_groups(spec.ties).items()
        self._sums = {tie: self._make(name, members) for tie, (name, members) in sum_groups if len(members) > 1}
        self._directions |= {kind: self._make(f"way{kind.value}", view.workers) for kind in (Kind.F, Kind.I)}
        self._connect()
        self._carrier.start()

    def _make(self, name: str, members: Sequence[Worker]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._spec.timeout
        prefix = dist.PrefixStore(f"e{self._view.epoch}/nccl/{name}", self._store)  # type: ignore[attr-defined]
        with self._ending:
            if self.host.is_aborted:
                raise TransportBroken("the epoch is over")
            group = dist.ProcessGroupNCCL(prefix, members.index(self._view.worker), len(members), options)
            self._groups.append(group)
        return group

    def _connect(self) -> None:
        """Let every communicator exchange a number: each is made at its first use, and the host waits for that.

        All workers use them in one order: the sums by name, then the neighbours of each direction by their places.
        """
        own, workers = self._view.worker, self._view.workers
        rank = {other: number for number, other in enumerate(workers)}
        number = torch.zeros(1, device=self._device)
        for tie, (_, _) in sorted(self._view.sum_groups(self._spec.ties).items(), key=lambda item: item[1][0]):
            if tie in self._sums:
                _wait(self.host.begin(self._sums[tie].allreduce, [number], dist.AllreduceOptions()))
        for lower, upper in sorted((lower, upper) for lower in workers for upper in workers if upper.stage == lower.stage + 1):
            if own in (lower, upper):
                for kind, sender, receiver in ((Kind.F, lower, upper), (Kind.I, upper, lower)):
                    group = self._directions[kind]
                    operation = (group.send, rank[receiver]) if own == sender else (group.recv, rank[sender])
                    _wait(self.host.begin(operation[0], [number], operation[1], 0))
        self._synchronize()
        if self.host.is_aborted:
            raise TransportBroken("the epoch is over")

    def _synchronize(self) -> None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        done.synchronize()

    def all_reduce(self, tensor: Tensor, tie: Tie | None = None) -> None:
        if tie in self._sums:
            self.host.all_reduce(torch.zeros(1), tie)  # all are here, and launch the sum now
            work = self.host.begin(self._sums[tie].allreduce, [tensor], dist.AllreduceOptions())
            _wait(work)
        self._synchronize()
        if self.host.is_aborted or (tie in self._sums and not work.is_success()):
            raise TransportBroken("a sum did not come whole")
        self._carrier.refuse_failed()

    def abort(self) -> None:
        """Abort every group, each in a thread: a group that is left would wait for another one, and each may take its time."""
        self.host.abort()
        with self._ending:
            groups, self._groups = self._groups, []
            for group in groups:
                self._aborting.append(threading.Thread(target=_abort, args=(group,), name="nccl abort", daemon=True))
                self._aborting[-1].start()
        self._carrier.abort()

    def close(self) -> None:
        """Drop the groups of an aborted transport, in a thread; wait for a while until their memory is free."""
        self.messages.close()
        self._carrier.close()
        groups = [*self._sums.values(), *self._directions.values()]
        self._sums.clear()
        self._directions.clear()
        closing = threading.Thread(target=_drop, args=(groups, self._aborting), name="nccl close", daemon=True)
        closing.start()
        self.host.close()
        closing.join(_ABORT_S)


def _wait(work: Any) -> None:
    """Make the GPU wait for an operation."""
    try:
        work.wait()
    except RuntimeError as problem:
        raise TransportBroken(str(problem)) from None


def _abort(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def _drop(groups: list[Any], aborting: Iterable[threading.Thread]) -> None:
    for thread in aborting:
        thread.join()
    groups.clear()
