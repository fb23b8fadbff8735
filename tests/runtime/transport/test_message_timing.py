"""Timing of real messages: over gloo and NCCL a message is timed that its receiver waits for; a delayed one takes longer.

No GPU is needed: NCCL's groups are streams of this process.
"""

import time
from dataclasses import replace

import pytest
import torch

from recycle.control.drift.message_times import UNKNOWN_LAG_US, MessageStamp, MessageTimer
from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.boundary.boundary_spec import TensorSpec
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.links.stamped_body import empty_body, own_clock, read_stamp, tensor_in, write_stamp
from recycle.runtime.transport.specs import GroupView, MessageLink, TensorMessage, TransportBroken
from tests.processes import depends_on_load
from tests.runtime.transport.nccl_streams import Streams
from tests.runtime.transport.worker_threads import at_once, rendezvous_of, transport_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
FIRST, LAST = Worker(0, 0), Worker(0, 1)
SPEC = transport_spec({0: TensorSpec((2, 3), torch.float32)}, num_chains=4)
LATE_S, DELAY_S = 1.5, 1.2


class Pair:
    """The transports of two workers, each with a timer; messages between them are delayed by `delay_s`."""

    def __init__(self, kind="gloo", delay_s=0.0):
        self.timers, streams = [MessageTimer(7), MessageTimer(7)], Streams()
        links = [MessageLink(Kind.F, FIRST, LAST), MessageLink(Kind.I, LAST, FIRST)]

        def make(worker, store, timer):
            view, spec = GroupView(worker, [FIRST, LAST], epoch=1), replace(SPEC, timer=timer, delay_s_to=lambda worker: delay_s)
            return GlooTransport(store, view, spec) if kind == "gloo" else streams.connect(store, view, spec, links)

        each = zip([FIRST, LAST], rendezvous_of(2), self.timers, strict=True)
        self.first, self.last = at_once(*(lambda args=args: make(*args) for args in each))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (self.first, self.last):
            each.abort()
            each.close()

    def send(self, sleep_s=0.0):
        time.sleep(sleep_s)
        self.first.messages.send(activation(0), torch.full((2, 3), 5.0))

    def receive(self, sleep_s=0.0):
        time.sleep(sleep_s)
        return self.last.messages.receive(activation(0)).tolist()


def activation(chain):
    return TensorMessage(Kind.F, 1, chain, FIRST, LAST, 0, 0, is_of_warm_up=False)


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_a_message_that_is_waited_for_is_timed_from_its_sending_on(kind):
    with Pair(kind) as pair:
        _, received = at_once(lambda: pair.send(LATE_S), pair.receive)
        assert received == [[5.0] * 3] * 2
        (lag,) = pair.timers[1].take().values()
        assert (lag.num, lag.is_one_clock) == (1, True)
        with depends_on_load():
            assert 0 < lag.least_us < 1e6 * LATE_S


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_a_message_that_is_there_before_it_is_asked_for_is_not_timed(kind):
    with Pair(kind) as pair:
        at_once(pair.send, lambda: pair.receive(LATE_S))
        assert pair.timers[1].take() == {}


def test_a_delayed_message_arrives_later_and_its_sender_does_not_wait():
    with Pair(delay_s=DELAY_S) as pair:
        began_s = time.monotonic()
        pair.send()
        with depends_on_load():
            assert time.monotonic() - began_s < DELAY_S
        pair.last.messages.post_receive(activation(0))
        assert pair.receive() == [[5.0] * 3] * 2
        assert time.monotonic() - began_s >= DELAY_S
        pair.first.messages.flush()
        at_once(lambda: pair.send(LATE_S), pair.receive)
        (lag,) = pair.timers[1].take().values()
        assert lag.least_us >= 1e6 * DELAY_S


def test_the_end_of_an_epoch_ends_the_wait_for_a_delayed_message():
    with Pair(delay_s=30.0) as pair:
        pair.send()
        pair.first.abort()
        with pytest.raises(TransportBroken, match="the epoch is over"):
            pair.first.messages.flush()


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 4), (7, 11, 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_tensor_and_stamp_share_a_body_and_neither_touches_the_other(shape, dtype):
    spec, stamp = TensorSpec(shape, dtype), MessageStamp(-5, 2**32 - 1, UNKNOWN_LAG_US)
    tensor, body = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape), empty_body(spec)
    tensor_in(body, spec).copy_(tensor)
    write_stamp(body, stamp)
    found = tensor_in(body, spec)
    assert torch.equal(found, tensor)
    assert found.is_contiguous()
    assert not found._is_view()
    assert read_stamp(body) == stamp
    assert body.nbytes <= spec.size_bytes + 31


def test_processes_of_a_machine_know_that_they_read_the_same_clock():
    assert own_clock() > 0
    assert own_clock() == own_clock.__wrapped__()
