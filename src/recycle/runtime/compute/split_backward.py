"""Decoupled BackProp: a backward pass in two parts, for any module, on autograd's public interface.

`defer_weights` makes every Linear of a module (and GPT-2's Conv1D) a product whose backward gives the gradient of its input, and
puts what the gradient of its weight needs on a `Tape`. So autograd's backward pass is I, and playing the tape is W. Whatever is
not recognised is left to autograd and ends up in I: correct for every module, fast where Linears dominate. Without a tape the
same function gives all gradients at once.
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
    """A Linear, y = x w^T + b, or with `is_transposed` y = x w + b, and where the products of its module go."""

    module: nn.Module
    is_transposed: bool
    deferral: "Deferral"


class _Product(NamedTuple):
    """One use of a Linear: what the gradient of its weight is made from, both as matrices."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor | None
    is_transposed: bool

    def add_to(self, sums: Sums) -> None:
        sums.add_product(self.weight, *self.factors())
        if self.bias is not None:  # a product with ones reads dy about as fast as memory gives it, and adds in place
            sums.add_product(self.bias, self.dy.new_ones(1, len(self.dy)), self.dy)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the gradient of the weight."""
        return (self.x.t(), self.dy) if self.is_transposed else (self.dy.t(), self.x)

    def gradient(self) -> Tensor:
        left, right = self.factors()
        return (left @ right).to(self.weight.dtype)


@dataclass(slots=True)
class Tape:
    """The deferred products of one micro-batch, in the order in which their backward ran."""

    products: list[_Product] = field(default_factory=list)

    def play(self, sums: Sums) -> None:
        """Add every deferred gradient to the sums; the tape is empty after it, and gives memory back as it goes."""
        self.products.reverse()
        while self.products:
            self.products.pop().add_to(sums)

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The storages that the tape keeps alive; several products may share one."""
        return (tensor.untyped_storage() for product in self.products for tensor in (product.x, product.dy))

    @property
    def held_bytes(self) -> int:
        """The size of these storages; a shared one counts once."""
        return sum({storage.data_ptr(): storage.nbytes() for storage in self.storages()}.values())


class Deferral:
    """Which tape the products of a module go to: that of the micro-batch whose I runs. Without one, nothing is deferred.

    While it is off, Linears are torch's own: for a forward pass whose backward pass will not be split, and for what that one
    computes again. They are attributes, not contexts of a thread, because autograd may run a backward pass in threads of its own.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

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
            part.forward = partial(_forward, _Linear(part, _is_conv1d(part), deferral))
    return deferral


def _is_linear(module: nn.Module) -> bool:
    """A Linear that computes what a Linear computes; a subclass with a forward of its own is left alone."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_conv1d(module: nn.Module) -> bool:
    """The Linear of Hugging Face's GPT-2, told by its looks: `transformers` is not imported for it."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def _forward(linear: _Linear, x: Tensor) -> Tensor:
    weight, bias = linear.module.weight, linear.module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Only a leaf may wait: a weight that was computed from parameters must pass its gradient on at once.
    may_wait = weight.is_leaf and weight.requires_grad and x.dim() >= 2
    if not may_wait or not linear.deferral.is_on or not torch.is_grad_enabled():
        return _product(x, weight, bias, linear.is_transposed)
    is_cast = torch.is_autocast_enabled(x.device.type)
    if x.requires_grad and not is_cast and _may_keep():
        return _watched(linear, x, weight, bias)
    if is_cast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    made: Tensor = _Deferrable.apply(x, weight, bias, linear)  # type: ignore[no-untyped-call]
    return made


def _watched(linear: _Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own product with a constant for a weight, whose output gradient is watched: all but free, where it is possible."""
    waiting = _waiting(bias)
    made = _product(x, weight.detach(), bias if waiting is None else waiting.detach(), linear.is_transposed)
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
        product = _Product(kept.flatten(0, -2), dy.flatten(0, -2), weight, waiting, linear.is_transposed)
        tape = linear.deferral.tape
        if tape is not None:
            tape.products.append(product)
        else:  # as autograd would
            _accumulate(weight, product.gradient())
            if waiting is not None:
                _accumulate(waiting, product.dy.sum(0).to(waiting.dtype))

    # What follows may change a view in place, an activation function for one, and then autograd goes past the node of the view.
    whole = made._base if made._is_view() else made
    assert whole is not None
    assert whole.grad_fn is not None
    whole.grad_fn.register_prehook(watch)
    return made


def _waiting(bias: Tensor | None) -> Tensor | None:
    """The bias, if its gradient shall wait like the weight's: on a GPU, where autograd's own sum of it is slow."""
    return bias if bias is not None and bias.is_cuda and bias.is_leaf and bias.requires_grad else None


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _may_keep() -> bool:
    """Whether an input can be kept as it is: not where somebody has a say in what is saved, such as activation checkpointing.

    torch does not tell that in public; a release that does not tell it at all takes the slower way always.
    """
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return ask is not None and ask(False) is None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    if not is_transposed:
        return nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    made = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return made.view(*x.shape[:-1], weight.shape[1])


class _Deferrable(torch.autograd.Function):
    """A product whose backward gives dx and db, and what dW needs to a tape if there is one.

    Under autocast x comes in the low precision. The parameters are cast for this product alone, and again in its backward: a copy
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
        # The weight itself, not what was saved: hooks on saved tensors may give back another tensor with the same values.
        product = _Product(x.detach().flatten(0, -2), dy, ctx.weight, _waiting(ctx.bias), linear.is_transposed)
        low = _low(weight, x)
        dx = (dy @ (low.t() if linear.is_transposed else low)).view(x.shape) if ctx.needs_input_grad[0] else None
        tape = linear.deferral.tape
        can_wait = tape is not None and product.bias is not None
        db = dy.sum(0).to(ctx.bias.dtype) if ctx.needs_input_grad[2] and not can_wait else None
        if tape is None:
            return dx, product.gradient(), db, None
        tape.products.append(product)
        return dx, None, db, None


def _low(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter if parameter.dtype == x.dtype else parameter.to(x.dtype)
