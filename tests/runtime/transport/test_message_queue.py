"""Messages between workers: they arrive by their address, and are kept until they are taken, over gloo, CUDA IPC and NCCL.

No GPU is needed: shared memory is host memory here, and NCCL's groups are streams of this process.
"""

import weakref

import pytest
import torch

from recycle.core.cluster import Worker
from recycle.core.errors import Unsendable
from recycle.core.op import Kind
from recycle.runtime.boundary.boundary_spec import BoundarySpec, TensorSpec
from recycle.runtime.boundary.nests import tensors_in
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.gpu.cuda_ipc import CudaIpcTransport
from recycle.runtime.transport.specs import GroupView, MessageLink, TensorMessage, TransportBroken
from tests.runtime.transport.nccl_streams import Streams
from tests.runtime.transport.worker_threads import at_once, rendezvous_of, transport_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
FIRST, LAST = Worker(0, 0), Worker(0, 1)
NEST = {
    "states": (torch.arange(6.0).view(2, 3).requires_grad_(), torch.full((5,), 0.5).requires_grad_()),
    "mask": torch.tensor([True, False]),
    "ids": torch.arange(3),
    "bias": torch.ones(3),
    "scale": 2,
}
SPEC = transport_spec({0: TensorSpec((2, 3), torch.float32), 1: BoundarySpec.of(NEST)}, num_chains=4)


class HostMemory:
    """Memory of one worker that the other workers of the process can map."""

    device = torch.device("cpu")

    def __init__(self, opened):
        self._opened = opened

    def open(self, purpose, name, size_bytes):
        self._opened[name] = torch.zeros(size_bytes, dtype=torch.uint8)
        return self._opened[name]

    def map(self, name):
        return self._opened[name]

    def synchronize(self):
        pass


@pytest.fixture(params=["gloo", "cuda_ipc", "nccl"])
def pair(request):
    """The transports of two workers of one pipeline."""
    memory, streams = HostMemory({}), Streams()

    def make(worker, store):
        view = GroupView(worker, [FIRST, LAST], epoch=1)
        if request.param == "nccl":
            links = [MessageLink(Kind.F, FIRST, LAST), MessageLink(Kind.I, LAST, FIRST)]
            return streams.connect(store, view, SPEC, links)
        return GlooTransport(store, view, SPEC) if request.param == "gloo" else CudaIpcTransport(store, view, SPEC, memory)

    stores = rendezvous_of(2)
    made = at_once(*(lambda pair=pair: make(*pair) for pair in zip([FIRST, LAST], stores, strict=True)))
    yield made
    for each in made:
        each.abort()
        each.close()


def activation(chain, made_at=0, taken_at=0):
    return TensorMessage(Kind.F, 1, chain, FIRST, LAST, made_at, taken_at, is_of_warm_up=False)


def gradient(chain, made_at=0, taken_at=0):
    return TensorMessage(Kind.I, 0, chain, LAST, FIRST, made_at, taken_at, is_of_warm_up=False)


def test_messages_arrive_by_their_address_in_whatever_order_they_are_received(pair):
    first, last = (transport.messages for transport in pair)

    def send():
        for round_ in range(3):
            first.round = round_
            for chain in range(4):
                first.send(activation(chain), torch.full((2, 3), 10.0 * round_ + chain))
            first.flush()

    def receive():
        found = []
        for round_ in range(3):
            last.round = round_
            last.post_receive(activation(2))
            found += [float(last.receive(activation(chain))[0, 0]) for chain in (3, 1, 0, 2)]
        return found

    _, found = at_once(send, receive)
    assert found == [3, 1, 0, 2, 13, 11, 10, 12, 23, 21, 20, 22]


