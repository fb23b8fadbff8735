"""GlooGroups: the gloo process groups of one worker in one epoch, with all-reduce and bulk bytes in host memory.

Groups are objects under a prefix of the store, never torch's global ones, so that the groups of an epoch can be dropped and new
ones made. Every transport owns a group of all live workers; `add_sum_groups` adds the groups for sums that go through the host.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.specs import GroupView, TransportBroken, TransportSpec
from recycle.runtime.transport.wait_thread import GlooWork, WaitThread

# No message has this tag: a wait for one expires, and gloo then closes all connections of the group.
_NEVER_SENT = 2**31 - 1
_BULK_TAGS = 2**30
_AT_ONCE = timedelta(milliseconds=1)
# Until a connection is made. gloo tries five times; `make_unless_over` does not wait for that if the epoch is over or a link cut.
_CONNECT = timedelta(seconds=2)
_CLOSE_S = 1.0


class GlooGroups:
    """The gloo groups of one worker. `begin` and `wait` also serve operations of other backends in the epoch."""

    def __init__(self, store: Any, view: GroupView, spec: TransportSpec) -> None:
        self.is_aborted = False
        self._store, self._view, self._spec = store, view, spec
        self._rank = {other: number for number, other in enumerate(view.workers)}
        self._options = dist.AllreduceOptions()
        self._options.timeout = spec.timeout
        self._all = self._make("all", view.workers)
        self._sums: dict[Tie | None, Any] = {}
        self._waits = WaitThread()
        # Whoever drops a group last waits for its destructor: no thread that aborts may be left with one when another closes.
        self._ending = threading.Lock()

    def add_sum_groups(self) -> None:
        """Make the groups that sum gradients through the host."""
        for tie, (name, members) in self._view.sum_groups(self._spec.ties).items():
            self._sums[tie] = self._make(name, members)

    def _make(self, name: str, members: Sequence[Worker]) -> Any:
        # torch's stubs do not know a PrefixStore.
        prefix = dist.PrefixStore(f"e{self._view.epoch}/{name}", self._store)  # type: ignore[attr-defined]
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = min(_CONNECT, self._spec.timeout)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._spec.host)]
            return dist.ProcessGroupGloo(prefix, members.index(self._view.worker), len(members), options)
        except RuntimeError as problem:
            raise TransportBroken(f"the group {name} could not be made: {problem}") from None

    def begin(self, operation: Callable[..., Any], *args: Any) -> Any:
        """Begin an asynchronous operation of a process group, and return its work."""
        if self.is_aborted:
            raise TransportBroken("the epoch is over")
        try:
            return operation(*args)
        except RuntimeError as problem:
            raise TransportBroken(str(problem)) from None

    def wait(self, work: Any, workers: str) -> None:
        """Wait for an operation that was begun, with these other workers."""
        self._spec.activity.wait_for(workers)
        try:
            work.wait(self._spec.timeout)
        except RuntimeError as problem:
            raise TransportBroken(f"{problem} (with {workers})") from None
        finally:
            self._spec.activity.go_on()
        if self.is_aborted:
            raise TransportBroken("the epoch is over")

    def begin_send(self, body: Tensor, receiver: Worker, tag: int) -> GlooWork:
        return GlooWork(self.begin(self._all.send, [body], self._rank[receiver], tag), self._waits)

    def begin_receive(self, body: Tensor, sender: Worker, tag: int) -> GlooWork:
        return GlooWork(self.begin(self._all.recv, [body], self._rank[sender], tag), self._waits)

    def send_bytes(self, receiver: Worker, body: Tensor, tag: int) -> None:
        """Send bytes, and return when they were taken."""
        self.wait(self.begin_send(body, receiver, _BULK_TAGS + tag), str(receiver))

    def receive_bytes(self, sender: Worker, size_bytes: int, tag: int) -> Tensor:
        body = torch.empty(size_bytes, dtype=torch.uint8)
        self.wait(self.begin_receive(body, sender, _BULK_TAGS + tag), str(sender))
        return body

    def begin_all_reduce(self, tensor: Tensor, group: Any = None) -> GlooWork:
        """Begin to sum a tensor over all live workers, or over `group`; `wait` ends it."""
        return GlooWork(self.begin((group or self._all).allreduce, [tensor], self._options), self._waits)

    def meet(self, tie: Tie | None = None) -> None:
        """Wait until all peers of the stage, or all workers of a tie, are here."""
        self.wait(self.begin_all_reduce(torch.zeros(1), self._sums[tie]), self._view.others_in_sum(tie))

    def add(self, tensor: Tensor, tie: Tie | None = None) -> None:
        """Sum a tensor in host memory over the peers of the stage, or over the workers of a tie.

        This is for a thread that nobody waits for when the epoch is over: gloo may lose an error, and wait for its timeout.
        """
        work = self.begin(self._sums[tie].allreduce, [tensor], self._options)
        try:
            work.wait(self._spec.timeout)
        except RuntimeError as problem:
            raise TransportBroken(f"{problem} (with {self._view.others_in_sum(tie)})") from None
        if self.is_aborted:
            raise TransportBroken("the epoch is over")

    def abort(self) -> None:
        """Make every wait on these groups fail, in this process and in the others.

        The wait of this process ends at once, but gloo takes some 50 ms to close a group: a thread for each group does that.
        """
        with self._ending:
            if self.is_aborted:
                return
            self.is_aborted = True
            self._waits.abort()
            for group in (self._all, *self._sums.values()):
                if group is not None and group.size() > 1:
                    threading.Thread(target=_close_connections, args=(group,), name="transport abort", daemon=True).start()
            group = None  # the last reference, if another thread closes meanwhile

    def close(self) -> None:
        """Drop the groups, in a thread: the destructor of a group waits for operations whose error gloo has lost."""
        self._waits.close()
        with self._ending:
            groups, self._all, self._sums = [self._all, *self._sums.values()], None, {}
        closing = threading.Thread(target=groups.clear, name="transport close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _close_connections(group: Any) -> None:
    """Let a wait expire on the first connection that still stands: gloo then closes all of the group."""
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _NEVER_SENT).wait(_AT_ONCE)
