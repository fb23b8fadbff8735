"""The checksum of a stage's state: equal for equal bits, and different after any flipped bit of weights or optimizer."""

import copy

import pytest
import torch
from torch import nn

from recycle.runtime.compute.state_digests import state_checksum


def trained(make, dtype=torch.float32):
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    optimizer = make(module.parameters())
    for _ in range(2):
        module(torch.ones(2, 5, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [adam, sgd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_flipped_bit_of_any_number_changes_it(make, dtype):
    _, optimizer = trained(make, dtype)
    before = state_checksum(optimizer)
    assert before == state_checksum(trained(make, dtype)[1])
    tensors = [group for each in optimizer.param_groups for group in each["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.uint8)
        for index in {0, len(bits) // 2, len(bits) - 1}:
            for bit in (1, 128):
                bits[index] ^= bit
                assert state_checksum(optimizer) != before
                bits[index] ^= bit
    assert state_checksum(optimizer) == before


def test_numbers_that_change_places_between_tensors_change_it():
    _, optimizer = trained(sgd)
    before = state_checksum(optimizer)
    weight, bias = optimizer.param_groups[0]["params"][:2]
    with torch.no_grad():
        first = weight.view(-1)[0].clone()
        weight.view(-1)[0] = bias[0]
        bias[0] = first
    assert state_checksum(optimizer) != before


def test_a_value_that_is_not_a_number_is_seen():
    _, optimizer = trained(adam)
    other = copy.deepcopy(optimizer)
    with torch.no_grad():
        other.param_groups[0]["params"][0][0, 0] = float("nan")
    assert state_checksum(other) != state_checksum(optimizer)


def test_a_stage_without_parameters_has_one_too():
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1)
    assert len(state_checksum(optimizer)) == 16
