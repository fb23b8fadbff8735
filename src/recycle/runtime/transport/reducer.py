"""Reducer: sums tensors over peers in a thread of its own, one after the other, while the training thread computes.

All peers begin their sums in the same order. What is summed on a GPU has streams of its own there, too. When the epoch is over,
a tensor belongs to the next one: from then on no sum writes into it, however late its thread is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from recycle.runtime.compute.streams import on_stream
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.specs import GroupView, TransportBroken, TransportSpec

Add = Callable[[Tensor, Tie | None], None]
"""Replaces a tensor by its sum over the live peers of the stage, or over the workers of a tie, in the current stream."""
# Until the GPU has written a tensor. An aborted operation of NCCL ends within a second.
_WRITE_S = 10.0


class Reduction:
    """A sum that was begun. `event` comes when the GPU has computed the tensor."""

    def __init__(self, tensor: Tensor, tie: Tie | None, event: Any) -> None:
        self.tensor, self.tie, self.event = tensor, tie, event
        self.is_done = False


class Reducer:
    """The sums of one worker in one epoch. `abort` ends the training thread's wait, and lets no further sum begin."""

    def __init__(self, add: Add, groups: GlooGroups, view: GroupView, spec: TransportSpec) -> None:
        self._add, self._groups, self._view, self._activity = add, groups, view, spec.activity
        self._queue: SimpleQueue[Reduction | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._problem: Exception | None = None
        self._is_meeting = self._has_thread = False
        self._writing = threading.Lock()

    # Called in the training thread.

    def begin(self, tensor: Tensor, tie: Tie | None = None) -> Reduction:
        """Begin to replace the tensor by its sum, as soon as all is computed that the current stream has been given."""
        self.refuse_broken()
        event = None
        if tensor.is_cuda:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(tensor.device))
        if not self._has_thread:  # not before: an epoch may end while its transport is made
            self._has_thread = True
            threading.Thread(target=self._run, name="transport reduce", daemon=True).start()
        reduction = Reduction(tensor, tie, event)
        self._queue.put(reduction)
        return reduction

    def wait(self, reduction: Reduction) -> None:
        """Wait until the tensor is the sum, for the GPU and the host. Heartbeats say for whom; gloo's waits have a timeout."""
        with self._changed:
            while not reduction.is_done and self._problem is None:
                self._activity.wait_for(self._view.others_in_sum(reduction.tie) if self._is_meeting else "")
                self._changed.wait()
        self._activity.go_on()
        self.refuse_broken()

    def all_reduce(self, tensor: Tensor, tie: Tie | None = None) -> None:
        """Replace the tensor by its sum over the live peers of the stage, or over the live workers of all stages of a tie."""
        self.wait(self.begin(tensor, tie))

    def refuse_broken(self) -> None:
        """Raise if a sum has failed, or the epoch is over."""
        if self._problem is not None:  # a new one: that of the other thread would keep all frames that it passes
            kind = TransportBroken if isinstance(self._problem, TransportBroken) else RuntimeError
            raise kind(str(self._problem) or repr(self._problem))

    # Called in any thread.

    def abort(self, problem: Exception | None = None) -> None:
        with self._changed:
            self._problem = self._problem or problem or TransportBroken("the epoch is over")
            self._changed.notify_all()
        self._queue.put(None)

    def close(self) -> None:
        """Wait until no tensor is written any more; the thread itself may still wait for gloo.

        Raises:
            RuntimeError: A tensor is still being written.
        """
        if not self._writing.acquire(timeout=_WRITE_S):
            raise RuntimeError(f"the GPU still adds up a gradient {_WRITE_S:.0f} s after its epoch was over")
        self._writing.release()
        self._add = _nothing

    # Called in the thread of this reducer, by `Add`.

    @contextmanager
    def writing(self, tensor: Tensor) -> Iterator[None]:
        """Write a tensor inside the block, or what others will read, unless the epoch is over."""
        with self._writing:
            self.refuse_broken()
            yield
            if tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()

    def meet(self, tie: Tie | None) -> None:
        """Wait until the workers of this sum are all here."""
        self._add_over_gloo(torch.zeros(1), tie)

    def add_through_host(self, tensor: Tensor, tie: Tie | None) -> None:
        """Sum a tensor over gloo. It gets a copy: gloo may write long after it has said that the epoch is over."""
        in_host = tensor.cpu() if tensor.is_cuda else tensor.clone()
        self._add_over_gloo(in_host, tie)
        with self.writing(tensor):
            tensor.copy_(in_host)

    def _add_over_gloo(self, tensor: Tensor, tie: Tie | None) -> None:
        self._say_whether_meeting(True)
        self._groups.add(tensor, tie)
        self._say_whether_meeting(False)

    def _say_whether_meeting(self, is_meeting: bool) -> None:
        with self._changed:
            self._is_meeting = is_meeting
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (reduction := self._queue.get()) is not None:
                if reduction.event is not None:
                    torch.cuda.set_device(reduction.tensor.device)
                    reduction.event.synchronize()
                self.refuse_broken()
                with on_stream(reduction.tensor.device, "reduce"):
                    self._add(reduction.tensor, reduction.tie)
                with self._changed:
                    reduction.is_done = True
                    self._changed.notify_all()
                del reduction  # it owns the tensor
        except Exception as problem:  # the training thread raises it
            self.abort(problem.with_traceback(None))


def _nothing(tensor: Tensor, tie: Tie | None) -> None:
    """Instead of a method of the transport, which owns the reducer."""
