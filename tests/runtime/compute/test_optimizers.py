"""Any optimizer and scheduler of torch: a step taken back leaves no trace, checkpoints restore it, and rates are torch's own."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import recycle
from recycle.core.errors import UserError
from recycle.runtime.checkpoint.state import put_back, take_snapshot
from recycle.runtime.compute.learning_rate import TorchSchedule
from recycle.runtime.compute.optimizer_step import Stepper
from recycle.runtime.job_checks import refuse_unusable_optimizer
from tests.runtime.jobs import Numbers, greedy_plan, loss, small_stages


def two_groups(parameters):
    """No weight decay for biases and norms, and a smaller rate for them."""
    flat, matrices = ([each for each in parameters if (each.dim() < 2) is is_flat] for is_flat in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 0.002}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "groups": two_groups,
}
NAMES = sorted(OPTIMIZERS)


def make_module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def gradients(module, step):
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(each.shape, generator=generator) for each in module.parameters()]
    return lambda first, end: [each if first <= number < end else None for number, each in enumerate(drawn)]


def in_plain_torch(name, num_steps, scheduler=None):
    """The parameters after some steps of torch's own loop."""
    module = make_module()
    optimizer = OPTIMIZERS[name](list(module.parameters()))
    rates = scheduler(optimizer) if scheduler is not None else None
    for step in range(num_steps):
        for parameter, gradient in zip(module.parameters(), gradients(module, step)(0, 99), strict=True):
            parameter.grad = gradient
        optimizer.step()
        if rates is not None:
            rates.step()
    return list(module.parameters())


def is_same(module, expected):
    return all(torch.equal(one, other) for one, other in zip(module.parameters(), expected, strict=True))


@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_taken_back_leaves_no_trace(name, is_lean):
    module = make_module()
    stepper = Stepper(module.parameters(), OPTIMIZERS[name], is_lean=is_lean)
    for step in range(4):
        stepper.try_step(step, gradients(module, 100 + step))
        stepper.take_back()
        stepper.step(step, gradients(module, step), 1.0)
    assert is_same(module, in_plain_torch(name, 4))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_restores_the_optimizer(name):
    module = make_module()
    stepper = Stepper(module.parameters(), OPTIMIZERS[name])
    for step in range(2):
        stepper.step(step, gradients(module, step), 1.0)
    snapshot = take_snapshot(module, stepper.optimizer)
    other = make_module()
    resumed = Stepper(other.parameters(), OPTIMIZERS[name])
    put_back(snapshot, other, resumed.optimizer)
    for step in range(2, 4):
        resumed.step(step, gradients(other, step), 1.0)
    assert is_same(other, in_plain_torch(name, 4))


SCHEDULERS = {
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=5, eta_min=0.001),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=8, cycle_momentum=False),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.3, step_size_up=3, cycle_momentum=False),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_rates_are_those_of_the_scheduler_in_any_order_of_asking(name):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, expected = SCHEDULERS[name](optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if len(expected) < 8:
                scheduler.step()
    schedule = TorchSchedule(SCHEDULERS[name], 0.1)
    asked = [5, 0, 7, 3, 1, 2, 4, 6, 5]
    assert [0.1 * copy.deepcopy(schedule)(number) for number in asked] == pytest.approx([expected[number] for number in asked])


def test_a_stage_steps_by_the_rates_of_a_scheduler():
    module = make_module()
    stepper = Stepper(module.parameters(), OPTIMIZERS["nesterov"], TorchSchedule(SCHEDULERS["cosine"], 0.1))
    for step in range(4):
        stepper.step(step, gradients(module, step), 1.0)
    expected = in_plain_torch("nesterov", 4, SCHEDULERS["cosine"])
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(module.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("make", "rate", "says"),
    [
        (partial(lr_scheduler.ReduceLROnPlateau, patience=2), 0.1, "a ReduceLROnPlateau needs more than the number of a step"),
        (partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=8), 0.1, "give it cycle_momentum=False"),
        (lambda optimizer: 3, 0.1, "the scheduler is a int"),
        (lr_scheduler.StepLR, 0.1, "the scheduler cannot be made"),
        (SCHEDULERS["step"], 0, "the rate of a schedule is 0"),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_one_sentence(make, rate, says):
    with pytest.raises(UserError, match=says):
        TorchSchedule(make, rate)


def job_with(optimizer):
    return recycle.Job(greedy_plan((2, 2, 2)), small_stages(2), Numbers(), loss, optimizer, 2)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (torch.optim.LBFGS, "LBFGS computes the loss several times in a step"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients only"),
        (lambda parameters: 3, "makes a int, but it must make a torch optimizer"),
        (lambda parameters: torch.optim.SGD(make_module().parameters(), 0.1), "other parameters than it was given"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_one_sentence(optimizer, says):
    with pytest.raises(UserError, match=says):
        refuse_unusable_optimizer(job_with(optimizer))


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_that_can_be_used_is_not_refused(name):
    refuse_unusable_optimizer(job_with(OPTIMIZERS[name]))
