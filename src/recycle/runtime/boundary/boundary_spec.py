"""`BoundarySpec`: the nest that a stage sends to the next one, without its numbers; and a message as one tensor.

Every worker knows the spec before the first message. So a message has no header: one tensor travels as it is, and several lie one
behind the other in one tensor of bytes. The gradients that come back are those of the tensors with a gradient path. If
micro-batches have different shapes, a message has the size of the largest, and begins with the shapes of its tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recycle.core.errors import UserError
from recycle.runtime.boundary.auxiliary_losses import Carried
from recycle.runtime.boundary.nests import CONSTANTS, Nest, tensors_in

# Bytes at which each tensor of a message begins, as torch aligns tensors of their own: alignment decides how a product is
# computed, and so its last bits.
_ALIGNMENT = 256
_TENSOR, _CARRIED = "tensor", "carried"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that passes between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorSpec":
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def fits_in(self, most: "TensorSpec") -> bool:
        """Whether the tensor is like `most`, and no dimension of it is greater."""
        is_like = self.dtype == most.dtype and len(self.shape) == len(most.shape)
        return is_like and all(0 <= size <= limit for size, limit in zip(self.shape, most.shape, strict=True))

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


@cache
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class PackedTensors:
    """Several tensors as one message: one tensor is itself, and others are parts of a tensor of bytes.

    If shapes vary, `tensors` have the greatest ones, and the message begins with the dimensions of each, as 64-bit numbers.
    """

    def __init__(self, tensors: Sequence[TensorSpec], varies: bool = False) -> None:
        self.tensors, self._varies = tuple(tensors), varies
        self._is_itself = len(self.tensors) == 1 and not varies
        self._num_dims = sum(len(each.shape) for each in self.tensors) if varies else 0
        sizes = [_aligned(each.size_bytes) for each in self.tensors]
        *self._starts, total = accumulate(sizes, initial=_aligned(8 * self._num_dims))
        # Not empty, because some transports cannot send nothing.
        self.spec = self.tensors[0] if self._is_itself else TensorSpec((max(total, _ALIGNMENT),), torch.uint8)

    def fits(self, made: Sequence[TensorSpec]) -> bool:
        """Whether tensors can be sent as this message."""
        if not self._varies:
            return tuple(made) == self.tensors
        return len(made) == len(self.tensors) and all(one.fits_in(most) for one, most in zip(made, self.tensors, strict=True))

    def pack(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        if self._is_itself:
            return tensors[0]
        body = torch.empty(self.spec.shape, dtype=torch.uint8, device=device)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._num_dims:
            dims = torch.tensor([size for shape in shapes for size in shape])
            body[: 8 * self._num_dims].copy_(dims.view(torch.uint8))
        for part, tensor in zip(self._parts(body, shapes), tensors, strict=True):
            part.copy_(tensor.detach())
        return body

    def unpack(self, body: Tensor) -> list[Tensor]:
        """The tensors in a body. They are no views of it, so that autograd takes each for a tensor of its own."""
        if self._is_itself:
            return [body]
        return self._parts(body, self._shapes_in(body) if self._varies else [each.shape for each in self.tensors])

    def _shapes_in(self, body: Tensor) -> list[tuple[int, ...]]:
        dims = iter(body[: 8 * self._num_dims].cpu().view(torch.int64).tolist())
        shapes = [tuple(next(dims) for _ in each.shape) for each in self.tensors]
        for shape, most in zip(shapes, self.tensors, strict=True):
            if not TensorSpec(shape, most.dtype).fits_in(most):
                raise UserError(f"a message says that it has a tensor of shape {list(shape)}, more than {list(most.shape)}")
        return shapes

    def _parts(self, body: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        storage = body.untyped_storage()
        return [
            torch.empty(0, dtype=spec.dtype, device=body.device).set_(
                storage, start // spec.dtype.itemsize, shape, contiguous_strides(shape)
            )
            for start, spec, shape in zip(self._starts, self.tensors, shapes, strict=True)
        ]


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class BoundarySpec:
    """What passes from a stage to the next one: the structure of a nest, its tensors, and which of them have a gradient path.

    `structure` is made of tuples: ("tensor",), ("tuple", ...), ("list", ...), ("dict", (key, ...), ...), ("constant", value),
    and at the top ("carried", ..., ("tensor",)), if losses of layers travel with the nest.
    If it `varies`, `tensors` are the largest, and a micro-batch may have smaller ones.
    """

    structure: tuple[Any, ...]
    tensors: tuple[TensorSpec, ...]
    has_gradient: tuple[bool, ...]
    varies: bool = False

    @staticmethod
    def one_tensor(spec: TensorSpec, varies: bool = False) -> "BoundarySpec":
        return BoundarySpec((_TENSOR,), (spec,), (True,), varies)

    @staticmethod
    def of(nest: Nest, varies: bool = False) -> "BoundarySpec":
        """The spec of a nest. One tensor has a gradient path; of several, those that require a gradient."""
        if isinstance(nest, Tensor):
            return BoundarySpec.one_tensor(TensorSpec.of(nest), varies)
        tensors = list(tensors_in(nest))
        has_gradient = tuple(tensor.requires_grad for tensor in tensors)
        return BoundarySpec(_structure_of(nest), tuple(map(TensorSpec.of, tensors)), has_gradient, varies)

    def is_alike(self, nest: Nest) -> bool:
        """Whether a nest has this structure, these tensors and these gradient paths; its sizes may differ if they vary."""
        other = BoundarySpec.of(nest, self.varies)
        if not self.varies:
            return other == self
        kinds = [[(each.dtype, len(each.shape)) for each in spec.tensors] for spec in (self, other)]
        return (other.structure, other.has_gradient, kinds[1]) == (self.structure, self.has_gradient, kinds[0])

    def with_loss(self) -> "BoundarySpec":
        """The spec of what passes if the losses of layers travel with it."""
        number = TensorSpec((), torch.float32)
        return BoundarySpec(
            (_CARRIED, self.structure, (_TENSOR,)), (*self.tensors, number), (*self.has_gradient, False), self.varies
        )

    @property
    def carries_loss(self) -> bool:
        return bool(self.structure[0] == _CARRIED)

    @property
    def is_one_tensor(self) -> bool:
        return self.structure == (_TENSOR,)

    @cached_property
    def forwards(self) -> PackedTensors:
        """The message of an activation."""
        return PackedTensors(self.tensors, self.varies)

    @cached_property
    def backwards(self) -> PackedTensors:
        """The message of a gradient."""
        sent = [spec for spec, is_sent in zip(self.tensors, self.has_gradient, strict=True) if is_sent]
        return PackedTensors(sent, self.varies)

    def nest_of(self, tensors: Sequence[Tensor]) -> Nest:
        """The nest of these tensors; those with a gradient path require a gradient, if there are several."""
        if self.is_one_tensor:
            return tensors[0]
        for tensor, has_gradient in zip(tensors, self.has_gradient, strict=True):
            tensor.requires_grad_(has_gradient)
        rest = iter(tensors)
        made = _built(self.structure, rest)
        assert next(rest, None) is None
        return made

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"

    def to_json(self) -> dict[str, Any]:
        return {
            "structure": self.structure,
            "tensors": [[list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in self.tensors],
            "gradients": list(self.has_gradient),
            "varies": self.varies,
        }

    @staticmethod
    def parse(form: Mapping[str, Any]) -> "BoundarySpec":
        """What `to_json` gave, after it was JSON.

        Raises:
            UserError: The form is that of another release, or was changed.
        """
        try:
            tensors = tuple(TensorSpec(tuple(map(int, shape)), _dtype_of(name)) for shape, name in form["tensors"])
            varies = bool(form.get("varies", False))
            spec = BoundarySpec(_as_tuples(form["structure"]), tensors, tuple(map(bool, form["gradients"])), varies)
            spec.nest_of([torch.empty(0, dtype=each.dtype) for each in tensors])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration, AssertionError):
            raise UserError(f"{form!r} is not what passes between stages: give all machines the same release") from None
        return spec


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return found


def _structure_of(nest: Nest) -> tuple[Any, ...]:
    match nest:
        case Tensor():
            return (_TENSOR,)
        case Carried():
            return (_CARRIED, *map(_structure_of, nest))
        case tuple() | list():
            return ("tuple" if isinstance(nest, tuple) else "list", *map(_structure_of, nest))
        case dict():
            return ("dict", tuple(nest), *map(_structure_of, nest.values()))
    assert isinstance(nest, CONSTANTS)
    return ("constant", nest)


def _built(structure: tuple[Any, ...], tensors: Any) -> Nest:
    match structure:
        case ("tensor",):
            return next(tensors)
        case ("dict", keys, *parts):
            return dict(zip(keys, [_built(part, tensors) for part in parts], strict=True))
        case ("constant", value):
            return value
        case ("carried", inner, loss):
            return Carried(_built(inner, tensors), _built(loss, tensors))
        case ("tuple" | "list" as kind, *parts):
            made = [_built(part, tensors) for part in parts]
            return tuple(made) if kind == "tuple" else made
    raise AssertionError(structure)


def _as_tuples(form: Any) -> Any:
    return tuple(map(_as_tuples, form)) if isinstance(form, list | tuple) else form
