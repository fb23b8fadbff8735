"""`MicroBatches`: the samples of any micro-batch by (step, pipeline, index), without state, so that any worker can load it.

The samples of all micro-batches of all steps are numbered consecutively. Each pass over the data set has its own order, a
bijection that is computed and not stored: every sample occurs exactly once in a pass, and a worker that takes over a micro-batch
loads the same samples as its home worker.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from recycle.core.cluster import Shape
from recycle.core.errors import DatasetTooSmall, UserError
from recycle.runtime.boundary.nests import Nest, described
from recycle.runtime.compute.seeds import seed_of

_NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


class Dataset(Protocol):
    """A map-style data set of pairs (inputs, targets), such as torch's. Each is a tensor or a nest of tensors.

    A sample may also be a dict: it is the inputs, without its entry "labels", and these are the targets.

    It may have a `fingerprint`, a text that identifies the data: then a run refuses to resume with other data.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class MicroBatchSource(Protocol):
    """Micro-batches by their address: every worker that asks for an address gets the same samples."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]: ...


class MicroBatches:
    """The micro-batches of a data set, each of `microbatch` samples, in an order that depends only on the seed."""

    def __init__(self, dataset: Dataset, shape: Shape, microbatch: int, seed: int) -> None:
        if isinstance(microbatch, bool) or not isinstance(microbatch, int) or microbatch < 1:
            raise UserError(f"a micro-batch has {microbatch!r} samples, but it must be a whole number of at least 1")
        self._dataset, self._shape, self._microbatch, self._seed = dataset, shape, microbatch, seed
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"the dataset is a {type(dataset).__name__}, but it must be map-style: len(dataset) and dataset[number]"
            )
        self._num_samples = len(dataset)
        needed = shape.num_chains * microbatch
        if self._num_samples < needed:
            raise DatasetTooSmall(
                f"one step needs {needed} samples ({shape.num_pipelines} pipelines of {shape.num_microbatches} micro-batches of "
                f"{microbatch}), but the dataset has {self._num_samples}: give more data, or make fewer or smaller micro-batches"
            )

    def __repr__(self) -> str:
        fingerprint = getattr(self._dataset, "fingerprint", "")
        known = f" ({fingerprint})" if isinstance(fingerprint, str) and fingerprint else ""
        return f"micro-batches of {self._microbatch} out of {self._num_samples} samples{known}, seed {self._seed}"

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]:
        """Return inputs and targets of a micro-batch, with the samples stacked along a new first dimension."""
        if (found := len(self._dataset)) != self._num_samples:
            raise UserError(
                f"the dataset had {self._num_samples} samples when the run began, and has {found} now: which sample comes when "
                "would change; give it a fixed length"
            )
        return joined_samples(self._dataset, self.numbers(step, pipeline, index))

    def numbers(self, step: int, pipeline: int, index: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `index` of `pipeline` in iteration `step`."""
        assert step >= 0
        assert 0 <= pipeline < self._shape.num_pipelines
        assert 0 <= index < self._shape.num_microbatches
        chain = pipeline * self._shape.num_microbatches + index
        start = (step * self._shape.num_chains + chain) * self._microbatch
        return [self._sample(number) for number in range(start, start + self._microbatch)]

    def _sample(self, number: int) -> int:
        data_pass, position = divmod(number, self._num_samples)
        return shuffled(position, self._num_samples, seed_of(self._seed, "order", data_pass))


class OrderedMicroBatches:
    """The micro-batches of a data set in its own order, each sample once; samples that fill no whole one are left out."""

    def __init__(self, dataset: Dataset, microbatch: int) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"the evaluation data are a {type(dataset).__name__}, but they must be map-style: len(data) and data[number]"
            )
        self._dataset, self._microbatch = dataset, microbatch
        if len(dataset) < microbatch:
            raise DatasetTooSmall(
                f"the evaluation data have {len(dataset)} samples, but a micro-batch has {microbatch}: give more of them"
            )

    def __len__(self) -> int:
        return len(self._dataset) // self._microbatch

    def __getitem__(self, number: int) -> tuple[Nest, Nest]:
        first = number * self._microbatch
        return joined_samples(self._dataset, range(first, first + self._microbatch))


