"""Decoupled BackProp: `defer_weights` splits the backward pass of any module into I and W, on autograd's public interface.

It replaces every Linear of a module (and GPT-2's Conv1D) by a product whose backward returns the gradient of its input, and puts
the factors of the weight's gradient on a `Tape`; on a GPU also those of the bias. So autograd's backward pass is I: it passes the
gradient on, and accumulates the gradients of all other parameters (biases, norms, embeddings, convolutions), which are cheap or
cannot be deferred. Playing the tape is W.

Other layers are left to autograd and are part of I: correct for every module, fast where Linears dominate. Without a tape the
backward pass computes all gradients. Between I and W a tape holds the inputs and output gradients of the deferred products, and
nothing else of the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recycle.runtime.compute.gradients import Sums


@dataclass(frozen=True, slots=True)
class _Linear:
    """A Linear, y = x w^T + b, or with `is_transposed` y = x w + b, and the deferral of its module."""

    module: nn.Module
    is_transposed: bool
    deferral: "Deferral"


class _Product(NamedTuple):
    """One use of a Linear: its input and output gradient as matrices, from which the weight's gradient is computed."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor | None
    is_transposed: bool

    def add_to(self, sums: Sums) -> None:
        sums.add_product(self.weight, *self.factors())
        if self.bias is not None:  # a product with ones runs at memory bandwidth, and adds in place
            sums.add_product(self.bias, self.dy.new_ones(1, len(self.dy)), self.dy)

    def parameters(self) -> frozenset[int]:
        """The ids of the parameters that it adds to."""
        return frozenset(id(parameter) for parameter in (self.weight, self.bias) if parameter is not None)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the gradient of the weight."""
        return (self.x.t(), self.dy) if self.is_transposed else (self.dy.t(), self.x)

    def gradient(self) -> Tensor:
        left, right = self.factors()
        return (left @ right).to(self.weight.dtype)


@dataclass(slots=True)
class Tape:
    """The deferred products of one micro-batch, in the order in which their backward ran."""

    _products: list[_Product] = field(default_factory=list)

    def add(self, product: _Product) -> None:
        self._products.append(product)

    def play(self, sums: Sums) -> None:
        """Add every deferred gradient to `sums`; the tape is empty afterwards, and frees memory product by product."""
        for _ in self.play_by_product(sums):
            pass

    def play_by_product(self, sums: Sums) -> Iterator[None]:
        """Play the tape, with a pause after each product."""
        self._products.reverse()
        while self._products:
            self._products.pop().add_to(sums)
            yield

    def parameters(self) -> list[frozenset[int]]:
        """The ids of the parameters that each product adds to, in the order of the tape."""
        return [product.parameters() for product in self._products]

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The storages that the tape keeps alive; several products may share one."""
        return (tensor.untyped_storage() for product in self._products for tensor in (product.x, product.dy))


class Deferral:
    """The tape of a module's products: that of the micro-batch whose I runs. Without a tape, nothing is deferred.

    While it is off, Linears are torch's own: for a forward pass whose backward pass will not be split, and for its recomputation
    under activation checkpointing. The tape is an attribute and not thread-local, because autograd has threads of its own.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.is_on = True

    @contextmanager
    def use(self, tape: Tape | None, is_on: bool = True) -> Iterator[None]:
        """Defer onto this tape inside the block, or be off."""
        self.tape, self.is_on = tape, is_on
        try:
            yield
        finally:
            self.tape, self.is_on = None, True


def defer_weights(module: nn.Module) -> Deferral:
    """Change every Linear of `module` so that the gradients of its weights can be deferred; return what controls it."""
    deferral = Deferral()
    for part in module.modules():
        if _is_linear(part) or _is_conv1d(part):
            part.forward = partial(_forward, _Linear(part, _is_conv1d(part), deferral))
    return deferral


def _is_linear(module: nn.Module) -> bool:
    """Whether this is a Linear with the forward of `nn.Linear`; a subclass with another forward is left to autograd."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is the Linear of Hugging Face's GPT-2, recognised without importing `transformers`."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _forward(linear: _Linear, x: Tensor) -> Tensor:
    weight, bias = linear.module.weight, linear.module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Only a leaf can be deferred: a weight that was computed from parameters must pass its gradient on at once.
    is_deferrable = weight.is_leaf and weight.requires_grad and x.dim() >= 2
    if not is_deferrable or not linear.deferral.is_on or not torch.is_grad_enabled():
        return _product(x, weight, bias, linear.is_transposed)
    is_cast = torch.is_autocast_enabled(x.device.type)
    if x.requires_grad and not is_cast and _may_keep_input():
        return _hooked(linear, x, weight, bias)
    if is_cast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    made: Tensor = _Deferrable.apply(x, weight, bias, linear)  # type: ignore[no-untyped-call]
    return made


