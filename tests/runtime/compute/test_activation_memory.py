"""The meter counts what is live: held against every storage that torch makes, from its making to its death."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.split_backward import Tape
from recycle.runtime.compute.stage import OpOptions, Stage

torch.set_num_threads(1)
BATCH, CONTEXT, WIDTH = 2, 24, 32


class Tracker(TorchDispatchMode):
    """Adds up every storage that an op makes until it dies, whoever keeps it; those of `static` tensors do not count."""

    def __init__(self, static):
        super().__init__()
        self.live_bytes = 0
        self._known = {id(tensor.untyped_storage()) for tensor in static}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage):
        number, size_bytes = id(storage), storage.nbytes()
        if number not in self._known:
            self._known.add(number)
            self.live_bytes += size_bytes
            weakref.finalize(storage, self._forget, number, size_bytes)

    def _forget(self, number, size_bytes):
        self._known.discard(number)
        self.live_bytes -= size_bytes


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward pass.

    For each block, torch keeps 5 KB of random state, too, which it makes without an op: neither meter nor tracker sees it.
    """

    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def gpt(number, dropout=0.0):
    config = GptConfig(vocabulary=64, context=CONTEXT, width=WIDTH, num_heads=4, num_layers=6, dropout=dropout)
    return gpt_stages(config, 3, seed=1)[number]


def mlp():
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 32))


def conv_net():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.2))
    return nn.Sequential(body, head)


def ids():
    return torch.randint(64, (BATCH, CONTEXT))


def vectors():
    return torch.randn(BATCH, CONTEXT, WIDTH)


def images():
    return torch.randn(4, 3, 16, 16)


# name: the module, its number, what it is given, its loss, autocast; more are other options
CASES = {
    "the first stage of a GPT": (lambda: gpt(0), 0, ids, None, None),
    "a stage inside a GPT": (lambda: gpt(1), 1, vectors, None, None),
    "the last stage of a GPT": (lambda: gpt(2), 2, vectors, next_byte_loss, None),
    "a GPT with dropout": (lambda: gpt(1, dropout=0.2), 1, vectors, None, None),
    "the last stage of a GPT in bf16": (lambda: gpt(2), 2, vectors, next_byte_loss, torch.bfloat16),
    "an MLP": (mlp, 1, vectors, None, None),
    "a conv net": (conv_net, 1, images, None, None),
    "a GPT that is run again": (lambda: gpt(1), 1, vectors, None, None, True),
    "the last stage of a GPT that is run again": (lambda: gpt(2, dropout=0.2), 2, vectors, next_byte_loss, torch.bfloat16, True),
    "checkpoints": (lambda: Checkpointed(use_reentrant=False), 1, vectors, None, None),
    "reentrant checkpoints": (lambda: Checkpointed(use_reentrant=True), 1, vectors, None, None),
}


def make_stage(name):
    make, number, given, loss, *how = CASES[name]
    torch.manual_seed(7)
    module = make()
    stage = Stage(module, make_sums(module.parameters(), 4, is_exact=False), number, loss, OpOptions(*how))
    stage.meter = ActivationMeter(module)
    return stage, given, ids if loss is not None else lambda: None


def gradient_for(name, shape):
    """What comes back from the next stage: nothing, if this one made the loss."""
    return torch.ones(shape) if CASES[name][3] is None else None


def bytes_by_op(name):
    """What the meter says and what the tracker says, after every op of three micro-batches that are in flight together."""
    stage, given, targets = make_stage(name)
    tracker = Tracker([*stage.module.parameters(), *stage.module.buffers(), stage.sums.flat])
    found = {}

    def note(op):
        found[op] = (stage.meter.held_bytes, tracker.live_bytes)

    with tracker:
        shape = stage.forward(0, given(), 0, targets()).shape
        stage.backward(0, gradient_for(name, shape))
        note("nothing")
        for chain in range(3):
            stage.forward(chain, given(), chain, targets())
            note(f"F{chain}")
        for chain in (1, 0):
            stage.backward_input(chain, gradient_for(name, shape))
            note(f"I{chain}")
        stage.backward(2, gradient_for(name, shape))
        note("B2")
        for chain in (1, 0):
            stage.backward_weight(chain)
            note(f"W{chain}")
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_meter_counts_what_is_live_after_every_op(name):
    found = bytes_by_op(name)
    assert {op: measured for op, (measured, _) in found.items()} == {op: live for op, (_, live) in found.items()}
    assert found["nothing"] == found["W0"] == (0, 0)
    assert found["F2"][0] == 3 * found["F0"][0] > 0


