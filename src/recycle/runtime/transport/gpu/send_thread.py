"""SendThread: a thread that sends tensors as soon as the GPU has computed them; the training thread does not wait for that."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recycle.runtime.transport.message_queue import Posted
from recycle.runtime.transport.specs import TensorMessage, TransportBroken

Launch = Callable[[TensorMessage, int, Tensor], Sequence[Any]]
"""Sends a tensor that is computed, under a number. Returns what was begun, and all that must live until it has ended."""
Finish = Callable[[Any, timedelta], None]
"""Waits for the first of what was begun."""


class _Send(NamedTuple):
    """A message, the event after which its tensor is computed, and what was begun for it."""

    message: TensorMessage
    number: int
    body: Tensor
    is_computed: Any
    begun: list[Any]


class _Wait(NamedTuple):
    """A send that the training thread may wait for."""

    thread: "SendThread"
    send: _Send

    def wait(self, timeout: timedelta) -> None:
        self.thread.wait(self.send, timeout)


class SendThread:
    """Sends in the order in which messages are posted. `abort` ends every wait; the thread ends after the send that it is at.

    `on_problem` is called if a send fails, in the thread: the training thread may be waiting for something else.
    """

    def __init__(self, launch: Launch, finish: Finish, device: torch.device, on_problem: Callable[[str], None]) -> None:
        self._launch, self._finish, self._device, self._on_problem = launch, finish, device, on_problem
        self._sends: SimpleQueue[_Send | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._problem, self._has_thread = "", False

    def post(self, message: TensorMessage, number: int, body: Tensor) -> Posted:
        """Send `body` when all that the current stream has been given until now is computed."""
        if self._problem:
            raise TransportBroken(self._problem)
        is_computed = None
        if self._device.type == "cuda":
            is_computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_computed.record(torch.cuda.current_stream(self._device))
        if not self._has_thread:  # not before: an epoch may end while its transport is made
            self._has_thread = True
            threading.Thread(target=self._run, name="gpu send", daemon=True).start()
        send = _Send(message, number, body, is_computed, [])
        self._sends.put(send)
        return Posted(_Wait(self, send), body)

    def wait(self, send: _Send, timeout: timedelta) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._problem or send.begun, timeout.total_seconds())
            if not send.begun:
                raise RuntimeError(self._problem or f"nothing was sent for {timeout.total_seconds():.0f} s")
        self._finish(send.begun[0], timeout)

    def abort(self, problem: str = "the epoch is over") -> None:
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()
        self._sends.put(None)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while (send := self._sends.get()) is not None and not self._problem:
                if send.is_computed is not None:
                    send.is_computed.synchronize()
                begun = self._launch(send.message, send.number, send.body)
                with self._changed:
                    send.begun.extend(begun)
                    self._changed.notify_all()
                del send, begun  # they own the tensor
        except Exception as problem:  # the training thread raises it
            text = str(problem) or repr(problem)
            self.abort(text)
            self._on_problem(text)
