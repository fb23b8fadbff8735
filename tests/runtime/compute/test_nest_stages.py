"""Stages that pass nests of tensors compute the gradients of the whole model, and refuse what has no gradient path."""

from functools import partial

import pytest
import torch
from torch import nn

from recycle.core.errors import Unsendable
from recycle.models.gpt import GptConfig, gpt_stages
from recycle.runtime.boundary.nests import tensors_in
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.gradients import make_sums
from recycle.runtime.compute.stage import OpOptions, Stage
from recycle.runtime.execute.evaluation import _evaluating
from tests.runtime.jobs import Numbers, make_stages

WIDTH = 6


class Two(nn.Module):
    """Two states, a mask and positions: the states go on changed, the rest as it is, and one state passes through."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        (left, kept), mask = given["states"], given["mask"]
        mixed = self.left(left) * mask[..., None] + self.right(kept).tanh()
        return {"states": (mixed, kept), "mask": mask, "positions": given["positions"], "scale": given["scale"]}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        x = self.inner(given["x"])
        return {"states": (x, x.sin()), "mask": given["mask"], "positions": torch.arange(4), "scale": 0.5}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, given):
        left, right = given["states"]
        return self.inner(left + right * given["scale"] + given["positions"][:, None])


def given():
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(3, 4, WIDTH, generator=generator), "mask": torch.rand(3, 4, generator=generator) > 0.4}


def loss(made, targets):
    return (made[..., 0] - targets["y"]).square().mean()


def make_modules():
    torch.manual_seed(3)
    return [First(), Two(), Two(), Last()]


TARGETS = {"y": torch.linspace(0, 1, 12).view(3, 4)}


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_gradients_of_stages_are_those_of_the_whole_model(is_split, is_exact):
    whole = make_modules()
    made = given()
    for module in whole:
        made = module(made)
    expected = loss(made, TARGETS)
    expected.backward()
    stages = [
        Stage(module, make_sums(module.parameters(), 1, is_exact), number, loss if number == 3 else None)
        for number, module in enumerate(make_modules())
    ]
    passed = given()
    for stage in stages:
        passed = stage.forward(0, passed, 7, TARGETS, is_split)
    assert passed.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = None
    for stage in reversed(stages):
        gradient = stage.backward_input(0, gradient) if is_split else stage.backward(0, gradient)
        if is_split:
            stage.backward_weight(0)
    assert gradient is None
    for stage, module in zip(stages, whole, strict=True):
        for mean, parameter in zip(stage.sums.means(1), module.parameters(), strict=True):
            assert torch.allclose(mean, parameter.grad, rtol=1e-4, atol=1e-6)


def test_what_is_passed_on_has_no_graph_and_says_what_has_a_gradient_path():
    stage = Stage(First(), make_sums([], 1, False), 0)
    made = stage.forward(0, given(), 7)
    assert [tensor.requires_grad for tensor in tensors_in(made)] == [True, True, False, False]
    assert all(tensor.grad_fn is None for tensor in tensors_in(made))


class Changed(nn.Linear):
    def __init__(self, change):
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x))


@pytest.mark.parametrize("change", [torch.Tensor.detach, lambda x: (x.detach(), x.argmax(-1))])
def test_an_output_without_a_gradient_path_is_refused(change):
    stage = Stage(Changed(change), make_sums([], 1, False), 1)
    with pytest.raises(Unsendable, match="what stage 1 returns has no gradient path to the parameters of stage 1"):
        stage.forward(0, torch.ones(2, WIDTH), 7)


def test_a_loss_without_a_gradient_path_is_refused():
    stage = Stage(Changed(lambda x: x), make_sums([], 1, False), 1, lambda made, targets: made.detach().mean())
    with pytest.raises(Unsendable, match="the loss has no gradient path"):
        stage.forward(0, torch.ones(2, WIDTH), 7, torch.ones(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: {"a": x, 3: x}, "returned dict whose keys are no texts, which cannot be sent"),
        (lambda x: (x, object()), "returned object, which cannot be sent"),
        (lambda x: (x.argmax(-1), x > 0), r"returned torch.bool, torch.int64, which has no gradient"),
        (lambda x: (x, x.to_sparse()), "returned a torch.sparse_coo tensor"),
        (lambda x: (), "returned no tensor, which has no gradient"),
    ],
)
def test_a_nest_that_cannot_be_sent_is_refused(change, words):
    stage = Stage(Changed(change), make_sums([], 1, False), 1)
    with pytest.raises(Unsendable, match=words):
        stage.forward(0, torch.ones(2, WIDTH), 7)


def test_a_float_tensor_that_no_parameter_made_gets_no_gradient():
    both = partial(lambda bias, x: (x, bias), torch.zeros(WIDTH))
    first, last = Stage(Changed(both), make_sums([], 1, False), 0), Stage(Sum(), make_sums([], 1, False), 1)
    passed = first.forward(0, torch.ones(2, WIDTH), 7)
    last.forward(0, passed, 7)
    gradient = last.backward(0, torch.ones(2, WIDTH))
    assert torch.equal(gradient, torch.ones(2, WIDTH))  # of x alone: no tuple


class Sum(nn.Module):
    def forward(self, given):
        return given[0] + given[1]


# Evaluation keeps nothing, and gives the same numbers.


def gpt_parts():
    return gpt_stages(GptConfig(context=16, width=16, num_heads=2, num_layers=3), 1, seed=1)[0], torch.arange(32).view(2, 16)


def transformer():
    return make_stages(1)[0].eval(), Numbers().get(0, 0, 0)[0]


@pytest.mark.parametrize("how", [OpOptions(), OpOptions(torch.bfloat16), OpOptions(recomputes=True)])
@pytest.mark.parametrize("make", [gpt_parts, transformer])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_an_evaluation_gives_what_a_forward_pass_gives_and_keeps_nothing(make, how):
    module, inputs = make()
    stage = Stage(module, make_sums(module.parameters(), 1, False), 0, None, how)
    stage.meter = ActivationMeter(module)
    with _evaluating(module):
        made = stage.evaluate(inputs, seed=3)
        assert stage.meter.held_bytes == stage.num_in_flight == 0
        assert not made.requires_grad
        assert torch.equal(made, stage.forward(0, inputs, 3))
    assert stage.meter.held_bytes > 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_evaluation_of_a_nest_says_the_same_as_a_forward_pass():
    stage = Stage(First(), make_sums([], 1, False), 0)
    one, other = stage.evaluate(given(), 7), stage.forward(0, given(), 7)
    assert all(torch.equal(*pair) for pair in zip(tensors_in(one), tensors_in(other), strict=True))
    assert not any(tensor.requires_grad for tensor in tensors_in(one))
