"""`pack`: sequences of any lengths, one behind the other, cut into samples of one length. No sample has padding."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from recycle.core.errors import DataFailed, UserError
from recycle.runtime.compute.microbatches import shuffled
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.data.data_options import refuse_count
from recycle.runtime.data.streams import has_state, is_stream, refuse_one_way

_IDS, _LABELS, _POSITIONS = "input_ids", "labels", "position_ids"
_IGNORED = -100


def pack(dataset: Any, length: int, seed: int = 0) -> "PackedSequences":
    """Pack the sequences of a dataset into samples of one length: a stream.

    Args:
        dataset: Map-style or a stream, of lists or tensors of token ids, or of dicts with "input_ids" and perhaps "labels". The
            order of a map-style one is drawn anew for every pass.
        length: The number of tokens of every sample.
        seed: The seed of that order.

    Returns:
        A stream of dicts. "position_ids" begin at 0 with every sequence, and go on where a sequence was cut. The first label of a
        sequence is -100, so that it is not predicted from the sequence before. What is left at the end of a pass, and fills no
        sample, is left out. The stream can be divided, and has a state, if the dataset can be and has one.

    Raises:
        UserError: The data can be read once only, or the length is no whole number above 0.

    Example:
        >>> import recycle
        >>> [row["input_ids"].tolist() for row in recycle.pack([[1, 2, 3], [4, 5]], 5)]
        [[4, 5, 1, 2, 3]]
    """
    refuse_count("the length of packed samples", length, 1)
    if not is_stream(dataset):
        return StatefulPackedSequences(_ShuffledRows(dataset, seed), length)
    refuse_one_way(dataset)
    return (StatefulPackedSequences if has_state(dataset) else PackedSequences)(dataset, length)


class PackedSequences(IterableDataset[dict[str, torch.Tensor]]):
    """The stream that `pack` makes, of a stream that has no state."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset, self._length = dataset, length
        self._left = _Tokens()
        self._is_restored = False

    @property
    def num_shards(self) -> int:
        return getattr(self._dataset, "num_shards", 1) if callable(getattr(self._dataset, "shard", None)) else 1

    @property
    def fingerprint(self) -> str:
        of_data = getattr(self._dataset, "fingerprint", "")
        return f"packed to {self._length}" + (f", {of_data}" if isinstance(of_data, str) and of_data else "")

    def shard(self, num_shards: int, index: int) -> "PackedSequences":
        return type(self)(self._dataset.shard(num_shards, index), self._length)

    def set_epoch(self, data_pass: int) -> None:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(data_pass)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self._is_restored:
            self._left = _Tokens()
        self._is_restored = False
        yield from self._left.samples(self._length)
        for row in self._dataset:
            self._left.add(row)
            yield from self._left.samples(self._length)


class StatefulPackedSequences(PackedSequences):
    """The stream that `pack` makes, of data that have a state. Its own is theirs, and the tokens that fill no sample yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"data": self._dataset.state_dict(), "left": self._left.to_lists()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(state["data"])
        self._left = _Tokens(*map(list, state["left"]))
        self._is_restored = True


class _Tokens:
    """Tokens of which samples are cut: ids, labels and positions."""

    def __init__(self, ids: list[int] | None = None, labels: list[int] | None = None, positions: list[int] | None = None) -> None:
        self._columns = ids or [], labels or [], positions or []

    def to_lists(self) -> list[list[int]]:
        return [list(column) for column in self._columns]

    def add(self, row: Any) -> None:
        """Add a sequence."""
        if isinstance(row, Mapping) and _IDS not in row:
            raise DataFailed(f"a sequence to pack has no '{_IDS}', but {', '.join(map(str, row))}: name its tokens so")
        ids = _as_list(row[_IDS] if isinstance(row, Mapping) else row)
        labels = _as_list(row[_LABELS]) if isinstance(row, Mapping) and _LABELS in row else list(ids)
        if len(labels) != len(ids):
            raise DataFailed(f"a sequence to pack has {len(ids)} tokens, but {len(labels)} labels: give each token one")
        if ids:
            for column, more in zip(self._columns, (ids, [_IGNORED, *labels[1:]], range(len(ids))), strict=True):
                column.extend(more)

    def samples(self, length: int) -> Iterator[dict[str, torch.Tensor]]:
        """Cut samples off the beginning as long as there are enough tokens."""
        while len(self._columns[0]) >= length:
            ids, labels, positions = (torch.tensor(column[:length]) for column in self._columns)
            for column in self._columns:
                del column[:length]
            yield {_IDS: ids, _POSITIONS: positions, _LABELS: labels}


def _as_list(tokens: Any) -> list[int]:
    try:
        return [int(token) for token in (tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens)]
    except (TypeError, ValueError):
        raise UserError(f"a sequence to pack is a {type(tokens).__name__}, but it must be a list of token ids") from None


class _ShuffledRows:
    """The rows of a map-style dataset as a stream with a state, in an order of its own for every pass."""

    def __init__(self, dataset: Any, seed: int, part: tuple[int, int] = (1, 0)) -> None:
        self._dataset, self._seed, self._part = dataset, seed, part
        self._pass = self._next = 0
        self.fingerprint = getattr(dataset, "fingerprint", "")

    @property
    def num_shards(self) -> int:
        return len(self._dataset)

    def shard(self, num_shards: int, index: int) -> "_ShuffledRows":
        return _ShuffledRows(self._dataset, self._seed, (num_shards, index))

    def set_epoch(self, data_pass: int) -> None:
        self._pass = data_pass

    def state_dict(self) -> dict[str, int]:
        return {"pass": self._pass, "next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._pass, self._next = state["pass"], state["next"]

    def __iter__(self) -> Iterator[Any]:
        size, order = len(self._dataset), seed_of(self._seed, "packed", self._pass)
        num_parts, index = self._part
        while (position := self._next * num_parts + index) < size:
            self._next += 1
            yield self._dataset[shuffled(position, size, order)]
        self._next = 0