def test_a_stage_inside_a_gpt_holds_what_can_be_counted_by_hand():
    found = bytes_by_op("a stage inside a GPT")
    unit, scores, norms = 4 * BATCH * CONTEXT * WIDTH, 4 * BATCH * CONTEXT * 4, 2 * 2 * 4 * BATCH * CONTEXT
    # In hidden states, a layer saves the input and the output of both norms, q, k and v, what attention made, and both sides of
    # the GELU; besides, a number a head and token from attention's soft-max, and two a norm and token. The output comes on top.
    assert found["F0"][0] == 2 * ((2 * (1 + 1) + 3 + 1 + 4 + 4) * unit + scores + norms) + unit
    # W needs the inputs (1, 1, 1, 4) and the output gradients (3, 1, 4, 1) of four Linears a layer.
    assert found["W1"][0] == 2 * (1 + 1 + 1 + 4 + 3 + 1 + 4 + 1) * unit


def gradients(name, is_metered):
    stage, given, targets = make_stage(name)
    stage.meter = stage.meter if is_metered else None
    made = stage.forward(0, given(), 3, targets())
    passed = stage.backward_input(0, gradient_for(name, made.shape))
    stage.backward_weight(0)
    return [made, stage.sums.flat] + ([] if passed is None else [passed])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_meter_changes_no_bit(name):
    for metered, plain in zip(gradients(name, True), gradients(name, False), strict=True):
        assert torch.equal(metered, plain)


class Stretch(nn.Module):
    """A stage that saves what it makes; `spoils` overwrites that before anyone has used it."""

    def __init__(self, spoils=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.spoils = spoils

    def forward(self, x):
        made = (x * self.weight).exp()
        return made.add_(1) if self.spoils else made


@pytest.mark.parametrize("is_metered", [True, False])
def test_a_saved_tensor_that_is_overwritten_is_noticed_with_a_meter_and_without(is_metered):
    module = Stretch(spoils=True)
    stage = Stage(module, make_sums(module.parameters(), 1, False), 1)
    stage.meter = ActivationMeter(module) if is_metered else None
    made = stage.forward(0, vectors(), 0)
    with pytest.raises(RuntimeError, match=r"modified.* in.?place.* version 1"):
        stage.backward(0, torch.ones_like(made))


def test_a_micro_batch_that_is_forgotten_leaves_nothing_alive():
    module = Stretch()
    stage = Stage(module, make_sums(module.parameters(), 1, False), 1)
    stage.meter = ActivationMeter(module)
    storage = weakref.ref(stage.forward(0, vectors(), 0).untyped_storage())
    assert storage() is not None
    stage.forget()
    assert storage() is None
    assert stage.meter.held_bytes == 0


def test_a_storage_counts_once_whoever_holds_a_view_of_it():
    meter, shared, own, other = ActivationMeter(nn.Identity()), torch.zeros(10, 4), torch.zeros(3), torch.zeros(5)
    meter.hold(0, shared, shared[2:], own)
    meter.hold(1, shared.t(), other)
    assert meter.held_bytes == 160 + 12 + 20
    meter.release(0)
    assert meter.held_bytes == 160 + 20
    meter.release(1)
    assert meter.held_bytes == 0
    assert meter.peak_bytes == 160 + 12 + 20


def test_a_meter_is_no_reason_for_a_tensor_to_stay():
    meter = ActivationMeter(nn.Identity())
    tensor = torch.zeros(3)
    meter.hold(0, tensor)
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is None


def test_what_is_dropped_within_a_forward_pass_does_not_count():
    meter, x = ActivationMeter(nn.Identity()), torch.zeros(8, requires_grad=True)
    with meter.forward(0):
        for _ in range(5):
            x.exp().exp()
        made = x.exp()
    assert meter.held_bytes == made.nbytes


def test_what_a_failed_forward_pass_saved_does_not_count():
    meter, x = ActivationMeter(nn.Identity()), torch.zeros(8, requires_grad=True)
    with pytest.raises(ZeroDivisionError), meter.forward(0):  # noqa: PT012 - what was saved before is the point
        made = x.exp()
        made / (1 // 0)
    assert meter.held_bytes == meter.peak_bytes == 0


def test_parameters_and_buffers_do_not_count_even_in_a_storage_that_they_got_later():
    module = nn.BatchNorm1d(8)
    meter = ActivationMeter(module)
    module.weight.data = torch.full((8,), 2.0)
    x = torch.randn(4, 8)
    with meter.forward(0):
        made = module(x * module.weight[None])
    product, mean, deviation = 4 * 8 * 4, 8 * 4, 8 * 4
    assert made.requires_grad
    assert meter.held_bytes == x.nbytes + product + mean + deviation


def test_a_tensor_without_a_storage_does_not_count():
    meter, sparse = ActivationMeter(nn.Identity()), torch.eye(4).to_sparse()
    with meter.forward(0):
        made = torch.sparse.mm(sparse, torch.ones(4, 2, requires_grad=True))
    meter.hold(0, sparse)
    assert meter.held_bytes == 0
    made.sum().backward()


def test_after_input_a_micro_batch_holds_its_tape_alone():
    meter, large, small = ActivationMeter(nn.Identity()), torch.zeros(100), torch.zeros(10)
    meter.hold(0, large)
    meter.hold(1, small)
    meter.after_input(0, Tape())
    assert meter.held_bytes == 40
    assert meter.peak_bytes == 440
