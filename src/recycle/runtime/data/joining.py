"""How samples become a micro-batch, beside stacking: by a user's collate function, or padded to the longest of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from recycle.core.errors import DataFailed, UserError
from recycle.runtime.boundary.nests import Nest, described, unsendable_part
from recycle.runtime.compute.microbatches import JoinSamples, StackedSamples, checked_pair
from recycle.runtime.data.data_options import Collate, DataOptions, Padding

_INPUTS, _TARGETS, _LABELS = "inputs", "targets", "labels"
_IGNORED_TARGET = -100
_Path = tuple[str | int, ...]


def make_join(options: DataOptions) -> JoinSamples | None:
    """How the options join samples; None if they are stacked."""
    if options.collate is not None:
        return CollatedSamples(options.collate, options.padding)
    return PaddedSamples(options.padding) if options.padding is not None else None


class CollatedSamples:
    """Micro-batches that a user's function makes. With `padding`, their second dimension may have any length up to its own."""

    def __init__(self, collate: Collate, padding: Padding | None = None) -> None:
        self._collate, self._padding = collate, padding

    def join(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]:
        try:
            made = self._collate(list(samples))
        except UserError:
            raise
        except Exception as problem:
            raise DataFailed(
                f"collate raised {type(problem).__name__} for the samples {_listed(numbers)}: {' '.join(str(problem).split())}"
            ) from problem
        if not isinstance(made, dict | tuple | list) or (not isinstance(made, dict) and len(made) != 2):
            raise DataFailed(
                f"collate made {described(made)} of the samples {_listed(numbers)}, but it must make a pair (inputs, targets), "
                f"or a dict with an entry '{_LABELS}'"
            )
        inputs, targets = checked_pair(tuple(made) if isinstance(made, list) else made, numbers[0])
        if (found := unsendable_part(inputs)) is not None:
            raise DataFailed(f"collate made a {found} of the samples {_listed(numbers)}, but a micro-batch has tensors")
        if self._padding is not None:
            _refuse_long(inputs, targets, self._padding, 1, f"the samples {_listed(numbers)}")
        return inputs, targets

    def largest(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]:
        inputs, targets = self.join(samples, numbers)
        if (padding := self._padding) is None:
            return inputs, targets
        lengthen = _Lengthen(padding, 1, lambda path: padding.max_length)
        return lengthen(inputs, (_INPUTS,)), lengthen(targets, (_TARGETS,))

    def __repr__(self) -> str:
        made_by = f"collated by {getattr(self._collate, '__qualname__', type(self._collate).__name__)}"
        return made_by if self._padding is None else f"{made_by} up to {self._padding.max_length}"


