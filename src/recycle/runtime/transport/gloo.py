"""GlooTransport: a transport over gloo, which copies tensors on a GPU through the host.

It connects workers on CPUs, and workers that share GPUs of several machines.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from recycle.control.drift.message_times import MessageStamp
from recycle.runtime.compute.tied_parameters import Tie
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.links.delayed_send import DelayedSend
from recycle.runtime.transport.links.stamped_body import clock_us, empty_body, read_stamp, tensor_in, write_stamp
from recycle.runtime.transport.message_queue import MessageQueue, Posted
from recycle.runtime.transport.reducer import Reducer
from recycle.runtime.transport.specs import GroupView, TensorMessage, TransportSpec


class GlooTransport:
    """The connections of one worker in one epoch, all of them over gloo."""

    def __init__(self, store: Any, view: GroupView, spec: TransportSpec) -> None:
        self.host = GlooGroups(store, view, spec)
        self.messages = MessageQueue(view, spec, self.host, GlooCarrier(self.host, spec))
        self.reducer = Reducer(self._add, self.host, view, spec)

    def _add(self, tensor: Tensor, tie: Tie | None) -> None:
        self.reducer.add_through_host(tensor, tie)

    def abort(self) -> None:
        self.reducer.abort()
        self.host.abort()

    def close(self) -> None:
        self.messages.close()
        self.host.close()
        self.reducer.close()


class GlooCarrier:
    """Sends tensors from host memory to host memory, each with a stamp; a tag tells messages apart."""

    device = torch.device("cpu")

    def __init__(self, groups: GlooGroups, spec: TransportSpec) -> None:
        self._groups, self._spec = groups, spec

    def post_send(self, message: TensorMessage, tensor: Tensor, round_: int) -> Posted:
        spec = self._spec.tensor_spec(message)
        body = empty_body(spec)
        tensor_in(body, spec).copy_(tensor.detach())
        write_stamp(body, self._spec.timer.stamp(message.receiver, clock_us()))
        begin = partial(self._groups.begin_send, body, message.receiver, self._spec.tag(message, round_))
        if (delay_s := self._spec.delay_s_to(message.receiver)) > 0:
            return Posted(DelayedSend(begin, delay_s, lambda: self._groups.is_aborted), body)
        return Posted(begin(), body)

    def post_receive(self, message: TensorMessage, round_: int) -> Posted:
        body = empty_body(self._spec.tensor_spec(message))
        return Posted(self._groups.begin_receive(body, message.sender, self._spec.tag(message, round_)), body)

    def unpack(self, message: TensorMessage, body: Tensor, round_: int) -> Tensor:
        return tensor_in(body, self._spec.tensor_spec(message))

    def stamp_of(self, message: TensorMessage, body: Tensor, round_: int) -> MessageStamp:
        return read_stamp(body)