def _hooked(linear: _Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product with a detached weight and a hook on its output gradient: nearly free, where it is possible."""
    deferred_bias = _deferred_bias(bias)
    made = _product(x, weight.detach(), bias if deferred_bias is None else deferred_bias.detach(), linear.is_transposed)
    kept, version = x.detach(), x._version

    def watch(gradients: tuple[Tensor | None, ...]) -> None:
        dy = gradients[0]
        if dy is None:
            return
        if kept._version != version:
            raise RuntimeError(
                f"an input of shape {list(kept.shape)} of a Linear was modified in place before the backward pass needed it: "
                "change a copy of it instead"
            )
        product = _Product(kept.flatten(0, -2), dy.flatten(0, -2), weight, deferred_bias, linear.is_transposed)
        tape = linear.deferral.tape
        if tape is not None:
            tape.add(product)
        else:  # as autograd would
            _accumulate(weight, product.gradient())
            if deferred_bias is not None:
                _accumulate(deferred_bias, product.dy.sum(0).to(deferred_bias.dtype))

    # A later op, such as an activation function, may change a view in place; autograd then skips the node of the view.
    whole = made._base if made._is_view() else made
    assert whole is not None
    assert whole.grad_fn is not None
    whole.grad_fn.register_prehook(watch)
    return made


def _deferred_bias(bias: Tensor | None) -> Tensor | None:
    """The bias, if its gradient is deferred like the weight's: on a GPU, where autograd's own sum of it is slow."""
    return bias if bias is not None and bias.is_cuda and bias.is_leaf and bias.requires_grad else None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _may_keep_input() -> bool:
    """Whether an input may be kept: not under hooks on saved tensors, as in activation checkpointing.

    torch has no public way to ask that; without the private one, the slower `_Deferrable` is always used.
    """
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return ask is not None and ask(False) is None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    if not is_transposed:
        # Of an input that is not contiguous, torch makes one product or many, by whether the weight requires a gradient,
        # and on some processors their bits differ.
        return nn.functional.linear(x.contiguous(), weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    made = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*x.shape[:-1], weight.shape[1])


class _Deferrable(torch.autograd.Function):
    """A product whose backward returns dx and db, and puts the factors of dW on the tape if there is one.

    Under autocast x has the low precision. The parameters are cast for this product alone, and again in its backward: a copy
    of them for each micro-batch in flight would cost more memory than the cast costs time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: _Linear) -> Tensor:
        ctx.linear, ctx.weight, ctx.bias = linear, weight, bias
        ctx.save_for_backward(x, weight)
        return _product(x, _low(weight, x), _low(bias, x) if bias is not None else None, linear.is_transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        linear: _Linear = ctx.linear
        dy = gradients[0].flatten(0, -2)
        # The weight itself, not the saved tensor: hooks on saved tensors may return another tensor with the same values.
        product = _Product(x.detach().flatten(0, -2), dy, ctx.weight, _deferred_bias(ctx.bias), linear.is_transposed)
        low = _low(weight, x)
        dx = (dy @ (low.t() if linear.is_transposed else low)).view(x.shape) if ctx.needs_input_grad[0] else None
        tape = linear.deferral.tape
        is_bias_deferred = tape is not None and product.bias is not None
        db = dy.sum(0).to(ctx.bias.dtype) if ctx.needs_input_grad[2] and not is_bias_deferred else None
        if tape is None:
            return dx, product.gradient(), db, None
        tape.add(product)
        return dx, None, db, None


def _low(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)
