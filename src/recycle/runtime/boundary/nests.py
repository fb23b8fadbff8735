"""Nests: a tensor, or tuples, lists and dicts of nests; leaves may also be None, numbers and texts, which never change.

Everything that passes between stages is a nest. Mostly it is one tensor, which is handled as if there were no nests. The tensors
of a nest have an order: that of tuples and lists, and in a dict that in which its keys were added.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Nest = Any
"""A tensor, or tuples, lists and dicts of nests."""
CONSTANTS = (type(None), bool, int, float, str)
"""The types of leaves that are no tensors. They are part of the structure: the same in all micro-batches."""


def tensors_in(nest: Nest) -> Iterator[Tensor]:
    """The tensors of a nest in order; what is neither a nest nor a tensor has none."""
    match nest:
        case Tensor():
            yield nest
        case tuple() | list():
            for part in nest:
                yield from tensors_in(part)
        case dict():
            for part in nest.values():
                yield from tensors_in(part)


def map_tensors(change: Callable[[Tensor], Tensor], nest: Nest) -> Nest:
    """The nest with other tensors. Tuples, lists and dicts of other classes become plain ones, but for named tuples."""
    match nest:
        case Tensor():
            return change(nest)
        case tuple() if hasattr(nest, "_fields"):
            return type(nest)(*(map_tensors(change, part) for part in nest))
        case tuple() | list():
            made = [map_tensors(change, part) for part in nest]
            return tuple(made) if isinstance(nest, tuple) else made
        case dict():
            return {key: map_tensors(change, part) for key, part in nest.items()}
    return nest


def num_samples_in(nest: Nest) -> int:
    """The number of samples of a micro-batch: the length of its first tensor that has one."""
    return next((len(tensor) for tensor in tensors_in(nest) if tensor.dim()), 1)


def nest_bytes(nest: Nest) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(nest))


def unsendable_part(nest: Nest) -> str | None:
    """The name of the type of the first leaf that cannot be in a nest; None if there is none."""
    match nest:
        case tuple() if hasattr(nest, "_fields"):
            return type(nest).__name__
        case tuple() | list():
            return next((found for part in nest if (found := unsendable_part(part)) is not None), None)
        case dict():
            if not all(isinstance(key, str) for key in nest):
                return "dict whose keys are no texts"
            return next((found for part in nest.values() if (found := unsendable_part(part)) is not None), None)
    return None if isinstance(nest, (Tensor, *CONSTANTS)) else type(nest).__name__


def described(nest: Nest) -> str:
    """What a nest is, in a few words."""
    match nest:
        case Tensor():
            return "a tensor"
        case dict():
            return f"a dict of {', '.join(map(str, nest)) or 'nothing'}"
        case tuple() | list():
            return f"a {'tuple' if isinstance(nest, tuple) else 'list'} of {len(nest)}"
    return f"a {type(nest).__name__}"