def test_one_can_ask_whether_a_message_has_come_and_receive_it_then(pair):
    first, last = (transport.messages for transport in pair)
    assert [last.comes_within(0.01, activation(1)) for _ in range(3)] == [False] * 3

    def receive():
        assert last.comes_within(20, activation(1))
        return [float(last.receive(activation(chain))[0, 0]) for chain in (1, 0)]

    _, found = at_once(lambda: [first.send(activation(chain), torch.full((2, 3), 5.0 + chain)) for chain in (0, 1)], receive)
    assert found == [6, 5]


def test_who_asks_for_a_message_learns_of_the_end_of_the_epoch_when_it_receives(pair):
    assert not pair[1].messages.comes_within(0.01, activation(0))
    pair[1].abort()
    assert pair[1].messages.comes_within(20, activation(0))
    with pytest.raises(TransportBroken):
        pair[1].messages.receive(activation(0))


def test_a_tensor_is_kept_until_a_later_message_of_its_receiver_says_that_it_was_taken(pair):
    first, last = (transport.messages for transport in pair)
    sent = [activation(0, made_at=0, taken_at=0), activation(1, made_at=1, taken_at=5)]
    for message in sent:
        first.send(message, torch.ones(2, 3))
    kept = [weakref.ref(posted.body) for _, _, posted in sorted(first._sent[LAST], key=lambda entry: entry[0])]

    def answer():
        for message in sent:
            last.receive(message)
        last.send(gradient(0, made_at=2, taken_at=3), torch.ones(2, 3))

    at_once(answer, lambda: first.receive(gradient(0, made_at=2, taken_at=3)))
    assert [body() is not None for body in kept] == [False, True]  # by index 2 it needed the first one alone
    first.flush()
    assert kept[1]() is None


def test_a_tensor_of_another_shape_or_dtype_is_refused(pair):
    with pytest.raises(Unsendable, match=r"W0_0 made torch.float32 of shape \[2, 4\] for W0_1.*of shape \[2, 3\]"):
        pair[0].messages.send(activation(0), torch.ones(2, 4))
    with pytest.raises(Unsendable, match=r"made torch.float64 of shape \[2, 3\]"):
        pair[0].messages.send(activation(0), torch.ones(2, 3, dtype=torch.float64))


def test_zeros_have_the_spec_of_the_message(pair):
    assert torch.equal(pair[1].messages.zeros(gradient(0)), torch.zeros(2, 3))


def test_a_nest_arrives_with_its_structure_and_gradients_of_its_paths_come_back(pair):
    first, last = (transport.messages for transport in pair)
    there = TensorMessage(Kind.F, 2, 0, FIRST, LAST, 0, 0, is_of_warm_up=False)
    back = TensorMessage(Kind.I, 1, 0, LAST, FIRST, 1, 1, is_of_warm_up=False)

    def send():
        first.send(there, NEST)
        return first.receive(back)

    def receive():
        received = last.receive(there)
        last.send(back, (torch.ones(2, 3), torch.zeros(5)))
        return received

    gradients, received = at_once(send, receive)
    assert BoundarySpec.of(received) == BoundarySpec.of(NEST)
    assert all(torch.equal(*each) for each in zip(tensors_in(received), tensors_in(NEST), strict=True))
    assert [gradient.tolist() for gradient in gradients] == [torch.ones(2, 3).tolist(), [0.0] * 5]
    assert BoundarySpec.of(last.zeros(there)) == BoundarySpec.of(NEST)


def test_a_nest_of_another_structure_is_refused(pair):
    messages, there = pair[0].messages, TensorMessage(Kind.F, 2, 0, FIRST, LAST, 0, 0, is_of_warm_up=False)
    with pytest.raises(Unsendable, match="in another structure, or with other gradient paths"):
        messages.send(there, {**NEST, "scale": 3})
    with pytest.raises(Unsendable, match="in another structure, or with other gradient paths"):
        messages.send(there, {**NEST, "bias": NEST["bias"].clone().requires_grad_()})
    with pytest.raises(Unsendable, match=r"W0_0 made .* but the first micro-batch made .* of shape \[2, 3\]"):
        messages.send(there, {**NEST, "ids": torch.arange(4)})
