"""State from a peer: whoever gets it is the peer bit for bit, whatever it holds; what was changed on its way is not used."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recycle.core.cluster import Worker
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.transport.specs import TransportBroken
from recycle.runtime.transport.state_transfer import receive_state, send_state
from tests.runtime.checkpoint.saved_stages import held
from tests.runtime.jobs import adamw, make_stages, sgd
from tests.runtime.transport.worker_threads import at_once, connected

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(60)
GIVER, TAKER, OTHER = Worker(0, 1), Worker(1, 1), Worker(2, 1)
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
REAL = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*WHOLE, *REAL, torch.complex64, torch.complex128]


@pytest.fixture(scope="module")
def pair():
    """The channels of two workers; a test that breaks them makes its own."""
    with connected([GIVER, TAKER]) as transports:
        yield [each.host for each in transports]


def stepped(module, make_optimizer, seed=0, num_steps=2):
    """Module and optimizer after some steps with made-up gradients, so that there is state."""
    stepper, generator = Stepper(module.parameters(), make_optimizer), torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        drawn = [torch.randn(of.shape, generator=generator).to(of.dtype) for of in module.parameters()]
        stepper.step(step, lambda first, end, drawn=drawn: drawn, 1.0)
    return module, stepper.optimizer


def copied(channels, giver, taker):
    """Let one give and the other get; return how many bytes each says that it was."""
    one, other = channels
    return at_once(lambda: send_state(one, TAKER, *giver), lambda: receive_state(other, GIVER, *taker))


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_whoever_gets_a_stage_is_the_one_who_gave_it(pair, make_optimizer, num_steps):
    giver = stepped(make_stages(1)[0], make_optimizer, num_steps=num_steps)
    taker = stepped(make_stages(2)[1], make_optimizer, seed=9, num_steps=2)
    before = held(*giver)
    given, taken = copied(pair, giver, taker)
    assert held(*taker) == held(*giver) == before
    assert given == taken >= sum(weight.numel() * weight.element_size() for weight in giver[0].state_dict().values())


@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_whoever_has_got_a_stage_trains_on_as_its_peer_does(pair, make_optimizer):
    giver = stepped(make_stages(1)[0], make_optimizer)
    taker = stepped(make_stages(2)[1], make_optimizer, num_steps=0)
    copied(pair, giver, taker)
    for module, optimizer in (giver, taker):
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * number)
        optimizer.step()
    assert held(*taker) == held(*giver)


class Mixed(nn.Module):
    """Numbers of every kind and form, with bits that no computation makes."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=generator).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 3, generator=generator).t())
        for number, dtype in enumerate(DTYPES):
            drawn = torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=generator)
            self.register_buffer(f"odd{number}", drawn.view(dtype))
        self.register_buffer("switches", torch.rand(7, generator=generator) < 0.5)
        self.register_buffer("alone", torch.randn((), generator=generator, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 3, dtype=torch.float16))
        self.register_buffer("none", torch.empty(0))


def test_numbers_of_every_type_and_form_come_over_bit_for_bit(pair):
    giver, taker = stepped(Mixed(1), adamw), stepped(Mixed(2), adamw, seed=3)
    assert held(*giver) != held(*taker)
    copied(pair, giver, taker)
    assert held(*taker) == held(*giver)
    assert {value.dtype for value in taker[0].state_dict().values()} == {*DTYPES, torch.bool}
    assert taker[0].turned.stride() == (1, 3)


def test_a_stage_that_holds_nothing_is_copied_too(pair):
    assert copied(pair, stepped(nn.Tanh(), adamw), stepped(nn.Tanh(), adamw)) == [0, 0]


def test_what_was_got_is_the_takers_own(pair):
    giver, taker = stepped(make_stages(1)[0], sgd), stepped(make_stages(2)[1], sgd)
    copied(pair, giver, taker)
    before = held(*taker)
    stepped(giver[0], sgd, seed=5)
    assert held(*taker) == before


def test_one_gives_to_several_in_turn():
    giver, takers = stepped(make_stages(1)[0], adamw), [stepped(make_stages(2)[1], adamw, seed=seed) for seed in (4, 5)]
    with connected([GIVER, TAKER, OTHER]) as transports:
        one, two, three = (each.host for each in transports)
        at_once(
            lambda: [send_state(one, to, *giver) for to in (TAKER, OTHER)],
            lambda: receive_state(two, GIVER, *takers[0]),
            lambda: receive_state(three, GIVER, *takers[1]),
        )
    assert held(*takers[0]) == held(*takers[1]) == held(*giver)


# What goes wrong.


class Damaging:
    """A channel that changes one byte of one message: the header's length and digest, the header, the tensors."""

    def __init__(self, transport, message, index):
        self._channel, self._message, self._index, self._num_sent = transport.host, message, index, 0

    def send_bytes(self, to, body, tag):
        if self._num_sent == self._message:
            body = body.clone()
            body[self._index] ^= 1
        self._num_sent += 1
        self._channel.send_bytes(to, body, tag)


class Leaving:
    """A channel that breaks after some messages, as that of a process that is killed."""

    def __init__(self, transport, num_messages):
        self._transport, self._channel, self._left = transport, transport.host, num_messages

    def send_bytes(self, to, body, tag):
        if self._left == 0:
            self._transport.abort()
        self._left -= 1
        self._channel.send_bytes(to, body, tag)


class Noting:
    """A channel to nobody, which keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send_bytes(self, to, body, tag):
        self.sent.append(bytes(body.tolist()))


def refused(bad_channel, giver):
    """Why somebody who holds another state does not take what `giver` sends over a bad channel; it keeps what it had."""
    taker = stepped(make_stages(2)[1], adamw, seed=4)
    before = held(*taker)
    with connected([GIVER, TAKER]) as (one, other), ThreadPoolExecutor(1) as pool:
        giving = pool.submit(send_state, bad_channel(one), TAKER, *giver)
        with pytest.raises(TransportBroken) as broken:
            receive_state(other.host, GIVER, *taker)
        other.abort()
        assert giving.exception(30) is None or isinstance(giving.exception(), TransportBroken)
    assert held(*taker) == before
    return str(broken.value)


CHANGED = "what came from W0_1 is not what it sent: its SHA-256 differs"


@pytest.mark.parametrize(("message", "index"), [(0, -1), (1, 0), (1, 40), (1, -1), (2, 0), (2, 1000), (2, -1)])
def test_a_byte_that_was_changed_on_its_way_is_noticed_and_nothing_is_used(message, index):
    giver = stepped(make_stages(1)[0], adamw)
    assert refused(lambda transport: Damaging(transport, message, index), giver) == CHANGED


def test_a_digit_that_was_changed_in_the_optimizers_learning_rate_is_noticed():
    giver, noting = stepped(make_stages(1)[0], adamw), Noting()
    send_state(noting, TAKER, *giver)
    rate = rb"\"lr\", 0.01"
    index = noting.sent[1].index(rate) + len(rate) - 1
    assert refused(lambda transport: Damaging(transport, 1, index), giver) == CHANGED


@pytest.mark.parametrize("num_messages", [0, 1, 2])
def test_a_peer_that_goes_away_in_the_middle_ends_the_wait(num_messages):
    giver = stepped(make_stages(1)[0], adamw)
    assert refused(lambda transport: Leaving(transport, num_messages), giver) != CHANGED
