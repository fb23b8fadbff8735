"""Orders of the samples of a map-style dataset, beside the shuffled one: its own, and that of a user's sampler."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from recycle.core.errors import DataFailed
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.data.data_options import Sampler


class SequentialOrder:
    """Every pass has the order of the dataset."""

    def __init__(self, num_samples: int) -> None:
        self.pass_length = num_samples

    def sample_at(self, data_pass: int, position: int) -> int:
        return position

    def __repr__(self) -> str:
        return "in their own order"


@dataclass(frozen=True)
class DrawnSamples:
    """What torch's `RandomSampler` stands for, as a function from the seed and the pass to the numbers of the samples.

    It draws `num_samples` in each pass from `size`, with replacement or as permutations. The `state` of a generator, if the
    sampler has one of its own, takes the place of the seed of the job.
    """

    size: int
    num_samples: int
    replaces: bool
    state: int | None

    def __call__(self, seed: int, data_pass: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed_of(seed if self.state is None else self.state, "drawn", data_pass))
        if self.replaces:
            drawn = torch.randint(self.size, (self.num_samples,), generator=generator)
        else:
            permutations = [torch.randperm(self.size, generator=generator) for _ in range(-(-self.num_samples // self.size))]
            drawn = torch.cat(permutations)[: self.num_samples]
        return [int(number) for number in drawn.tolist()]

    def __repr__(self) -> str:
        how = "with" if self.replaces else "without"
        return f"{self.num_samples} drawn {how} replacement in each pass" + (
            f" by {self.state:x}" if self.state is not None else ""
        )


class SampledOrder:
    """The order of a sampler, which is asked once for each pass.

    A pass has as many samples as the dataset, or as many as a sampler of torch draws.
    """

    def __init__(self, sampler: Sampler, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self.pass_length = sampler.num_samples if isinstance(sampler, DrawnSamples) else num_samples
        self._numbers = lru_cache(maxsize=2)(self._draw)

    def sample_at(self, data_pass: int, position: int) -> int:
        return self._numbers(data_pass)[position]

    def _draw(self, data_pass: int) -> list[int]:
        numbers = [int(number) for number in self._sampler(self._seed, data_pass)]
        if len(numbers) != self.pass_length:
            raise DataFailed(
                f"the sampler gives {len(numbers)} samples in pass {data_pass}, but the dataset has {self._num_samples}: every "
                "pass must be as long as the dataset"
            )
        if wrong := next((number for number in numbers if not 0 <= number < self._num_samples), None):
            raise DataFailed(f"the sampler gives the sample {wrong} in pass {data_pass}, but the dataset has {self._num_samples}")
        return numbers

    def __repr__(self) -> str:
        if isinstance(self._sampler, DrawnSamples):
            return repr(self._sampler)
        return f"in the order of {getattr(self._sampler, '__qualname__', type(self._sampler).__name__)}"

    def __getstate__(self) -> tuple[Sampler, int, int]:
        return self._sampler, self._num_samples, self._seed

    def __setstate__(self, state: tuple[Sampler, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]
