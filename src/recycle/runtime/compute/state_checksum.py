"""`state_checksum`: a cheap checksum of a stage's parameters and optimizer state, by which peers find a flipped bit.

Peers of a stage hold the same bits. The checksum is a sum over the bits of all numbers, modulo 2^64, weighted by tensor with odd
factors: any change of one number changes it. It reads the memory once, where it lies.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15  # odd, and with many bits: sums of different tensors do not cancel each other
_MODULUS = 2**64


def state_checksum(optimizer: Optimizer) -> str:
    """Return the checksum of the parameters of an optimizer and of their state, as 16 hexadecimal digits."""
    total, factor = 0, 1
    sums = [_bit_sum(tensor) for tensor in _tensors(optimizer)]
    # One transfer for all of them: on a GPU each would wait for everything before it.
    for value in torch.stack(sums).tolist() if sums else []:
        factor = factor * _FACTOR % _MODULUS
        total += value * factor
    return f"{total % _MODULUS:016x}"


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    device = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device
            yield parameter
            state = optimizer.state.get(parameter, {})
            for name in sorted(state):
                if isinstance(state[name], Tensor):
                    yield state[name].to(device)  # some optimizers count their steps on the CPU


def _bit_sum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WHOLE_NUMBERS[flat.element_size()]).sum(dtype=torch.int64)
