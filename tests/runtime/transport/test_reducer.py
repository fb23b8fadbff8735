"""The reducer sums in the order in which sums were begun, while its worker computes, and its waits end with the epoch."""

import threading
import time

import pytest
import torch

from recycle.core.cluster import Worker
from recycle.runtime.transport.reducer import Reducer
from recycle.runtime.transport.specs import GroupView, TransportBroken
from tests.processes import wait_for
from tests.runtime.transport.worker_threads import at_once, connected, transport_spec

pytestmark = pytest.mark.timeout(60)
PEERS = [Worker(0, 0), Worker(1, 0), Worker(2, 0)]
VIEW = GroupView(PEERS[0], PEERS, epoch=1)


def test_sums_are_those_of_all_peers_and_a_worker_goes_on_meanwhile():
    went_on = threading.Event()
    with connected(PEERS) as transports:

        def run(number):
            parts = [torch.full((4,), 10.0**index * (number + 1)) for index in range(3)]
            if number == 2:  # the others have begun all their sums, and gone on
                assert went_on.wait(20)
            begun = [transports[number].reducer.begin(part) for part in parts]
            if number == 0:
                assert not any(reduction.is_done for reduction in begun)
                went_on.set()
            for reduction in reversed(begun):
                transports[number].reducer.wait(reduction)
            return torch.stack(parts)

        for found in at_once(*(lambda number=number: run(number) for number in range(3))):
            assert torch.equal(found, torch.tensor([[6.0], [60.0], [600.0]]).expand(3, 4))


def test_a_wait_ends_with_the_epoch_also_if_gloo_goes_on_waiting():
    gloo_ends = threading.Event()
    reducer = Reducer(lambda tensor, tie: gloo_ends.wait(30), None, VIEW, transport_spec())
    begun = reducer.begin(torch.zeros(1))
    threading.Timer(0.1, reducer.abort).start()
    with pytest.raises(TransportBroken, match="the epoch is over"):
        reducer.wait(begun)
    began_s = time.monotonic()
    reducer.close()
    assert time.monotonic() < began_s + 15  # half of what gloo takes: nothing is being written
    with pytest.raises(TransportBroken):
        reducer.begin(torch.zeros(1))
    gloo_ends.set()


def test_no_tensor_is_written_after_the_reducer_was_closed():
    tensor, has_begun, may_write, has_ended = torch.zeros(1), threading.Event(), threading.Event(), threading.Event()

    def add(tensor, tie):
        try:
            has_begun.set()
            may_write.wait(30)
            with reducer.writing(tensor):
                tensor += 1
        finally:
            has_ended.set()

    reducer = Reducer(add, None, VIEW, transport_spec())
    reducer.begin(tensor)
    assert has_begun.wait(20)
    reducer.abort()
    reducer.close()
    may_write.set()
    assert has_ended.wait(20)
    assert tensor == 0


class LateGroups:
    """Groups whose sum is written when the epoch is over: gloo goes on for a moment."""

    def __init__(self):
        self.has_begun, self.may_write, self.has_written = threading.Event(), threading.Event(), threading.Event()

    def add(self, tensor, tie):
        self.has_begun.set()
        assert self.may_write.wait(20)
        tensor += 7
        self.has_written.set()


def test_what_gloo_writes_after_the_end_of_the_epoch_reaches_no_gradient():
    groups, gradient = LateGroups(), torch.zeros(4)
    reducer = Reducer(lambda tensor, tie: reducer.add_through_host(tensor, tie), groups, VIEW, transport_spec())
    reducer.begin(gradient)
    assert groups.has_begun.wait(20)
    reducer.abort()
    reducer.close()
    groups.may_write.set()
    assert groups.has_written.wait(20)
    time.sleep(0.05)
    assert torch.equal(gradient, torch.zeros(4))


def test_a_worker_waits_for_its_peers_only_while_it_meets_them():
    groups, may_end, has_met = LateGroups(), threading.Event(), threading.Event()

    def add(tensor, tie):
        reducer.meet(tie)
        has_met.set()
        may_end.wait(20)

    spec = transport_spec()
    spec.activity.begin("reduce")
    reducer = Reducer(add, groups, VIEW, spec)
    begun, seen = reducer.begin(torch.zeros(1)), []

    def look():
        assert groups.has_begun.wait(20)
        wait_for(lambda: spec.activity.now.waits_for == "W1_0, W2_0", 10, lambda: str(spec.activity.now))
        groups.may_write.set()
        assert has_met.wait(20)
        wait_for(lambda: not spec.activity.now.waits_for, 10)
        seen.append(spec.activity.now.label)
        may_end.set()

    at_once(look, lambda: reducer.wait(begun))
    assert seen == ["reduce"]


def test_closing_waits_for_a_tensor_that_is_being_written():
    tensor, is_writing = torch.zeros(1), threading.Event()

    def add(tensor, tie):
        with reducer.writing(tensor):
            is_writing.set()
            time.sleep(0.3)
            tensor += 1

    reducer = Reducer(add, None, VIEW, transport_spec())
    reducer.begin(tensor)
    assert is_writing.wait(20)
    reducer.abort()
    reducer.close()
    assert tensor == 1


def test_an_error_of_a_sum_is_that_of_whoever_waits_for_it_and_no_later_one_begins():
    def fail(tensor, tie):
        raise ValueError("out of memory")

    reducer = Reducer(fail, None, VIEW, transport_spec())
    for ask in (reducer.all_reduce, reducer.begin):
        with pytest.raises(RuntimeError, match="out of memory") as found:
            ask(torch.zeros(1))
        assert not isinstance(found.value, TransportBroken)  # it is a fault of this worker


def test_a_peer_that_is_gone_ends_the_sum():
    with connected(PEERS[:2]) as transports:
        begun = transports[0].reducer.begin(torch.zeros(4))
        transports[1].abort()
        transports[1].close()
        with pytest.raises(TransportBroken, match="W1_0"):
            transports[0].reducer.wait(begun)
