"""`MicroBatches`: the samples of any micro-batch by (step, pipeline, index), without state, so that any worker can load it.

The samples of all micro-batches of all steps are numbered consecutively. Each pass over the data set has its own order, a
bijection that is computed and not stored: every sample occurs exactly once in a pass, and a worker that takes over a micro-batch
loads the same samples as its home worker.
"""

import random
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from recycle.core.cluster import Shape
from recycle.core.errors import DataFailed, DatasetTooSmall, UserError
from recycle.runtime.boundary.nests import Nest, described
from recycle.runtime.compute.seeds import seed_of

_NUM_ROUNDS = 8
_MASK_64 = (1 << 64) - 1
HALVES = "inputs", "targets"
ReadSample = Callable[[int], Any]
"""Makes a sample, or one half of it, from its number."""


class Dataset(Protocol):
    """A map-style data set of pairs (inputs, targets), such as torch's. Each is a tensor or a nest of tensors.

    A sample may also be a dict: it is the inputs, without its entry "labels", and these are the targets.

    Optional methods `inputs(number)` and `targets(number)` make one half of a sample. Then the first stage makes no targets, and
    the last one no inputs, unless samples are padded or collated.

    It may have a `fingerprint`, a text that identifies the data: then a run refuses to resume with other data.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class MicroBatchSource(Protocol):
    """Micro-batches by their address: every worker that asks for an address gets the same samples."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]: ...


def read_part(source: MicroBatchSource, address: tuple[int, int, int], takes: tuple[bool, bool]) -> tuple[Nest, Nest]:
    """Inputs and targets of a micro-batch, or one of them, if that is all that is taken and it can be made alone."""
    if takes[0] == takes[1] or not getattr(source, "has_halves", False):
        return source.get(*address)
    half: Nest = source.get_half(*address, HALVES[takes[1]])  # type: ignore[attr-defined]
    return (half, None) if takes[0] else (None, half)


def largest_of(source: MicroBatchSource) -> tuple[Nest, Nest]:
    """A micro-batch of the greatest shapes that a source may make: the first one, if all have the same."""
    made: tuple[Nest, Nest] = source.largest() if hasattr(source, "largest") else source.get(0, 0, 0)
    return made


class SampleOrder(Protocol):
    """The order of samples: the number of the sample at each position of each pass over the data, of `pass_length` samples."""

    pass_length: int

    def sample_at(self, data_pass: int, position: int) -> int: ...


class JoinSamples(Protocol):
    """Makes inputs and targets of a micro-batch from its samples, whose numbers are for messages.

    A `largest` micro-batch has the greatest shapes that it may make of these samples.
    """

    def join(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]: ...

    def largest(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]: ...


class ShuffledOrder:
    """Every pass has an order of its own, which the seed selects."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.pass_length, self._seed = num_samples, seed

    def sample_at(self, data_pass: int, position: int) -> int:
        return shuffled(position, self.pass_length, seed_of(self._seed, "order", data_pass))


class StackedSamples:
    """Samples of one shape, stacked along a new first dimension."""

    def join(self, samples: Sequence[Any], numbers: Sequence[int]) -> tuple[Nest, Nest]:
        pairs = [checked_pair(sample, number) for sample, number in zip(samples, numbers, strict=True)]
        return _joined([x for x, _ in pairs], numbers), _joined([y for _, y in pairs], numbers)

    largest = join


class JoinedMicroBatches(ABC):
    """Micro-batches of samples that are joined. All of them have the structure of the first one that was made."""

    def __init__(self, join: JoinSamples | None) -> None:
        self._join, self._structure = join or StackedSamples(), SameStructure()

    def get(self, step: int, pipeline: int, index: int) -> tuple[Nest, Nest]:
        """Return inputs and targets of a micro-batch, with the samples along a first dimension."""
        return self._structure.checked(self._join.join(*self._samples(step, pipeline, index)), (step, pipeline, index))

    def largest(self) -> tuple[Nest, Nest]:
        """Return the first micro-batch, with the greatest shapes that a micro-batch may have."""
        return self._structure.checked(self._join.largest(*self._samples(0, 0, 0)), (0, 0, 0))

    @abstractmethod
    def _samples(self, step: int, pipeline: int, index: int) -> tuple[list[Any], list[int]]:
        """The samples of a micro-batch, and their numbers."""


class MicroBatches(JoinedMicroBatches):
    """The micro-batches of a data set, each of `microbatch` samples, in an order that depends only on the seed."""

    def __init__(
        self,
        dataset: Dataset,
        shape: Shape,
        microbatch: int,
        seed: int,
        order: SampleOrder | None = None,
        join: JoinSamples | None = None,
    ) -> None:
        super().__init__(join)
        if isinstance(microbatch, bool) or not isinstance(microbatch, int) or microbatch < 1:
            raise UserError(f"a micro-batch has {microbatch!r} samples, but it must be a whole number of at least 1")
        self._dataset, self._shape, self._microbatch, self._seed = dataset, shape, microbatch, seed
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"the dataset is a {type(dataset).__name__}, but it must be map-style: len(dataset) and dataset[number]"
            )
        self._num_samples = len(dataset)
        self._order = order or ShuffledOrder(self._num_samples, seed)
        needed = shape.num_chains * microbatch
        if (found := self._order.pass_length) < needed:
            what = "the dataset has" if found == self._num_samples else "the sampler of the loader draws"
            raise DatasetTooSmall(
                f"one step needs {needed} samples ({shape.num_pipelines} pipelines of {shape.num_microbatches} micro-batches of "
                f"{microbatch}), but {what} {found}: give more data, or make fewer or smaller micro-batches"
            )
        self._is_shuffled = order is None

    def __repr__(self) -> str:
        fingerprint = getattr(self._dataset, "fingerprint", "")
        known = f" ({fingerprint})" if isinstance(fingerprint, str) and fingerprint else ""
        how = "" if self._is_shuffled else f", {self._order!r}"
        how += "" if isinstance(self._join, StackedSamples) else f", {self._join!r}"
        return f"micro-batches of {self._microbatch} out of {self._num_samples} samples{known}, seed {self._seed}{how}"

    @property
    def has_halves(self) -> bool:
        """Whether inputs and targets can be made alone."""
        made_by = (getattr(self._dataset, name, None) for name in HALVES)
        return isinstance(self._join, StackedSamples) and all(map(callable, made_by))

    def get_half(self, step: int, pipeline: int, index: int, name: str) -> Nest:
        """Return the inputs or the targets of a micro-batch, as `name` says, without the other half."""
        assert name in HALVES
        samples, numbers = self._samples(step, pipeline, index, getattr(self._dataset, name))
        return _joined([_tensors(sample, number) for sample, number in zip(samples, numbers, strict=True)], numbers)

    def _samples(self, step: int, pipeline: int, index: int, read: ReadSample | None = None) -> tuple[list[Any], list[int]]:
        if (found := len(self._dataset)) != self._num_samples:
            raise UserError(
                f"the dataset had {self._num_samples} samples when the run began, and has {found} now: which sample comes when "
                "would change; give it a fixed length"
            )
        numbers, first = self.numbers(step, pipeline, index), self._first(step, pipeline, index)
        seeds = [seed_of(self._seed, "sample", first + offset) for offset in range(self._microbatch)]
        return read_samples(read or self._dataset.__getitem__, numbers, seeds), numbers

    def numbers(self, step: int, pipeline: int, index: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `index` of `pipeline` in iteration `step`."""
        start = self._first(step, pipeline, index)
        return [self._sample(number) for number in range(start, start + self._microbatch)]

    def _first(self, step: int, pipeline: int, index: int) -> int:
        """The number of all samples before a micro-batch."""
        assert step >= 0
        assert 0 <= pipeline < self._shape.num_pipelines
        assert 0 <= index < self._shape.num_microbatches
        return (step * self._shape.num_chains + pipeline * self._shape.num_microbatches + index) * self._microbatch

    def _sample(self, number: int) -> int:
        return self._order.sample_at(*divmod(number, self._order.pass_length))


