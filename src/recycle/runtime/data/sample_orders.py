"""Orders of the samples of a map-style dataset, beside the shuffled one: its own, and that of a user's sampler."""

from functools import lru_cache

from recycle.core.errors import DataFailed
from recycle.runtime.data.data_options import Sampler


class SequentialOrder:
    """Every pass has the order of the dataset."""

    def sample_at(self, data_pass: int, position: int) -> int:
        return position

    def __repr__(self) -> str:
        return "in their own order"


class SampledOrder:
    """The order of a sampler, which is asked once for each pass. A pass has as many samples as the dataset."""

    def __init__(self, sampler: Sampler, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self._numbers = lru_cache(maxsize=2)(self._draw)

    def sample_at(self, data_pass: int, position: int) -> int:
        return self._numbers(data_pass)[position]

    def _draw(self, data_pass: int) -> list[int]:
        numbers = [int(number) for number in self._sampler(self._seed, data_pass)]
        if len(numbers) != self._num_samples:
            raise DataFailed(
                f"the sampler gives {len(numbers)} samples in pass {data_pass}, but the dataset has {self._num_samples}: every "
                "pass must be as long as the dataset"
            )
        if wrong := next((number for number in numbers if not 0 <= number < self._num_samples), None):
            raise DataFailed(f"the sampler gives the sample {wrong} in pass {data_pass}, but the dataset has {self._num_samples}")
        return numbers

    def __repr__(self) -> str:
        return f"in the order of {getattr(self._sampler, '__qualname__', type(self._sampler).__name__)}"

    def __getstate__(self) -> tuple[Sampler, int, int]:
        return self._sampler, self._num_samples, self._seed

    def __setstate__(self, state: tuple[Sampler, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]