def joined_samples(dataset: Dataset, numbers: Sequence[int]) -> tuple[Nest, Nest]:
    """The inputs and the targets of these samples, stacked along a new first dimension."""
    samples = [_checked(dataset[number], number) for number in numbers]
    return _joined([x for x, _ in samples], numbers), _joined([y for _, y in samples], numbers)


def shuffled(position: int, size: int, seed: int) -> int:
    """Return the item at `position` of the permutation of range(size) that the seed selects.

    A Feistel network permutes the numbers of 2h bits, whatever its round function is. It is applied until the result is below
    `size` (cycle walking): this ends because permutations consist of cycles, and soon because 4^h is at most four times `size`
    (and at least 4).
    """
    assert 0 <= position < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed)
    position = _permuted(position, half_bits, keys)
    while position >= size:
        position = _permuted(position, half_bits, keys)
    return position


def _permuted(number: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << half_bits | right


def _mixed(number: int) -> int:
    """Spread every bit of a 64-bit number over all of them (the finalizer of SplitMix64)."""
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _MASK_64
    return number ^ number >> 31


@lru_cache(maxsize=64)
def _keys(seed: int) -> tuple[int, ...]:
    return tuple(seed_of(seed, "round", number) for number in range(_NUM_ROUNDS))


def _checked(sample: object, number: int) -> tuple[Nest, Nest]:
    match sample:
        case (Tensor() as inputs, Tensor() as targets):
            return inputs, targets
        case {"labels": labels, **rest}:
            return _tensors(rest, number), _tensors(labels, number)
        case (inputs, targets):
            return _tensors(inputs, number), _tensors(targets, number)
    raise UserError(
        f"sample {number} of the dataset is a {type(sample).__name__}, but it must be a pair (inputs, targets) of tensors, or of "
        "tuples, lists and dicts of tensors, or a dict of them with an entry 'labels'"
    )


def _tensors(part: Any, number: int) -> Nest:
    """A part of a sample, with tensors in the place of numbers and of lists of numbers."""
    if isinstance(part, Tensor):
        return part
    if isinstance(part, Mapping):
        return {key: _tensors(value, number) for key, value in part.items()}
    if isinstance(part, list | tuple) and any(isinstance(each, Tensor | Mapping) for each in part):
        return tuple(_tensors(each, number) for each in part)
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"sample {number} of the dataset has a {type(part).__name__}, but it must have tensors or numbers: convert it"
        ) from None


def _joined(parts: Sequence[Nest], numbers: Sequence[int]) -> Nest:
    """One nest with the tensors of all samples, stacked; samples must have one structure."""
    first = parts[0]
    if isinstance(first, Tensor) and all(isinstance(part, Tensor) for part in parts):
        return _stacked(parts, numbers)
    for part, number in zip(parts, numbers, strict=True):
        if _keys_of(part) != _keys_of(first):
            raise UserError(
                f"samples {numbers[0]} and {number} of the dataset differ: one is {described(first)}, and the other "
                f"{described(part)}; those of a micro-batch must have the same entries"
            )
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts], numbers) for key in first}
    return tuple(_joined([part[index] for part in parts], numbers) for index in range(len(first)))


def _keys_of(part: Nest) -> object:
    if isinstance(part, Tensor):
        return None
    return list(part) if isinstance(part, dict) else len(part)


def _stacked(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    for tensor, number in zip(tensors, numbers, strict=True):
        if tensor.shape != tensors[0].shape:
            raise UserError(
                f"samples {numbers[0]} and {number} of the dataset have the shapes {list(tensors[0].shape)} and "
                f"{list(tensor.shape)}, but those of a micro-batch must be equal: pad or cut them"
            )
    return torch.stack(list(tensors))
