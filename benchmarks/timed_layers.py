"""TimedLinear: a layer that sleeps for the time of its ops, so that a few cores are enough for the workers of a whole cluster."""

import time

import torch
from torch import Tensor, nn


class _Timed(torch.autograd.Function):
    """Returns what it is given, and takes the time of an op: forward, and twice as long for both parts of a backward pass."""

    @staticmethod
    def forward(ctx: object, given: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        time.sleep(seconds)
        return given.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


class TimedLinear(nn.Linear):
    """A square layer whose forward pass takes `op_ms`, and its backward pass twice as long."""

    def __init__(self, width: int, op_ms: float) -> None:
        super().__init__(width, width)
        self.op_ms = op_ms

    def forward(self, given: Tensor) -> Tensor:
        timed: Tensor = _Timed.apply(super().forward(given), self.op_ms / 1e3)  # type: ignore[no-untyped-call]
        return timed
