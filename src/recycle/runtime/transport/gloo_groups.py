"""GlooGroups: the gloo process groups of one worker in one epoch, with sums, votes and bulk bytes in host memory.

Groups are objects under a prefix of the store, never torch's global ones, so that the groups of an epoch can be dropped and new
ones made. There is one of all live workers, and one for each sum: of the peers of a stage, or of the workers of a tie.

A group connects nobody by itself (gloo's lazy mode). A worker connects to those with which it exchanges something: in the group
of all to `GroupView.linked`, in the others to the worker before it and the one after it, since gloo sums along a ring. So the
connections of a worker grow with its partners, not with the cluster. All are made before the groups are used: gloo cannot abort
a group that is about to connect two workers.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.specs import GroupView, TransportBroken, TransportSpec
from recycle.runtime.transport.wait_thread import GlooVote, GlooWork, WaitThread

# No message has this tag: a wait for one expires, and gloo then closes all connections of the group.
_NEVER_SENT = 2**31 - 1
_BULK_TAGS = 2**30
_AT_ONCE = timedelta(milliseconds=1)
_VOTE_TAG, _RESULT_TAG = 2**31 - 2, 2**31 - 3
# Until a connection is made. gloo tries five times; `make_unless_over` does not wait for that if the epoch is over or a link cut.
_CONNECT = timedelta(seconds=2)
_FIRST_SUM = 5 * _CONNECT
_CLOSE_S = 1.0


class _Group(NamedTuple):
    """A process group, and the ranks in it to which this worker is connected."""

    backend: Any
    connected: Sequence[int]


class GlooGroups:
    """The gloo groups of one worker. `begin` and `wait` also serve operations of other backends in the epoch."""

    def __init__(self, store: Any, view: GroupView, spec: TransportSpec) -> None:
        self.is_aborted = False
        self._store, self._view, self._spec = store, view, spec
        self._rank = {other: number for number, other in enumerate(view.workers)}
        self._options = dist.AllreduceOptions()
        self._options.timeout = spec.timeout
        self._all: _Group | None = None
        self._sums: dict[Tie | None, _Group] = {}
        self._waits, self._votes = WaitThread(), WaitThread()
        # Whoever drops a group last waits for its destructor: no thread that aborts may be left with one when another closes.
        self._ending = threading.Lock()
        try:
            self._make_all()
            self._connect_all()
        except TransportBroken:
            self._drop()  # nobody waits for it: threads of gloo may still try to connect
            raise

    def _make_all(self) -> None:
        """Make the groups, and ask for the addresses in them to which this worker connects."""
        view = self._view
        self._all = self._make("all", view.workers, view.linked)
        keys = self._keys("all", self._all)
        for tie, (name, members) in view.sum_groups(self._spec.ties).items():
            self._sums[tie] = self._make(name, members, view.beside(members))
            keys += self._keys(name, self._sums[tie])
        if hasattr(self._store, "ask_for"):  # in one message: gloo would ask for one after the other
            self._store.ask_for(keys)

    def _keys(self, name: str, group: _Group) -> list[str]:
        """The keys under which torch stores the addresses of a group, on its first and only device."""
        return [f"{self._prefix(name)}/0/{rank}" for rank in group.connected]

    def _prefix(self, name: str) -> str:
        return f"e{self._view.epoch}/{name}"

    def _connect_all(self) -> None:
        """Connect the groups. A thread of gloo connects each ring, for a first sum; this thread connects the group of all.

        A receive is begun when its connection is made. All begin theirs in the order of the workers: of the connections that are
        still to be made, both ends of the first one are at it, so that nobody waits in a circle.
        """
        assert self._all is not None
        with _unless_broken("the workers could not be connected"):
            sums = [group.backend.allreduce([torch.zeros(1)], self._options) for group in self._sums.values()]
            for rank in self._all.connected:
                self._all.backend.recv([torch.empty(1)], rank, _NEVER_SENT)
            for work in sums:
                work.wait(min(_FIRST_SUM, self._spec.timeout))

    def _make(self, name: str, members: Sequence[Worker], others: Sequence[Worker]) -> _Group:
        """Make a group in which this worker will connect to some others."""
        # torch's stubs do not know a PrefixStore.
        prefix = dist.PrefixStore(self._prefix(name), self._store)  # type: ignore[attr-defined]
        with _unless_broken(f"the group {name} could not be made"):
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = min(_CONNECT, self._spec.timeout)
            options._threads = 1  # it runs one sum at a time
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._spec.host, lazy_init=True)]
            backend = dist.ProcessGroupGloo(prefix, members.index(self._view.worker), len(members), options)
        return _Group(backend, [members.index(other) for other in others])

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
        return GlooWork(self._begin_between("send", body, receiver, tag), self._waits)

    def begin_receive(self, body: Tensor, sender: Worker, tag: int) -> GlooWork:
        return GlooWork(self._begin_between("recv", body, sender, tag), self._waits)

    def _begin_between(self, kind: str, body: Tensor, other: Worker, tag: int) -> Any:
        """Begin to send to, or to receive from, a worker to which this one is connected."""
        group, rank = self._all, self._rank[other]
        if group is None:
            raise TransportBroken("the epoch is over")
        assert rank in group.connected, f"{self._view.worker} is not connected to {other}, with which its plan exchanges nothing"
        return self.begin(getattr(group.backend, kind), [body], rank, tag)

    def send_bytes(self, receiver: Worker, body: Tensor, tag: int) -> None:
        """Send bytes, and return when they were taken."""
        self.wait(self.begin_send(body, receiver, _BULK_TAGS + tag), str(receiver))

    def receive_bytes(self, sender: Worker, size_bytes: int, tag: int) -> Tensor:
        body = torch.empty(size_bytes, dtype=torch.uint8)
        self.wait(self.begin_receive(body, sender, _BULK_TAGS + tag), str(sender))
        return body

    def meet(self, tie: Tie | None = None) -> None:
        """Wait until all peers of the stage, or all workers of a tie, are here."""
        work = self.begin(self._sums[tie].backend.allreduce, [torch.zeros(1)], self._options)
        self.wait(GlooWork(work, self._waits), self._view.others_in_sum(tie))

    def add(self, tensor: Tensor, tie: Tie | None = None) -> None:
        """Sum a tensor in host memory over the peers of the stage, or over the workers of a tie.

        This is for a thread that nobody waits for when the epoch is over: gloo may lose an error, and wait for its timeout.
        """
        work = self.begin(self._sums[tie].backend.allreduce, [tensor], self._options)
        try:
            work.wait(self._spec.timeout)
        except RuntimeError as problem:
            raise TransportBroken(f"{problem} (with {self._view.others_in_sum(tie)})") from None
        if self.is_aborted:
            raise TransportBroken("the epoch is over")

    def begin_vote(self, values: Tensor) -> GlooVote:
        """Begin to sum a few numbers over all live workers, in a thread; `wait` ends it.

        The order of the sum depends on the workers: vote on numbers that only one worker has, or on small whole ones.
        """
        if self.is_aborted or self._all is None:
            raise TransportBroken("the epoch is over")
        ranks = [self._rank[child] for child in self._view.children]
        parent = self._rank[self._view.parent] if self._view.parent is not None else None
        self._votes.begin(_TreeSum(self._all.backend, values, parent, ranks), self._spec.timeout)
        return GlooVote(self._votes)

    def abort(self) -> None:
        """Make every wait on these groups fail, in this process and in the others.

        The wait of this process ends at once, but gloo takes some 50 ms to close a group: a thread for each group does that.
        """
        with self._ending:
            if self.is_aborted:
                return
            self.is_aborted = True
            self._waits.abort()
            self._votes.abort()
            for group in (self._all, *self._sums.values()):
                if group is not None and group.connected:
                    threading.Thread(target=_close_connections, args=group, name="transport abort", daemon=True).start()
            group = None  # the last reference, if another thread closes meanwhile

    def close(self) -> None:
        """Drop the groups, in a thread: the destructor of a group waits for operations whose error gloo has lost."""
        self._waits.close()
        self._votes.close()
        self._drop().join(_CLOSE_S)

    def _drop(self) -> threading.Thread:
        with self._ending:
            groups, self._all, self._sums = [self._all, *self._sums.values()], None, {}
        closing = threading.Thread(target=groups.clear, name="transport close", daemon=True)
        closing.start()
        return closing


class _TreeSum(NamedTuple):
    """The sum of a few numbers over all workers: up a tree to its root, and down again. The result replaces the numbers."""

    backend: Any
    values: Tensor
    parent: int | None
    children: Sequence[int]

    def wait(self, timeout: timedelta) -> None:
        """Take this worker's part in it, within `timeout` from now on."""
        end_s = time.monotonic() + timeout.total_seconds()

        def left() -> timedelta:
            return timedelta(seconds=max(_AT_ONCE.total_seconds(), end_s - time.monotonic()))

        backend, values, result = self.backend, self.values, torch.empty_like(self.values)
        parts = [torch.empty_like(values) for _ in self.children]
        arriving = [backend.recv([part], child, _VOTE_TAG) for part, child in zip(parts, self.children, strict=True)]
        returning = backend.recv([result], self.parent, _RESULT_TAG) if self.parent is not None else None
        for work, part in zip(arriving, parts, strict=True):
            work.wait(left())
            values += part
        if returning is not None:
            backend.send([values], self.parent, _VOTE_TAG).wait(left())
            returning.wait(left())
            values.copy_(result)
        for work in [backend.send([values], child, _RESULT_TAG) for child in self.children]:
            work.wait(left())


def _close_connections(backend: Any, connected: Sequence[int]) -> None:
    """Let a wait expire on the first connection that still stands: gloo then closes all of the group."""
    for other in connected:
        with contextlib.suppress(RuntimeError):
            backend.recv([torch.empty(1)], other, _NEVER_SENT).wait(_AT_ONCE)


@contextlib.contextmanager
def _unless_broken(failure: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise TransportBroken(f"{failure}: {problem}") from None
