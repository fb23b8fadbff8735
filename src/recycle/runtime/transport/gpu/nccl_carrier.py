"""NcclCarrier: tensors from GPU to GPU over NCCL; no kernel of NCCL waits for a worker that is busy with something else.

NCCL has no tags, and its kernels occupy a GPU while they wait for the other side. A kernel that waits long can keep its own
worker from the very op that the other side needs, since some calls of CUDA wait until the GPU is free. So:

- A send is launched when its tensor is computed, by a thread that waits for that, and is then announced over gloo.
- A receive is launched when its send was announced, at once, by a thread that does nothing else for this sender. A pair of
  workers has one communicator for each direction; its receives have the order of the announcements, which is that of the sends.

So a kernel waits for the network, and for a thread that launches the other kernel and waits for nothing. The training thread
waits for announcements in host memory, where `abort` reaches it, and then until the GPU has the tensor.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.message_queue import Posted
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportBroken, TransportSpec

_ANNOUNCEMENTS = 2**29  # a tag that no message has
# An announcement may be long in coming; the end of the epoch closes the connection, and with it the wait.
_UNTIL_OVER = timedelta(days=1000)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the threads that launch: NCCL waits for the stream of its caller, and the training thread's is busy.

    There is one for all epochs, because the allocator keeps memory for each stream.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def wait_on_host(work: Any, device: torch.device) -> None:
    """Wait until the GPU has done an operation of NCCL, or somebody has aborted it, without a busy processor."""
    work.wait()
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


class _Send(NamedTuple):
    """A message for the thread that sends, the event after which its tensor is computed, and what was launched for it."""

    message: TensorMessage
    number: int
    body: Tensor
    is_computed: Any
    launched: list[Any]


class _Wait(NamedTuple):
    """What the training thread waits for: that `wait_for` returns within a time."""

    wait_for: Callable[[timedelta], None]

    def wait(self, timeout: timedelta) -> None:
        self.wait_for(timeout)


class NcclCarrier:
    """Sends and receives on one communicator for each direction (F: forwards, I: backwards). `senders` send to this worker."""

    def __init__(
        self,
        directions: Mapping[Kind, Any],
        groups: GlooGroups,
        view: GroupView,
        spec: TransportSpec,
        device: torch.device,
        senders: Iterable[Worker],
    ) -> None:
        self.device = device
        self._directions, self._groups, self._spec = directions, groups, spec
        self._rank = {other: number for number, other in enumerate(view.workers)}
        self._sends: SimpleQueue[_Send | None] = SimpleQueue()
        self._announced: dict[int, Posted] = {}  # the receives that were launched, by the tag of their message
        self._changed = threading.Condition()
        self._problem = ""
        self._senders = list(senders)

    def start(self) -> None:
        """Start the threads that send and receive."""
        threading.Thread(target=self._run, args=(self._send_all,), name="nccl send", daemon=True).start()
        for sender in self._senders:
            run = partial(self._receive_all, sender)
            threading.Thread(target=self._run, args=(run,), name=f"nccl receive {sender}", daemon=True).start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            with torch.cuda.stream(_side_stream(self.device)) if self.device.type == "cuda" else nullcontext():
                loop()
        except Exception as problem:  # the training thread raises it
            self.abort(str(problem))

    # Called in the training thread.

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted:
        if self._problem:
            raise TransportBroken(self._problem)
        body, is_computed = tensor.detach().contiguous(), None
        if self.device.type == "cuda":
            is_computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            is_computed.record(torch.cuda.current_stream(self.device))
        send = _Send(message, self._spec.tag(message, round_), body, is_computed, [])
        self._sends.put(send)
        return Posted(_Wait(partial(self._wait_until_sent, send)), body)

    def _wait_until_sent(self, send: _Send, timeout: timedelta) -> None:
        """Let the GPU wait until the tensor is sent, so that its memory can be used again."""
        self._wait_until(lambda: bool(send.launched), timeout)
        send.launched[0].wait()

    def post_receive(self, message: TensorMessage, round_: int) -> Posted:
        """Nothing is to be done: the receive is launched as soon as the message is announced."""
        return Posted(_Wait(partial(self._wait_until_received, self._spec.tag(message, round_))), torch.empty(0))

    def _wait_until_received(self, number: int, timeout: timedelta) -> None:
        self._wait_until(lambda: number in self._announced, timeout)
        work, body = self._announced[number]
        wait_on_host(work, self.device)
        if body.is_cuda:  # it was allocated on the stream of other threads
            body.record_stream(torch.cuda.current_stream(self.device))

    def _wait_until(self, is_done: Callable[[], bool], timeout: timedelta) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._problem or is_done(), timeout.total_seconds())
            if not is_done():
                raise RuntimeError(self._problem or f"nothing came for {timeout.total_seconds():.0f} s")

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        with self._changed:
            return self._announced.pop(self._spec.tag(message, round_)).body

    # Called in the threads of this carrier.

    def _send_all(self) -> None:
        while (send := self._sends.get()) is not None:
            if send.is_computed is not None:
                send.is_computed.synchronize()
            message = send.message
            work = self._directions[message.kind].send([send.body], self._rank[message.receiver], 0)
            announcement = torch.tensor([send.number, message.stage])
            announcing = self._groups.begin_send(announcement, message.receiver, _ANNOUNCEMENTS)
            with self._changed:
                send.launched.extend((work, announcing, announcement))
                self._changed.notify_all()
            del send, work  # they own the tensor

    def _receive_all(self, sender: Worker) -> None:
        announcement = torch.empty(2, dtype=torch.int64)
        while True:
            self._groups.begin_receive(announcement, sender, _ANNOUNCEMENTS).operation.wait(_UNTIL_OVER)
            number, stage = announcement.tolist()
            kind = self._spec.kind_of(number)
            spec = self._spec.spec_of(kind, stage)
            body = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            work = self._directions[kind].recv([body], self._rank[sender], 0)
            with self._changed:
                self._announced[number] = Posted(work, body)
                self._changed.notify_all()

    def abort(self, problem: str = "the epoch is over") -> None:
        """End every wait. The threads end when their connections do."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()
        self._sends.put(None)

    def close(self) -> None:
        self._announced.clear()
