"""NcclTransport: a transport over NCCL, where every worker has a GPU of its own: tensors and their sums never touch the host.

It cannot deadlock, for two reasons. All that CUDA and NCCL do lazily is done while the transport is made: modules are loaded
eagerly (`prepare_process`), and `_connect` lets every communicator exchange a number. After that, no kernel of NCCL is launched
before all its partners are known to launch theirs without waiting for anything: see `NcclCarrier` for messages; before a sum, the
workers of its group have computed their parts, and meet over gloo. So the operation that was launched first always ends, and then
the next. Sums and messages do not wait for each other: who sums an iteration has received all its messages, and those of the next
one are sent and received by other threads.

A communicator that is aborted leaves its tensors half filled, and says nothing. So a worker waits until the GPU has a tensor, and
then looks whether the epoch is over; nobody else aborts communicators.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.host.free_memory import return_free_memory
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.nccl_carrier import NcclCarrier, wait_on_host
from recycle.runtime.transport.gpu.nccl_group import NcclGroup
from recycle.runtime.transport.message_queue import MessageQueue
from recycle.runtime.transport.reducer import Reducer
from recycle.runtime.transport.rendezvous import Rendezvous
from recycle.runtime.transport.specs import GroupView, MessageLink, TransportBroken, TransportSpec

# Until all communicators are aborted, which takes about half a second; after that nobody waits for it.
_ABORT_S = 5.0
_MEETINGS, _ONE_BYTE = 2**20, torch.zeros(1, dtype=torch.uint8)


def prepare_process(interface: str = "") -> None:
    """Set what CUDA and NCCL read once in a process, before its first use of a GPU. What a user has set stays.

    Only this code aborts a communicator: torch's watchdog would do so without a word, and the worker would go on with tensors
    that are half filled; it would also wait for a minute, to write down what happened. Tensors go by `interface`, if given.
    """
    settings = {
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # else streams wait for each other
        "NCCL_RUNTIME_CONNECT": "0",  # connect when a communicator is made, not at the first large sum
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_FR_BUFFER_SIZE": "0",
        "NCCL_SOCKET_IFNAME": f"={interface}" if interface else "",
    }
    for name, value in settings.items():
        if value:
            os.environ.setdefault(name, value)


def share_gpus(worker: Worker, is_one_machine: bool) -> None:
    """Let this process share its GPU with other ranks, which NCCL refuses to ranks of one host. It must not have used NCCL."""
    os.environ.setdefault("NCCL_HOSTID", f"{worker} {os.getpid()}")
    if is_one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class NcclTransport:
    """The connections of one worker in one epoch. `links` are those by which it sends and receives messages."""

    def __init__(
        self,
        store: Any,
        view: GroupView,
        spec: TransportSpec,
        links: Iterable[MessageLink],
        device: torch.device,
        make_group: Callable[..., NcclGroup] = NcclGroup,
    ) -> None:
        self._store, self._view, self._spec, self._device, self._make_group = store, view, spec, device, make_group
        self._groups: list[NcclGroup] = []
        self._sums: dict[Tie | None, NcclGroup] = {}
        self._directions: dict[Kind, NcclGroup] = {}
        self._aborting: list[threading.Thread] = []
        self._ending = threading.Lock()
        self.host = GlooGroups(store, view, spec)
        links = sorted(links, key=lambda link: (link.kind.value, link.sender, link.receiver))
        senders = sorted({link.sender for link in links if link.receiver == view.worker})
        self.reducer = Reducer(self._add, self.host, view, spec)
        self._carrier = NcclCarrier(self._directions, self.host, view, spec, device, senders, self.reducer)
        self.messages = MessageQueue(view, spec, self.host, self._carrier)
        if isinstance(store, Rendezvous):
            store.on_abort(self.abort)  # a worker may die while the others make their communicators
        try:
            for tie, (name, members) in sorted(view.sum_groups(spec.ties).items(), key=lambda item: item[1][0]):
                if len(members) > 1:
                    self._sums[tie] = self._make(name, members)
            for kind in (Kind.F, Kind.I):  # each has streams of its own, from two pools
                self._directions[kind] = self._make(f"way{kind.value}", view.workers, has_priority=kind is Kind.I)
            self._connect(links)
            self._carrier.start()
        except BaseException:
            self.abort()
            self.close()
            raise

    def _make(self, name: str, members: Sequence[Worker], has_priority: bool = False) -> NcclGroup:
        prefix = dist.PrefixStore(f"e{self._view.epoch}/nccl/{name}", self._store)  # type: ignore[attr-defined]
        with self._ending:
            if self.host.is_aborted:
                raise TransportBroken("the epoch is over")
            group = self._make_group(prefix, members.index(self._view.worker), len(members), self._spec.timeout, has_priority)
            self._groups.append(group)
        return group

    def _connect(self, links: Sequence[MessageLink]) -> None:
        """Let every communicator exchange a number: each is made at its first use, and the host waits for that.

        All workers use them in one order. Those that will use one meet over gloo before: a communicator that is being made
        cannot be aborted.
        """
        rank = {other: number for number, other in enumerate(self._view.workers)}
        number, own = torch.zeros(1, device=self._device), self._view.worker
        for tie, group in self._sums.items():
            self.host.meet(tie)
            self._finish(self.host.begin(group.allreduce, number))
        for link in links:
            other = link.receiver if own == link.sender else link.sender
            sends, receives = partial(self.host.send_bytes, other, _ONE_BYTE), partial(self.host.receive_bytes, other, 1)
            for meet in (sends, receives) if own == link.sender else (receives, sends):
                meet(tag=_MEETINGS + _meeting_tag(link, rank))
            group = self._directions[link.kind]
            self._finish(self.host.begin(group.send if own == link.sender else group.recv, [number], rank[other], 0))
        self._spec.activity.wait_for("all")  # as before: the waits above have said something else

    def _finish(self, work: Any) -> None:
        """Wait until the GPU has done an operation, and see that nobody aborted it."""
        try:
            wait_on_host(work, self._device, "wait for a sum")
        except RuntimeError as problem:
            raise TransportBroken(str(problem)) from None
        if self.host.is_aborted:
            raise TransportBroken("the epoch is over")

    def _add(self, tensor: Tensor, tie: Tie | None) -> None:
        if tie in self._sums:
            self.reducer.meet(tie)  # all are here, and launch the sum now
            with self.reducer.writing(tensor):
                self._finish(self.host.begin(self._sums[tie].allreduce, tensor))

    def abort(self) -> None:
        """Abort every group, each in a thread: a group that is left would wait for another one, and each may take its time."""
        self._carrier.abort()  # first: a connection that is closed would be taken for the reason
        self.reducer.abort()
        self.host.abort()
        with self._ending:
            threads = [threading.Thread(target=group.abort, name="nccl abort", daemon=True) for group in self._groups]
            self._aborting += threads
            for thread in threads:
                thread.start()

    def close(self) -> None:
        """Drop the groups of an aborted transport, in a thread; wait for a while until their memory is free."""
        self.messages.close()
        self._carrier.close()
        self.reducer.close()
        self._sums.clear()
        self._directions.clear()
        with self._ending:
            groups, self._groups = self._groups, []
        closing = threading.Thread(target=_drop, args=(groups, self._aborting), name="nccl close", daemon=True)
        closing.start()
        self.host.close()
        closing.join(_ABORT_S)


def _meeting_tag(link: MessageLink, rank: Mapping[Worker, int]) -> int:
    """A number that differs for all links."""
    return (rank[link.sender] * len(rank) + rank[link.receiver]) * 2 + (link.kind is Kind.I)


def _drop(groups: list[NcclGroup], aborting: Sequence[threading.Thread]) -> None:
    for thread in aborting:
        thread.join()
    groups.clear()
    return_free_memory()  # the threads of a communicator leave tens of MiB behind
