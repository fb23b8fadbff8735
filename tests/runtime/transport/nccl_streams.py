"""NCCL's groups as streams of one process: no tags, and a receive gets the next send of its pair.

A receive that is launched before its send, whose kernel would occupy a GPU for as long as its sender likes, is an error here.
"""

import threading
from collections import defaultdict
from types import SimpleNamespace

import torch

from recycle.core.op import Kind
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.nccl_carrier import NcclCarrier
from recycle.runtime.transport.message_queue import MessageQueue


class Work:
    """A send or a receive that was launched."""

    def __init__(self):
        self.has_ended = threading.Event()

    def wait(self):
        assert self.has_ended.wait(20)

    def is_success(self):
        return self.has_ended.is_set()


class Streams:
    """The communicators of all pairs of workers, one for each direction."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sends = defaultdict(list)
        self.num_received = defaultdict(int)
        self.num_lost = 0  # how many of the next sends fail

    def connect(self, store, view, spec, senders):
        """The transport of a worker, with `NcclCarrier` and these streams."""
        host = GlooGroups(store, view, spec)
        host.add_sum_groups()
        groups = {kind: Group(self, kind, view) for kind in (Kind.F, Kind.I)}
        carrier = NcclCarrier(groups, host, view, spec, torch.device("cpu"), senders)
        carrier.start()

        def abort():
            host.abort()
            carrier.abort()

        def close():
            messages.close()
            carrier.close()
            host.close()

        messages = MessageQueue(view, spec, host, carrier)
        return SimpleNamespace(
            host=host, messages=messages, all_reduce=host.all_reduce, abort=abort, close=close, carrier=carrier
        )


class Group:
    """One worker's end of the communicators of one direction."""

    def __init__(self, streams, kind, view):
        self._streams, self._kind, self._view = streams, kind, view

    def send(self, tensors, rank, tag):
        assert tag == 0
        with self._streams.lock:
            if self._streams.num_lost:
                self._streams.num_lost -= 1
                raise RuntimeError("NCCL error: unhandled system error")
            work = Work()
            self._streams.sends[self._kind, self._view.worker, self._view.workers[rank]].append((tensors[0], work))
        return work

    def recv(self, tensors, rank, tag):
        assert tag == 0
        pair = self._kind, self._view.workers[rank], self._view.worker
        with self._streams.lock:
            number = self._streams.num_received[pair]
            if number >= len(self._streams.sends[pair]):
                raise RuntimeError("a receive was launched before its send")
            self._streams.num_received[pair] += 1
            sent, sending = self._streams.sends[pair][number]
            self._streams.sends[pair][number] = None, None
        tensors[0].copy_(sent)
        work = Work()
        work.has_ended.set()
        sending.has_ended.set()
        return work
