"""evaluation_batches_of(): the micro-batches of evaluation data by their number, of a dataset with numbers or of a stream.

Number `n` has the same samples in every evaluation, whoever reads it.
"""

from typing import Any, Protocol

from recycle.core.errors import DataFailed, DatasetTooSmall, UserError
from recycle.runtime.boundary.nests import Nest
from recycle.runtime.compute.microbatches import Dataset, JoinSamples, StackedSamples, read_samples
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.data.streams import SampleStream, StreamPosition, is_stream, refuse_one_way
from recycle.runtime.data.torch_loaders import is_loader


class EvaluationData(Protocol):
    """Micro-batches by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> tuple[Nest, Nest]: ...


def evaluation_batches_of(
    data: Any, num_samples: int, microbatch: int, num_chains: int, join: JoinSamples | None
) -> EvaluationData:
    """The micro-batches of the first `num_samples` samples of the data, in their order; 0 are all samples, if they have a number.

    Workers read in rounds of `num_chains` micro-batches.

    Raises:
        UserError: The data cannot be evaluated.
    """
    if is_loader(data):
        raise UserError("the evaluation data are a loader, but their samples are made into micro-batches here: give its dataset")
    if not is_stream(data):
        return OrderedMicroBatches(data, num_samples, microbatch, join)
    if not num_samples:
        raise UserError(
            f"the evaluation data are a stream, a {type(data).__name__}, and nothing says where an evaluation ends: give "
            "EvaluationOptions(samples=...), the number of samples that each evaluation reads from its beginning"
        )
    return StreamedMicroBatches(data, num_samples, microbatch, num_chains, join)


class OrderedMicroBatches:
    """The micro-batches of a data set in its own order, each sample once; samples that fill no whole one are left out."""

    def __init__(self, dataset: Dataset, num_samples: int, microbatch: int, join: JoinSamples | None = None) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise UserError(
                f"the evaluation data are a {type(dataset).__name__}, but they must be map-style, len(data) and data[number], or "
                "a stream with __iter__"
            )
        if num_samples > len(dataset):
            raise DatasetTooSmall(
                f"an evaluation is to read {num_samples} samples, but the evaluation data have {len(dataset)}: give more, or set "
                "fewer samples"
            )
        self._dataset, self._microbatch, self._join = dataset, microbatch, join or StackedSamples()
        self._length = _num_whole(num_samples or len(dataset), microbatch)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[Nest, Nest]:
        numbers = range(number * self._microbatch, (number + 1) * self._microbatch)
        samples = read_samples(self._dataset.__getitem__, numbers, [seed_of("evaluation", each) for each in numbers])
        return self._join.join(samples, numbers)


class StreamedMicroBatches:
    """The micro-batches of the first samples of a stream, which every evaluation reads from its beginning.

    A worker computes some micro-batches of a round, in any order: those that it passes over are kept until the next round.
    """

    def __init__(self, stream: Any, num_samples: int, microbatch: int, num_chains: int, join: JoinSamples | None = None) -> None:
        refuse_one_way(stream)
        self._stream, self._num_samples, self._microbatch, self._num_chains = stream, num_samples, microbatch, num_chains
        self._join, self._length = join or StackedSamples(), _num_whole(num_samples, microbatch)
        self._open: _EvaluationStream | None = None
        self._kept: dict[int, tuple[list[Any], list[int]]] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[Nest, Nest]:
        first_of_round = number - number % self._num_chains
        self._kept = {each: samples for each, samples in self._kept.items() if each >= first_of_round}
        if self._open is None or (self._open.num_microbatches > number and number not in self._kept):
            self._open, self._kept = _EvaluationStream(self._stream, self._num_samples), {}
        while number not in self._kept:
            following = self._open.num_microbatches
            taken = self._open.take(self._microbatch)
            if following >= first_of_round:
                self._kept[following] = taken
        return self._join.join(*self._kept.pop(number))


class _EvaluationStream(SampleStream):
    """A whole stream from its beginning, which must have so many samples."""

    def __init__(self, stream: Any, num_samples: int) -> None:
        super().__init__(stream, 0, 1, seed_of("evaluation"), False, StreamPosition(), lambda: None)
        self._name, self._num_wanted = "the evaluation stream", num_samples

    def _refuse_end(self) -> None:
        raise DataFailed(
            f"{self._name} ended after {self._num_samples} samples, but an evaluation is to read {self._num_wanted}: give more "
            "data, or set fewer samples"
        )


def _num_whole(num_samples: int, microbatch: int) -> int:
    """How many whole micro-batches so many samples make."""
    if num_samples < microbatch:
        raise DatasetTooSmall(
            f"the evaluation data have {num_samples} samples, but a micro-batch has {microbatch}: give more of them"
        )
    return num_samples // microbatch