class PaddedSamples:
    """Samples that are padded to the longest of their micro-batch, and stacked."""

    def __init__(self, padding: Padding) -> None:
        self._padding, self._stacked = padding, StackedSamples()

    def join(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]:
        pairs = self._cut_pairs(samples, numbers)
        longest: dict[_Path, int] = {}
        for pair in pairs:
            for path, tensor in _leaves_of_pair(pair):
                longest[path] = max(longest.get(path, 0), _length(tensor, 0))
        step = self._padding.multiple_of
        rounded = {path: -(-length // step) * step for path, length in longest.items()}
        return self._stack(pairs, numbers, lambda path: rounded[path])

    def largest(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]:
        return self._stack(self._cut_pairs(samples, numbers), numbers, lambda path: self._padding.max_length)

    def _stack(
        self, pairs: Sequence[tuple[Nest, Nest]], numbers: Sequence[int], length_at: Callable[[_Path], int]
    ) -> tuple[Nest, Nest]:
        lengthen = _Lengthen(self._padding, 0, length_at)
        return self._stacked.join([(lengthen(x, (_INPUTS,)), lengthen(y, (_TARGETS,))) for x, y in pairs], numbers)

    def _cut_pairs(self, samples: Sequence[Any], numbers: Sequence[int]) -> list[tuple[Nest, Nest]]:
        pairs = [checked_pair(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        if not self._padding.truncates:
            for (inputs, targets), number in zip(pairs, numbers, strict=True):
                _refuse_long(inputs, targets, self._padding, 0, f"sample {number}")
            return pairs
        cut = _Shorten(self._padding)
        return [(cut(inputs, (_INPUTS,)), cut(targets, (_TARGETS,))) for inputs, targets in pairs]

    def __repr__(self) -> str:
        return f"padded up to {self._padding.max_length}" + (", and cut" if self._padding.truncates else "")


class _ByPath:
    """Changes the tensors of a nest that are padded, by the path of each: its root, then keys and indexes."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding

    def __call__(self, nest: Nest, path: _Path) -> Nest:
        match nest:
            case Tensor():
                return self.change(nest, path) if _is_padded(nest, path, self._padding) else nest
            case dict():
                return {key: self(part, (*path, key)) for key, part in nest.items()}
            case tuple() | list():
                return tuple(self(part, (*path, index)) for index, part in enumerate(nest))
        return nest

    def change(self, tensor: Tensor, path: _Path) -> Tensor:
        raise NotImplementedError


class _Lengthen(_ByPath):
    """Fills tensors to a length by their path, in dimension `dim`."""

    def __init__(self, padding: Padding, dim: int, length_at: Callable[[_Path], int]) -> None:
        super().__init__(padding)
        self._dim, self._length_at = dim, length_at

    def change(self, tensor: Tensor, path: _Path) -> Tensor:
        if tensor.dim() <= self._dim:
            return tensor
        missing = self._length_at(path) - tensor.shape[self._dim]
        behind = [0, 0] * (tensor.dim() - 1 - self._dim)
        return pad(tensor, [*behind, 0, missing], value=_fill(tensor, path, self._padding)) if missing else tensor


class _Shorten(_ByPath):
    """Cuts tensors to the greatest length."""

    def change(self, tensor: Tensor, path: _Path) -> Tensor:
        return tensor[: self._padding.max_length]


def _name(path: _Path) -> str:
    """The name of a tensor: its key, or that of the nearest part above it that has one."""
    return next(str(part) for part in reversed(path) if isinstance(part, str))


def _is_padded(tensor: Tensor, path: _Path, padding: Padding) -> bool:
    if not tensor.dim():
        return False
    names = padding.names
    return names is None or _name(path) in names or (path[0] == _TARGETS and _LABELS in names and len(path) == 1)


def _fill(tensor: Tensor, path: _Path, padding: Padding) -> float:
    usual = _IGNORED_TARGET if path[0] == _TARGETS and not tensor.is_floating_point() else 0
    if path == (_TARGETS,):
        return padding.values.get(_TARGETS, padding.values.get(_LABELS, usual))
    return padding.values.get(_name(path), usual)


def _leaves(nest: Nest, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
    match nest:
        case Tensor():
            yield path, nest
        case dict():
            for key, part in nest.items():
                yield from _leaves(part, (*path, key))
        case tuple() | list():
            for index, part in enumerate(nest):
                yield from _leaves(part, (*path, index))


def _leaves_of_pair(pair: tuple[Nest, Nest]) -> Iterator[tuple[_Path, Tensor]]:
    yield from _leaves(pair[0], (_INPUTS,))
    yield from _leaves(pair[1], (_TARGETS,))


def _length(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if tensor.dim() > dim else 0


def _refuse_long(inputs: Nest, targets: Nest, padding: Padding, dim: int, what: str) -> None:
    for path, tensor in _leaves_of_pair((inputs, targets)):
        if _is_padded(tensor, path, padding) and _length(tensor, dim) > padding.max_length:
            raise DataFailed(
                f"{what} of the dataset: {_name(path)} has a length of {_length(tensor, dim)}, more than max_length "
                f"{padding.max_length}: cut it, or set truncates"
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
