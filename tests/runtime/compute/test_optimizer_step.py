"""Steps that are tried, settled or taken back: equal to those of plain torch bit for bit, with as little memory as is said."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from recycle.runtime.compute import optimizer_step
from recycle.runtime.compute.optimizer_step import Stepper

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
NUM, BYTES = 1000, 4
OPTIMIZERS: list[Make] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=False),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=True),  # it changes gradients
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    lambda parameters: Own(parameters, lr=0.01),
]


class Own(torch.optim.Adam):
    """An optimizer of a user, of which nobody knows whether it steps every parameter on its own. It counts its steps."""

    num_steps = 0

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        self.num_steps += 1
        return super().step(closure)


def parameters(num: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(NUM + 10 * each, generator=generator)) for each in range(num)]


def gradients(iteration: int, of: list[Tensor]) -> optimizer_step.Gradients:
    def made(first: int, end: int) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(iteration)
        drawn = [torch.randn(each.shape, generator=generator) for each in of]
        return [each if first <= number < end else None for number, each in enumerate(drawn)]

    return made


def states(optimizer: torch.optim.Optimizer) -> list[tuple[str, bytes]]:
    found = (optimizer.state[each] for group in optimizer.param_groups for each in group["params"])
    return [(name, torch.as_tensor(value).numpy().tobytes()) for own in found for name, value in sorted(own.items())]


def is_same(one: Stepper, values: list[Tensor], plain: torch.optim.Optimizer, others: list[Tensor]) -> bool:
    return all(map(torch.equal, values, others)) and states(one.optimizer) == states(plain)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two or three parameters each."""
    monkeypatch.setattr(optimizer_step, "_PART_BYTES", 2 * NUM * BYTES + 30 * BYTES)


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("is_lean", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_steps_that_are_tried_settled_or_taken_back_are_those_of_plain_torch(make: Make, is_lean: bool) -> None:
    own, others = parameters(), parameters()
    stepper, plain = Stepper(own, make, is_lean=is_lean), make(others)
    for iteration in range(4):
        if iteration != 1:  # the second step is made at once, the others are tried and taken back first
            before = [each.detach().clone() for each in own], states(stepper.optimizer) if iteration else None
            middle = 3 if stepper.can_step_in_parts else len(own)
            stepper.try_step(iteration, gradients(99, own), 0, middle)
            if middle < len(own):
                stepper.try_step(iteration, gradients(99, own), middle)
            assert not any(map(torch.equal, own, before[0]))
            stepper.take_back()
            assert all(map(torch.equal, own, before[0]))
            assert before[1] is None or states(stepper.optimizer) == before[1]
            stepper.try_step(iteration, gradients(iteration, own))
            tried = [each.detach().clone() for each in own]
            stepper.settle(iteration, gradients(iteration, own))
            assert all(map(torch.equal, own, tried))
        else:
            stepper.step(iteration, gradients(iteration, own), 1.0)
        for each, gradient in zip(others, gradients(iteration, others)(0, len(others)), strict=True):
            each.grad = gradient
        plain.step()
        assert is_same(stepper, own, plain, others)


def test_an_optimizer_of_a_user_steps_once_for_each_step_that_is_settled() -> None:
    own = parameters()
    stepper = Stepper(own, lambda given: Own(given, lr=0.01), is_lean=True)
    for iteration in range(3):
        stepper.try_step(iteration, gradients(iteration, own))
        stepper.settle(iteration, gradients(iteration, own))
    assert isinstance(stepper.optimizer, Own)
    assert stepper.optimizer.num_steps == 3


@pytest.mark.parametrize("is_lean", [False, True])
def test_a_step_for_good_keeps_no_copy_and_a_lean_one_that_is_tried_only_one_of_the_parameters(is_lean: bool) -> None:
    own = parameters()
    size = sum(each.nbytes for each in own)
    state = 2 * size + BYTES * len(own)  # AdamW counts the steps of each parameter in a tensor of its own
    stepper = Stepper(own, OPTIMIZERS[0], is_lean=is_lean)
    stepper.step(0, gradients(0, own), 1.0)
    assert stepper.held_bytes == size + state
    stepper.try_step(1, gradients(1, own))
    assert stepper.held_bytes == 2 * size + (1 if is_lean else 2) * state
    assert stepper.part_bytes == size


@pytest.mark.usefixtures("_small_parts")
def test_parts_cover_all_parameters_in_order_and_an_unknown_optimizer_has_one() -> None:
    own = parameters()
    parts = list(Stepper(own, OPTIMIZERS[0]).parts(1))
    assert parts == [(1, 3), (3, 5), (5, 6)]
    assert list(Stepper(own, lambda given: Own(given, lr=0.01)).parts(1)) == [(1, len(own))]
    assert list(Stepper([], OPTIMIZERS[0]).parts()) == []


def test_nothing_is_taken_back_or_settled_that_was_not_tried() -> None:
    stepper = Stepper(parameters(), OPTIMIZERS[0])
    with pytest.raises(AssertionError, match="no step to take back"):
        stepper.take_back()
    with pytest.raises(AssertionError, match="no step to settle"):
        stepper.settle(0, gradients(0, parameters()))
