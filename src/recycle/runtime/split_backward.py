"""Decoupled BackProp: a backward pass in two parts, for any module, on autograd's public interface.

`defer_weights` makes every Linear of a module (and GPT-2's Conv1D) an autograd function whose backward gives the gradient of its
input alone, and puts what the weight's gradient needs on a `Tape`. So the backward pass of autograd is I: it passes the
gradient on, and on its way accumulates the gradients of all other parameters (norms, embeddings, convolutions), which are cheap
or cannot be deferred. Playing the tape is W.

Whatever is not recognised is left to autograd and ends up in I: correct for every module, fast where Linears dominate. Without a
tape the same function gives all gradients at once. Between I and W a tape holds the inputs and the output gradients of the
deferred products, and nothing else of the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Sink(Protocol):
    """Where gradients of parameters go, once for each time that a parameter was used."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient."""
        ...

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the gradient `left` @ `right`."""
        ...


class _Product(NamedTuple):
    """One product y = x w^T + b, or with `is_transposed` y = x w + b: what its parameters' gradients are made from."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor | None
    is_transposed: bool

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the gradient of the weight."""
        x, dy = self.x.flatten(0, -2), self.dy.flatten(0, -2)
        return (x.t(), dy) if self.is_transposed else (dy.t(), x)

    def weight_gradient(self) -> Tensor | None:
        if not self.weight.requires_grad:
            return None
        left, right = self.factors()
        return (left @ right).to(self.weight.dtype)

    def bias_gradient(self) -> Tensor | None:
        if self.bias is None or not self.bias.requires_grad:
            return None
        return self.dy.flatten(0, -2).sum(0).to(self.bias.dtype)


@dataclass(slots=True)
class Tape:
    """The deferred products of one micro-batch, in the order in which their backward ran."""

    _products: list[_Product] = field(default_factory=list)

    def add(self, product: _Product) -> None:
        self._products.append(product)

    def play(self, sink: Sink) -> None:
        """Compute every deferred gradient and hand it over; the tape is empty after it, and gives memory back as it goes."""
        self._products.reverse()
        while self._products:
            product = self._products.pop()
            if product.weight.requires_grad:
                sink.add_product(product.weight, *product.factors())
            gradient = product.bias_gradient()
            if product.bias is not None and gradient is not None:
                sink.add(product.bias, gradient)

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """What the tape keeps alive; several products may share one."""
        return (tensor.untyped_storage() for product in self._products for tensor in (product.x, product.dy))

    @property
    def held_bytes(self) -> int:
        """How much that is; what is shared counts once."""
        return sum({storage.data_ptr(): storage.nbytes() for storage in self.storages()}.values())


class Deferral:
    """Which tape the products of a module go to: that of the micro-batch whose I runs. Without one, nothing is deferred.

    It is an attribute, not a context of a thread, because autograd may run a backward pass in threads of its own.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None

    @contextmanager
    def onto(self, tape: Tape) -> Iterator[None]:
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None


def defer_weights(module: nn.Module) -> Deferral:
    """Change every Linear of `module` so that its weights' gradients can wait, and return where they are sent from."""
    deferral = Deferral()
    for part in module.modules():
        if _is_linear(part) or _is_conv1d(part):
            part.forward = partial(_forward, part, deferral, _is_conv1d(part))
    return deferral


def _is_linear(module: nn.Module) -> bool:
    """A Linear that computes what a Linear computes; a subclass with a forward of its own is left alone."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_conv1d(module: nn.Module) -> bool:
    """The Linear of Hugging Face's GPT-2, told by its looks: `transformers` is not imported for it."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _forward(module: nn.Module, deferral: Deferral, is_transposed: bool, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Only a leaf may wait: a weight that was computed from parameters must pass its gradient on at once.
    if not torch.is_grad_enabled() or not weight.is_leaf or x.dim() < 2:
        return _product(x, weight, bias, is_transposed)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    made: Tensor = _Deferrable.apply(x, weight, bias, deferral, is_transposed)  # type: ignore[no-untyped-call]
    return made


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    if not is_transposed:
        return nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    made = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*x.shape[:-1], weight.shape[1])


class _Deferrable(torch.autograd.Function):
    """A product whose backward gives dx, and the parameters' gradients to a tape if there is one.

    Under autocast x comes in the low precision. The parameters are cast for this product alone, and again in its backward: a copy
    of them for each micro-batch in flight would cost more memory than the cast costs time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral, is_transposed: bool) -> Tensor:
        ctx.deferral, ctx.is_transposed, ctx.weight, ctx.bias = deferral, is_transposed, weight, bias
        ctx.save_for_backward(x, weight)
        return _product(x, _low(weight, x), _low(bias, x) if bias is not None else None, is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy, low = gradients[0].contiguous(), _low(weight, x)
        product = _Product(x.detach(), dy.detach(), ctx.weight, ctx.bias, ctx.is_transposed)
        dx = dy @ (low.t() if ctx.is_transposed else low) if ctx.needs_input_grad[0] else None
        tape: Tape | None = ctx.deferral.tape
        if tape is None:
            return dx, product.weight_gradient(), product.bias_gradient(), None, None
        tape.add(product)
        return dx, None, None, None, None


def _low(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)