class SameStructure:
    """Refuses micro-batches that have another structure, or other dtypes, than the first one."""

    def __init__(self) -> None:
        self._first: tuple[object, str] | None = None

    def checked(self, made: tuple[Nest, Nest], address: tuple[int, int, int]) -> tuple[Nest, Nest]:
        found = _outline(made)
        if self._first is None:
            self._first = found, f"{described(made[0])} and {described(made[1])}"
        elif found != self._first[0]:
            step, pipeline, index = address
            raise DataFailed(
                f"micro-batch {index} of pipeline {pipeline} in step {step + 1} has {described(made[0])} and "
                f"{described(made[1])}, but the first one has {self._first[1]}: all must have the same entries and dtypes"
            )
        return made


def _outline(nest: Nest) -> object:
    """The structure of a nest, with the dtypes and the numbers of dimensions of its tensors."""
    match nest:
        case Tensor():
            return nest.dtype, nest.dim()
        case dict():
            return [(key, _outline(part)) for key, part in nest.items()]
        case tuple() | list():
            return [_outline(part) for part in nest]
    return type(nest)


def read_samples(read: ReadSample, numbers: Sequence[int], seeds: Sequence[int]) -> list[Any]:
    """Read samples, each with the generators of torch, Python and NumPy seeded: so a sample may be drawn at random."""
    with generators_kept():
        return [_read(read, number, seed) for number, seed in zip(numbers, seeds, strict=True)]


def _read(read: ReadSample, number: int, seed: int) -> Any:
    seed_generators(seed)
    try:
        return read(number)
    except UserError:
        raise
    except Exception as problem:
        raise sample_failed(f"sample {number} of the dataset", problem) from problem


def sample_failed(what: str, problem: Exception) -> DataFailed:
    """The error for a sample that raised one: which, what, and where in its code."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    text = " ".join(str(problem).split())
    return DataFailed(f"{what} raised {type(problem).__name__}{where}: {text}; mend the dataset, or leave the sample out")


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the random state of torch's CPU generator, of Python and of NumPy, if it is loaded, at the end."""
    numpy, of_torch, of_python = sys.modules.get("numpy"), torch.default_generator.get_state(), random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


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


def checked_pair(sample: object, number: int) -> tuple[Nest, Nest]:
    """Inputs and targets of a sample, with tensors in the place of numbers; raise if it has none."""
    match sample:
        case (Tensor() as inputs, Tensor() as targets):
            return inputs, targets
        case {"labels": labels, **rest}:
            return _tensors(rest, number), _tensors(labels, number)
        case (inputs, targets):
            return _tensors(inputs, number), _tensors(targets, number)
    if isinstance(sample, dict):
        names = ", ".join(map(repr, sample))
        raise UserError(f"sample {number} of the dataset is a dict with {names}, but without an entry 'labels': add it")
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
