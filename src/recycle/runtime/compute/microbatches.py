"""Micro-batches by address: any worker can load any of them, without asking who loaded which before.

The samples of all micro-batches of all steps are numbered through. Each pass over the data has an order, a bijection that is
computed, not stored: a worker that takes over a micro-batch finds the very samples that its owner would have had.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from recycle.core.cluster import Shape
from recycle.core.errors import DatasetTooSmall, UserError
from recycle.runtime.compute.seeds import seed_of

_NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1


class Dataset(Protocol):
    """A map-style data set of pairs (inputs, targets), such as torch's.

    It may have a `fingerprint`, a text that tells it from others: then a run is not gone on with on other data.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> tuple[Tensor, Tensor]: ...


class MicroBatchSource(Protocol):
    """Micro-batches by their address: every worker that asks for an address gets the same samples."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]: ...


class MicroBatches:
    """The micro-batches of a data set, each of `microbatch` samples, in an order that depends on nothing but the seed."""

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

    def get(self, step: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a micro-batch, samples stacked along a new first dimension."""
        numbers = self.numbers(step, pipeline, index)
        samples = [_checked(self._dataset[number], number) for number in numbers]
        return _stacked([x for x, _ in samples], numbers), _stacked([y for _, y in samples], numbers)

    def numbers(self, step: int, pipeline: int, index: int) -> list[int]:
        """Return which samples of the data set the micro-batch `index` of `pipeline` has in iteration `step`."""
        assert step >= 0
        assert 0 <= pipeline < self._shape.num_pipelines
        assert 0 <= index < self._shape.num_microbatches
        chain = pipeline * self._shape.num_microbatches + index
        start = (step * self._shape.num_chains + chain) * self._microbatch
        return [self._sample(number) for number in range(start, start + self._microbatch)]

    def _sample(self, number: int) -> int:
        epoch, place = divmod(number, self._num_samples)
        return shuffled(place, self._num_samples, seed_of(self._seed, "order", epoch))


def shuffled(place: int, size: int, seed: int) -> int:
    """Return which of `size` things stands at `place` of an order that the seed picks: a bijection on range(size).

    A Feistel network permutes the numbers of 2h bits, whatever its round function is. From a place below `size` it is applied
    until it gives a number below `size` again, which happens since permutations run in cycles, and soon since 4^h is at most
    four times `size` (and 4 at least).
    """
    assert 0 <= place < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed)
    place = _permuted(place, half_bits, keys)
    while place >= size:
        place = _permuted(place, half_bits, keys)
    return place


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


def _checked(sample: object, number: int) -> tuple[Tensor, Tensor]:
    match sample:
        case (Tensor() as inputs, Tensor() as targets):
            return inputs, targets
    raise UserError(
        f"sample {number} of the dataset is a {type(sample).__name__}, but it must be a pair of tensors (inputs, targets)"
    )


def _stacked(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    for tensor, number in zip(tensors, numbers, strict=True):
        if tensor.shape != tensors[0].shape:
            raise UserError(
                f"samples {numbers[0]} and {number} of the dataset have the shapes {list(tensors[0].shape)} and "
                f"{list(tensor.shape)}, but those of a micro-batch must be equal: pad or cut them"
            )
    return torch.stack(list(tensors))
