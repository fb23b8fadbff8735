"""`SampleStream`: one part of a dataset without numbers, read in order from any position; `StreamPosition` says which."""

import base64
import copy
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from recycle.core.errors import DataFailed, FileProblem, UserError
from recycle.runtime.compute.microbatches import generators_kept, sample_failed, seed_generators
from recycle.runtime.compute.seeds import seed_of

_VERSION = 1
# Of Hugging Face: its state does not have the samples in the buffer, so that others would come after a resume.
_WITHOUT_STATE = "BufferShuffledExamplesIterable"


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How much of a stream has been taken: micro-batches in all, passes, and samples of the present pass.

    `state` is what the stream itself says of it, None if it has no state: then the samples of the pass are read again.
    """

    num_microbatches: int = 0
    data_pass: int = 0
    num_samples: int = 0
    state: Any = None

    def to_text(self) -> str:
        """The position as text: JSON, or as torch saves it if that says more. A state that cannot be read safely is left out."""
        values = [_VERSION, self.num_microbatches, self.data_pass, self.num_samples, self.state]
        with suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(values)
            if json.loads(text) == values:
                return text
        body = io.BytesIO()
        try:
            torch.save(values, body)
            torch.load(io.BytesIO(body.getvalue()), weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError):
            return json.dumps([*values[:-1], None])
        return base64.b64encode(body.getvalue()).decode()

    @staticmethod
    def parse(text: str) -> "StreamPosition":
        """What `to_text` gave. Nothing but numbers, texts, tensors and nests of them is read.

        Raises:
            FileProblem: The text is that of another release, or was changed.
        """
        try:
            version, *numbers, state = json.loads(text) if text.startswith("[") else _loaded(text)
            num_microbatches, data_pass, num_samples = map(int, numbers)
        except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, EOFError) as problem:
            raise FileProblem(f"the position in a stream cannot be read ({type(problem).__name__}): it is corrupt") from None
        if version != _VERSION or min(num_microbatches, data_pass, num_samples) < 0:
            raise FileProblem(
                f"the position in a stream cannot be read: it is of another release (version {version}), or corrupt"
            )
        return StreamPosition(num_microbatches, data_pass, num_samples, state)


def _loaded(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text, validate=True)), weights_only=True)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read in order."""
    is_numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not is_numbered)


def refuse_one_way(dataset: Any) -> None:
    """Raise if the data can be read once only, or would begin at a position that only a whole reader knows."""
    if getattr(dataset, "_starting_state_dict", None):
        raise UserError(
            "the stream was restored to a position with load_state_dict, but a run begins at the first sample, or goes on where "
            "its own checkpoint was: give a new one, and resume with CheckpointOptions(resume=True)"
        )
    if hasattr(dataset, "__next__") and iter(dataset) is dataset:
        raise UserError(
            f"the dataset is a {type(dataset).__name__}, which can be read once only, but a worker that takes over must read it "
            "again: give an object whose __iter__ begins anew"
        )


def has_state(dataset: Any) -> bool:
    """Whether a stream, or the iterator that it makes, says where it is, so exactly that the same samples follow."""
    return _is_stateful(dataset) and not _loses_samples(dataset)


def _is_stateful(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _loses_samples(dataset: Any) -> bool:
    """Whether a stream of Hugging Face shuffles by a buffer."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == _WITHOUT_STATE:
            return True
        waiting += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else []
        waiting += getattr(part, "ex_iterables", ())
    return False


def num_parts_of(dataset: Any, num_chains: int) -> int:
    """Into how many parts a stream is divided: the most of equally many shards that the micro-batches of a step share evenly."""
    if not callable(getattr(dataset, "shard", None)):
        return 1
    return math.gcd(getattr(dataset, "num_shards", num_chains), num_chains)


class SampleStream:
    """Part `number` of `num_parts` of a stream, read from a position on. `on_sample` is called with every sample.

    The generators of torch, Python and NumPy are seeded for every sample by its place in the stream.
    """

    def __init__(
        self,
        dataset: Any,
        number: int,
        num_parts: int,
        seed: int,
        repeats: bool,
        position: StreamPosition,
        on_sample: Callable[[], None],
    ) -> None:
        self.num_microbatches = position.num_microbatches
        self._name = f"part {number} of {num_parts} of the stream" if num_parts > 1 else "the stream"
        self._seed, self._repeats, self._on_sample = seed_of(seed, "stream", number), repeats, on_sample
        self._data = dataset.shard(num_parts, number) if num_parts > 1 else dataset
        if num_parts == 1 and _is_stateful(dataset):
            self._data = copy.deepcopy(dataset)  # a state is put into the object itself
        self._pass, self._num_samples = position.data_pass, 0
        self._iterator: Iterator[Any]
        self._begin_pass(position.state)
        if position.state is not None:
            self._num_samples = position.num_samples
        while self._num_samples < position.num_samples:
            self._next()

    def take(self, num_samples: int) -> tuple[list[Any], list[int]]:
        """The samples of the next micro-batch, and their numbers in the present pass."""
        with generators_kept():
            numbered = [self._next() for _ in range(num_samples)]
        self.num_microbatches += 1
        return [sample for _, sample in numbered], [number for number, _ in numbered]

    def position(self) -> StreamPosition:
        state = None
        if _is_stateful(self._data):
            state = self._data.state_dict() if has_state(self._data) else None
        elif _is_stateful(self._iterator):
            state = self._iterator.state_dict()  # type: ignore[attr-defined]
        return StreamPosition(self.num_microbatches, self._pass, self._num_samples, copy.deepcopy(state))

    def _begin_pass(self, state: Any = None) -> None:
        self._num_samples = 0
        if self._pass and callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(self._pass)
        if state is not None and _is_stateful(self._data):
            self._data.load_state_dict(state)
        self._iterator = iter(self._data)
        if state is not None and _is_stateful(self._iterator) and not _is_stateful(self._data):
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]

    def _next(self) -> tuple[int, Any]:
        while True:
            seed_generators(seed_of(self._seed, self._pass, self._num_samples))
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._refuse_end()
                self._pass += 1
                self._begin_pass()
                continue
            except UserError:
                raise
            except Exception as problem:
                raise sample_failed(f"sample {self._num_samples} of {self._name}", problem) from problem
            self._num_samples += 1
            self._on_sample()
            return self._num_samples - 1, sample

    def _refuse_end(self) -> None:
        if not self._num_samples:
            raise DataFailed(f"{self._name} is empty: give data, or fewer micro-batches")
        if not self._repeats:
            raise DataFailed(
                f"{self._name} ended after {self._num_samples} samples, {self.num_microbatches} micro-batches: give more data, "
                "train for fewer steps, or let it begin anew with repeats=True"
            )
