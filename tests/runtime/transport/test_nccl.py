"""The transport over NCCL: no receive is launched before its send, none waits for another, and errors of NCCL end the epoch.

No GPU is needed: NCCL's groups are streams of this process.
"""

import random
import threading
import time
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.runtime.boundary.boundary_spec import TensorSpec
from recycle.runtime.execute import gradient_reduction
from recycle.runtime.execute.buckets import make_buckets
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.specs import GroupView, MessageLink, TensorMessage, TransportBroken
from tests.processes import wait_for
from tests.random_plans import legal_plans
from tests.runtime.jobs import Numbers, adamw, loss, small_stages
from tests.runtime.transport import nccl_streams
from tests.runtime.transport.nccl_streams import Streams
from tests.runtime.transport.worker_threads import at_once, over_gloo, rendezvous_of, train_in_threads, transport_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
LOWER, UPPER = [Worker(0, 0), Worker(1, 0)], [Worker(0, 1), Worker(1, 1)]
ALL, NUM_CHAINS = [*LOWER, *UPPER], 8
SPEC = transport_spec({0: TensorSpec((3,), torch.float32)}, NUM_CHAINS)


def message(kind, chain, lower, upper):
    sender, receiver = (lower, upper) if kind is Kind.F else (upper, lower)
    return TensorMessage(kind, receiver.stage, chain, sender, receiver, chain, chain, is_of_warm_up=False)


@pytest.fixture
def streams():
    return Streams()


@pytest.fixture
def connected(streams):
    """The transports of two pipelines of two stages, by worker."""

    def make(worker, store):
        links = [MessageLink(Kind.F, *pair) for pair in product(LOWER, UPPER)]
        links += [MessageLink(Kind.I, *pair) for pair in product(UPPER, LOWER)]
        own = [link for link in links if worker in (link.sender, link.receiver)]
        return streams.connect(store, GroupView(worker, ALL, epoch=1), SPEC, own)

    made = at_once(*(lambda pair=pair: make(*pair) for pair in zip(ALL, rendezvous_of(4), strict=True)))
    yield dict(zip(ALL, made, strict=True))
    for each in made:
        each.abort()
        each.close()


@pytest.mark.parametrize("seed", range(10))
def test_whatever_the_order_of_sends_and_receives_every_message_arrives_and_no_receive_is_first(connected, streams, seed):
    """Each worker sends all it has before it receives: if a send waited for its receive, all would wait for ever."""
    chance = random.Random(seed)
    routes = [(chain, chance.choice(LOWER), chance.choice(UPPER)) for chain in range(NUM_CHAINS)]

    def value(kind, chain, round_):
        return torch.full((3,), 100.0 * round_ + 10 * (kind is Kind.I) + chain)

    def run(worker, is_lower, order):
        found = []
        for round_ in range(4):
            messages = connected[worker].messages
            messages.round = round_
            out, back = (Kind.F, Kind.I) if is_lower else (Kind.I, Kind.F)
            own = [route for route in order if worker in route]
            for chain, lower, upper in own:
                messages.send(message(out, chain, lower, upper), value(out, chain, round_))
            for chain, lower, upper in reversed(own):
                found.append(torch.equal(messages.receive(message(back, chain, lower, upper)), value(back, chain, round_)))
            messages.flush()
        return all(found)

    orders = {worker: chance.sample(routes, NUM_CHAINS) for worker in ALL}
    assert at_once(*(lambda w=worker: run(w, w in LOWER, orders[w]) for worker in ALL)) == [True] * 4
    assert sum(streams.num_received.values()) == 4 * 2 * NUM_CHAINS + len(LOWER) * len(UPPER) * 2  # one for each connection


def test_an_error_of_nccl_is_that_of_a_broken_transport(connected, streams):
    streams.num_lost = 1
    messages = connected[LOWER[0]].messages
    messages.send(message(Kind.F, 0, LOWER[0], UPPER[0]), torch.zeros(3))
    with pytest.raises(TransportBroken, match="unhandled system error"):
        messages.flush()
    with pytest.raises(TransportBroken, match="unhandled system error"):
        messages.send(message(Kind.F, 1, LOWER[0], UPPER[0]), torch.zeros(3))


