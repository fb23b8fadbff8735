"""NCCL's groups as streams of one process: no tags, and a receive gets the next send of its pair.

After the first operation of a communicator, a receive that is launched before its send is an error here, and so is a sum that a
member has to wait for longer than a moment: their kernels would occupy a GPU for as long as another worker likes.
"""

import threading
from collections import defaultdict
from uuid import uuid4

import torch

from recycle.runtime.transport.gpu.nccl import NcclTransport

A_MOMENT_S = 20.0


class Work:
    """An operation that was launched."""

    def __init__(self):
        self.has_ended = threading.Event()

    def wait(self):
        if not self.has_ended.wait(A_MOMENT_S):
            raise RuntimeError("a kernel waits for its partner")


class Streams:
    """The communicators of all groups."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sends, self.receives = defaultdict(list), defaultdict(list)
        self.num_received = defaultdict(int)
        self.sums = defaultdict(list)
        self.num_lost = 0  # how many of the next sends fail

    def connect(self, store, view, spec, links):
        """The transport of a worker over these streams."""
        return NcclTransport(store, view, spec, links, torch.device("cpu"), lambda *args: Group(self, *args))


class Group:
    """One worker's end of a group, by the interface of `NcclGroup`."""

    def __init__(self, streams, store, rank, size, timeout, has_priority=False):
        self._streams, self._rank, self._size, self.is_aborted = streams, rank, size, False
        if rank == 0:
            store.set("id", str(uuid4()))
        self._id = store.get("id").decode()

    def send(self, tensors, rank, tag):
        pair = self._id, self._rank, rank
        with self._streams.lock:
            self._refuse_aborted()
            if self._streams.num_lost:
                self._streams.num_lost -= 1
                raise RuntimeError("NCCL error: unhandled system error")
            self._streams.sends[pair].append((tensors[0], work := Work()))
            self._match(pair)
        return work

    def recv(self, tensors, rank, tag):
        pair = self._id, rank, self._rank
        with self._streams.lock:
            self._refuse_aborted()
            number = self._streams.num_received[pair] + len(self._streams.receives[pair])
            if number and not self._streams.sends[pair]:
                raise RuntimeError("a receive was launched before its send")
            self._streams.receives[pair].append((tensors[0], work := Work()))
            self._match(pair)
        return work

    def _match(self, pair):
        sends, receives = self._streams.sends[pair], self._streams.receives[pair]
        while sends and receives:
            (sent, sending), (received, receiving) = sends.pop(0), receives.pop(0)
            received.copy_(sent)
            self._streams.num_received[pair] += 1
            sending.has_ended.set()
            receiving.has_ended.set()

    def allreduce(self, tensor):
        with self._streams.lock:
            self._refuse_aborted()
            parts = self._streams.sums[self._id]
            parts.append((tensor, work := Work()))
            if len(parts) == self._size:
                total = sum(part for part, _ in parts)
                for part, launched in parts:
                    part.copy_(total)
                    launched.has_ended.set()
                parts.clear()
        return work

    def _refuse_aborted(self):
        if self.is_aborted:
            raise RuntimeError("the epoch is over")

    def abort(self):
        self.is_aborted = True
