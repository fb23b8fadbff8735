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
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recycle.control.drift.message_times import MessageStamp
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.compute.streams import on_stream
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.send_thread import SendThread
from recycle.runtime.transport.links.stamped_body import clock_us
from recycle.runtime.transport.message_queue import Posted
from recycle.runtime.transport.reducer import Reducer
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportBroken, TransportSpec

_ANNOUNCEMENTS = 2**29  # a tag that no message has
# An announcement may be long in coming; the end of the epoch closes the connection, and with it the wait.
_UNTIL_OVER = timedelta(days=1000)


def wait_on_host(work: Any, device: torch.device, purpose: str) -> None:
    """Wait until the GPU has done an operation of NCCL, or somebody has aborted it, whatever else the GPU has to do.

    Each thread has a purpose of its own, lest it waits for what another one waits for.
    """
    with on_stream(device, purpose):
        work.wait()
        if device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(device))
            done.synchronize()


@dataclass(slots=True)
class _Wait:
    """What the training thread waits for: the message with a number. The timeout begins when it first waits."""

    carrier: "NcclCarrier"
    number: int
    end_s: float | None = None

    def wait(self, timeout: timedelta) -> None:
        self.carrier.wait_until_received(self.number, timeout, self._left(timeout))

    def ends_within(self, seconds: float, timeout: timedelta) -> bool:
        """Wait for so long at most; return whether `wait` would return soon, or raise."""
        return self._left(timeout) <= timedelta(0) or self.carrier.is_announced_within(seconds, self.number)

    def _left(self, timeout: timedelta) -> timedelta:
        now_s = time.monotonic()
        self.end_s = now_s + timeout.total_seconds() if self.end_s is None else self.end_s
        return timedelta(seconds=max(0.0, self.end_s - now_s))


class _Announced(NamedTuple):
    """A receive that was launched, the tensor that it writes to, and the stamp of its message."""

    work: Any
    body: Tensor
    stamp: MessageStamp


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
        reducer: Reducer,
    ) -> None:
        self.device = device
        self._directions, self._groups, self._spec = directions, groups, spec
        self._rank = {other: number for number, other in enumerate(view.workers)}
        self._reducer = reducer
        self._sends = SendThread(self._send, lambda work, timeout: work.wait(), device, self._break)
        self._announced: dict[int, _Announced] = {}  # the receives that were launched, by the tag of their message
        self._changed = threading.Condition()
        self._problem = ""
        self._senders = list(senders)

    def start(self) -> None:
        """Start the threads that receive."""
        for sender in self._senders:
            threading.Thread(target=self._run, args=(sender,), name=f"nccl receive {sender}", daemon=True).start()

    def _run(self, sender: Worker) -> None:
        try:
            with on_stream(self.device, "launch"):
                self._receive_all(sender)
        except Exception as problem:  # the training thread raises it
            self._break(str(problem) or repr(problem))

    # Called in the training thread.

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted:
        """Send the tensor; who waits for it lets the GPU wait until it is sent, so that its memory can be used again."""
        return self._sends.post(message, self._spec.tag(message, round_), tensor.detach().contiguous())

    def post_receive(self, message: TensorMessage, round_: int) -> Posted:
        """Nothing is to be done: the receive is launched as soon as the message is announced."""
        return Posted(_Wait(self, self._spec.tag(message, round_)), torch.empty(0))

    def is_announced_within(self, seconds: float, number: int) -> bool:
        """Wait for so long at most; return whether the sender has begun to send a message, or nothing will come any more."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._problem or number in self._announced, seconds))

    def wait_until_received(self, number: int, timeout: timedelta, left: timedelta) -> None:
        """Wait for a message, of whose timeout so much is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem or number in self._announced, left.total_seconds())
            if number not in self._announced:
                raise RuntimeError(self._problem or f"nothing came for {timeout.total_seconds():.0f} s")
        work, body, _ = self._announced[number]
        wait_on_host(work, self.device, "wait for a message")
        if body.is_cuda:  # it was allocated on the stream of other threads
            body.record_stream(torch.cuda.current_stream(self.device))

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        with self._changed:
            return self._announced.pop(self._spec.tag(message, round_)).body

    def stamp_of(self, message: TensorMessage, body: Tensor, round_: int) -> MessageStamp:
        with self._changed:
            return self._announced[self._spec.tag(message, round_)].stamp

    # Called in the threads of this carrier.

    def _send(self, message: TensorMessage, number: int, body: Tensor) -> Sequence[Any]:
        stamp = self._spec.timer.stamp(message.receiver, clock_us())
        with on_stream(self.device, "launch"):  # NCCL waits for the stream of its caller, and the training thread's is busy
            work = self._directions[message.kind].send([body], self._rank[message.receiver], 0)
        announcement = torch.tensor([number, message.stage, *stamp])
        return work, self._groups.begin_send(announcement, message.receiver, _ANNOUNCEMENTS), announcement

    def _receive_all(self, sender: Worker) -> None:
        announcement = torch.empty(2 + len(MessageStamp._fields), dtype=torch.int64)
        while True:
            self._groups.begin_receive(announcement, sender, _ANNOUNCEMENTS).operation.wait(_UNTIL_OVER)
            number, stage, *stamp = announcement.tolist()
            kind = self._spec.kind_of(number)
            spec = self._spec.packed(kind, stage).spec
            body = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            work = self._directions[kind].recv([body], self._rank[sender], 0)
            with self._changed:
                self._announced[number] = _Announced(work, body, MessageStamp(*stamp))
                self._changed.notify_all()

    def _break(self, problem: str) -> None:
        """End every wait of the training thread, because of a problem here."""
        self.abort(problem)
        self._reducer.abort(TransportBroken(problem))

    def abort(self, problem: str = "the epoch is over") -> None:
        """End every wait. The threads end when their connections do."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()
        self._sends.abort(problem)

    def close(self) -> None:
        self._announced.clear()