@pytest.mark.parametrize("expects", ["a message", "that its message is sent"])
def test_the_end_of_the_epoch_ends_a_wait(connected, expects):
    transport, begun_s = connected[LOWER[0]], time.monotonic()
    threading.Timer(0.1, transport.abort).start()
    transport._carrier._sends._has_thread = True  # the thread that sends is gone
    transport.messages.send(message(Kind.F, 0, LOWER[0], UPPER[0]), torch.zeros(3))
    waits = {
        "a message": lambda: transport.messages.receive(message(Kind.I, 0, LOWER[0], UPPER[0])),
        "that its message is sent": transport.messages.flush,
    }
    with pytest.raises(TransportBroken):
        waits[expects]()
    assert time.monotonic() < begun_s + 20


def test_a_send_that_fails_ends_the_wait_for_another_message(connected, streams):
    transport, begun_s = connected[LOWER[0]], time.monotonic()
    streams.num_lost = 1
    transport.messages.send(message(Kind.F, 0, LOWER[0], UPPER[0]), torch.zeros(3))
    with pytest.raises(TransportBroken, match="unhandled system error"):
        transport.messages.receive(message(Kind.I, 0, LOWER[0], UPPER[0]))
    assert time.monotonic() < begun_s + 20


def test_threads_end_with_their_epoch(connected):
    connected[LOWER[0]].messages.send(message(Kind.F, 0, LOWER[0], UPPER[0]), torch.zeros(3))
    connected[LOWER[0]].reducer.begin(torch.zeros(3))
    assert {"gpu send", "transport reduce"} <= {thread.name for thread in threading.enumerate()}
    for transport in connected.values():
        transport.abort()
        transport.close()
    ours = ("nccl", "gpu send", "transport reduce")
    wait_for(lambda: not any(thread.name.startswith(ours) for thread in threading.enumerate()), 20)


def trained(plan, make_transport):
    """The digests of all workers' stages after three steps of a plan."""
    stages, options = small_stages(plan.problem.shape.num_stages), TrainOptions(is_exact=True)
    return train_in_threads(Job(plan, stages, Numbers(), loss, adamw, 3, options=options), make_transport)


@settings(max_examples=4, deadline=None)
@given(legal_plans())
def test_any_legal_plan_trains_over_it_as_over_gloo_however_many_buckets_the_gradient_has(plan):
    expected = trained(plan, over_gloo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_reduction, "make_buckets", partial(make_buckets, bucket_bytes=1))
        assert trained(plan, Streams().connect) == expected


def test_a_sum_is_launched_when_all_peers_are_there(connected, monkeypatch):
    """A peer comes later than a kernel may wait for it."""
    monkeypatch.setattr(nccl_streams, "A_MOMENT_S", 4.0)

    def add(worker):
        time.sleep(5 * worker.pipeline)
        tensor = torch.full((3,), 1.0 + worker.pipeline)
        connected[worker].reducer.all_reduce(tensor)
        return tensor.tolist()

    assert at_once(*(lambda worker=worker: add(worker) for worker in ALL)) == [[3.0] * 3] * 4


def test_a_worker_that_dies_while_the_others_connect_leaves_nothing_behind(streams):
    """The last one never comes; its peers wait for it over gloo, where the end of the epoch reaches them."""
    before, stores = set(threading.enumerate()), rendezvous_of(2)
    views = [GroupView(worker, LOWER, epoch=1) for worker in LOWER]

    def make():
        with pytest.raises(TransportBroken):
            streams.connect(stores[0], views[0], SPEC, [])

    def make_half():
        host = GlooGroups(stores[1], views[1], SPEC)  # and then it hangs
        time.sleep(0.3)
        stores[0].abort()
        host.abort()
        host.close()

    at_once(make, make_half)
    wait_for(lambda: not any(one.name.startswith(("nccl", "transport")) for one in set(threading.enumerate()) - before), 20)
