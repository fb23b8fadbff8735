"""Digests of weights, by which two runs are compared bit for bit, and a cheap checksum, by which peers find a flipped bit.

`digest` is a SHA-256. Peers of a stage hold the same bits: their `state_checksum` is a sum over the bits of all numbers of the
parameters and the optimizer state, modulo 2^64, weighted by tensor with odd factors: any change of one number changes it. It
reads the memory once, where it lies.
"""

import ctypes
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recycle.core.cluster import Worker
from recycle.runtime.compute.elastic_stage import layers_of, own_module

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15  # odd, and with many bits: sums of different tensors do not cancel each other
_MODULUS = 2**64


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, valid while the tensor lives. (torch's own way to it needs numpy.)"""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def digest(module: nn.Module) -> str:
    """The digest of a module: names and bits of its parameters and buffers."""
    made = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, Tensor):  # a module may keep extra state of its own beside its tensors
            made.update(name.encode())
            whole = value.detach().cpu().contiguous()
            made.update(tensor_bytes(whole))
    return made.hexdigest()


def stage_digest(module: nn.Module, is_by_layer: bool) -> str:
    """The digests of a stage's own layers one after the other, or one of the whole stage."""
    own = own_module(module)
    return "".join(digest(layer) for layer in layers_of(own)) if is_by_layer else digest(own)


def whole_digest(digests: Mapping[Worker, str]) -> str:
    """One digest of all stages in order, each by its first worker. If theirs are by layer, it is the same for any stages."""
    by_stage = {worker.stage: digests[worker] for worker in sorted(digests, reverse=True)}
    return hashlib.sha256("".join(digest for _, digest in sorted(by_stage.items())).encode()).hexdigest()


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
