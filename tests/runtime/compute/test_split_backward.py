"""I and W together are autograd's backward, for modules of every kind."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle.runtime.compute.split_backward import Tape, defer_weights

torch.set_num_threads(1)
WIDTH = 12


class Shared(nn.Module):
    """One Linear, used three times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(torch.tanh(self.linear(x)))))


class Tied(nn.Module):
    """One parameter that is an embedding and the weight of a Linear, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ids = (x[..., 0].detach().abs() * 100).long() % WIDTH
        hidden = torch.relu(self.mix(x + self.embedding(ids)))
        return nn.functional.linear(hidden, self.embedding.weight)


class Conv1D(nn.Module):
    """A Linear as Hugging Face's GPT-2 writes it: its weight is not transposed."""

    def __init__(self):
        super().__init__()
        self.nf = WIDTH
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(x.shape)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant) + x


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        return 3 * ctx.saved_tensors[0] ** 2 * dy


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.other(Cube.apply(self.one(x)))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Computed(nn.Module):
    """A weight that is itself computed from parameters cannot wait for its gradient."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x):
        return nn.functional.linear(x, self.left @ self.right)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


def frozen():
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    made[0].requires_grad_(False)
    made[2].bias.requires_grad_(False)
    return made


MODULES = {
    "a biased Linear alone": lambda: nn.Linear(WIDTH, WIDTH),
    "a Linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "an MLP with norms": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    ),
    "a transformer layer": lambda: nn.TransformerEncoderLayer(WIDTH, 3, 2 * WIDTH, dropout=0.2, batch_first=True),
    "a shared Linear": Shared,
    "a tied embedding": Tied,
    "GPT-2's Conv1D": Conv1D,
    "a checkpointed block": lambda: Checkpointed(False),
    "a checkpointed block, reentrant": lambda: Checkpointed(True),
    "activations in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Conv1D(), nn.ELU(inplace=True), nn.Linear(WIDTH, WIDTH)
    ),
    "a custom function": Custom,
    "a convolution": Convolution,
    "attention": Attention,
    "a computed weight": Computed,
    "an unused parameter": Unused,
    "frozen parameters": frozen,
    "spectral norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


class AddToGrad:
    """Gradients go where autograd puts them."""

    def add_product(self, parameter, left, right):
        gradient = (left @ right).to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def whole(module, x, dy, seed=3):
    """What autograd does in one pass."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_(True)
    torch.manual_seed(seed)
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad, [parameter.grad for parameter in module.parameters()]


def split(module, x, dy, seed=3):
    """The same in two passes."""
    module, x, tape = copy.deepcopy(module), x.clone().requires_grad_(True), Tape()
    deferral = defer_weights(module)
    torch.manual_seed(seed)
    y = module(x)
    with deferral.use(tape):
        y.backward(dy)
    tape.play(AddToGrad())
    return y.detach(), x.grad, [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("name", MODULES)
def test_two_passes_give_what_one_gives_bit_for_bit(name):
    torch.manual_seed(0)
    module, x, dy = MODULES[name](), torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    one, two = whole(module, x, dy), split(module, x, dy)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    for ours, theirs in zip(two[2], one[2], strict=True):
        if theirs is None:
            assert ours is None
        elif "shared" in name or "tied" in name:  # the same terms, added in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["an MLP with norms", "a transformer layer", "a shared Linear", "GPT-2's Conv1D", "attention"])
def test_the_same_holds_under_autocast(name):
    torch.manual_seed(0)
    module, x, dy = MODULES[name](), torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        one, two = whole(module, x, dy), split(module, x, dy)
    torch.testing.assert_close(one[1], two[1], rtol=0.02, atol=0.02)
    for ours, theirs in zip(two[2], one[2], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)


def test_the_first_pass_leaves_the_weights_of_products_and_nothing_else():
    torch.manual_seed(0)
    module = MODULES["an MLP with norms"]()
    x, tape, deferral = torch.randn(3, WIDTH, requires_grad=True), Tape(), defer_weights(module)
    y = module(x)
    with deferral.use(tape):
        y.backward(torch.ones_like(y))
    # A norm, a Linear, a Linear, a norm, each with a weight and a bias.
    given = [parameter.grad is not None for parameter in module.parameters()]
    assert given == [True, True, False, True, False, True, True, True]
    tape.play(AddToGrad())
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_without_a_tape_nothing_is_deferred(name):
    torch.manual_seed(0)
    module, x, dy = MODULES[name](), torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    one = whole(module, x, dy)
    defer_weights(module)
    for ours, theirs in zip(whole(module, x, dy)[2], one[2], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def held_bytes(tape):
    """The bytes that a tape keeps alive; a shared storage counts once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in tape.storages()}.values())


def test_between_the_passes_only_inputs_and_output_gradients_of_products_are_held():
    module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    x, tape, deferral = torch.randn(8, WIDTH, requires_grad=True), Tape(), defer_weights(module)
    y = module(x)
    with deferral.use(tape):
        y.backward(torch.ones_like(y))
    floats = 8 * (WIDTH + 4 * WIDTH) + 8 * (4 * WIDTH + WIDTH)
    assert held_bytes(tape) == 4 * floats
    tape.play(AddToGrad())
    assert held_bytes(tape) == 0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(["linear", "norm", "gelu", "relu in place", "dropout", "skip", "conv1d"]), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.integers(1, 3),
)
def test_random_stacks_are_split_as_they_are_whole(kinds, seed, batch):
    torch.manual_seed(seed)
    blocks = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "gelu": nn.GELU,
        "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        "dropout": lambda: nn.Dropout(0.5),
        "skip": lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True),
        "conv1d": Conv1D,
    }
    module = nn.Sequential(*(blocks[kind]() for kind in kinds))
    x, dy = torch.randn(batch, 4, WIDTH), torch.randn(batch, 4, WIDTH)
    one, two = whole(module, x, dy, seed), split(module, x, dy, seed)
    assert torch.equal(one[1], two[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(two[2], one[2], strict=True))
