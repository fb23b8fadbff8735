"""unwrapped(): the dataset, the number of samples and the options that a loader of torch or torchdata stands for.

A loader gives batches in order to one process. Here any worker asks for any micro-batch, so the parts of a loader are used, and
not the loader itself: its dataset, the size of its batches, its order, its collate function and its number of processes.
"""

from dataclasses import replace
from hashlib import sha256
from typing import Any

from torch import Generator
from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from recycle.core.errors import UserError
from recycle.runtime.data.data_options import SEQUENTIAL, SHUFFLED, DataOptions, Sampler
from recycle.runtime.data.sample_orders import DrawnSamples
from recycle.runtime.data.streams import is_stream

_PARTS = ("dataset", "batch_size", "sampler", "collate_fn", "num_workers")
# torchdata gives a sampler without a generator one with a seed of 63 bits. People write shorter ones.
_LARGEST_WRITTEN_SEED = 2**40


def is_loader(dataset: Any) -> bool:
    """Whether the data are a loader, such as torch's `DataLoader` or torchdata's `StatefulDataLoader`."""
    return all(hasattr(dataset, name) for name in _PARTS)


def unwrapped(loader: Any, samples: int, options: DataOptions) -> tuple[Any, int, DataOptions]:
    """The dataset of a loader, its number of samples in a micro-batch, and the options with what the loader says.

    Raises:
        UserError: The loader makes batches in a way of its own, has begun, or the job says something else.
    """
    if loader.batch_size is None:
        raise UserError("the loader has no batch_size, so that nothing says what a micro-batch is: give its dataset, and samples")
    if samples not in (1, loader.batch_size):
        raise UserError(
            f"the job has {samples} samples in a micro-batch, but its loader a batch_size of {loader.batch_size}: leave one out"
        )
    if getattr(loader, "worker_init_fn", None) is not None:
        raise UserError("the loader has a worker_init_fn, which is not called here: do that in the dataset, where it is used")
    if _is_restored(loader):
        raise UserError(
            "the loader was restored to a position with load_state_dict, but a run begins at the first sample, or goes on where "
            "its own checkpoint was: give a new loader, and resume with CheckpointOptions(resume=True)"
        )
    changes: dict[str, Any] = {}
    if options.collate is None and not _is_usual(loader.collate_fn):
        changes["collate"] = loader.collate_fn
    if not options.loader_processes:
        changes["loader_processes"] = loader.num_workers
    if not is_stream(loader.dataset) and options.order == SHUFFLED:
        changes["order"] = _order(loader)
    return loader.dataset, loader.batch_size, replace(options, **changes)


def _is_usual(collate: Any) -> bool:
    """Whether a collate function is the one that loaders have by themselves."""
    return collate is default_collate or getattr(collate, "__name__", "") == "default_collate"


def _is_restored(loader: Any) -> bool:
    """Whether the next iterator of a loader of torchdata begins at a position."""
    if getattr(loader, "next_iter_state", None):
        return True
    begun = getattr(loader, "_iterator", None) if getattr(loader, "_initial_iter_for_state_dict", False) else None
    return bool(getattr(begun, "_num_yielded", 0))


def _order(loader: Any) -> str | Sampler:
    sampler = loader.sampler
    if isinstance(sampler, SequentialSampler):
        return SEQUENTIAL
    if not _is_random(sampler):
        raise UserError(
            f"the loader has a {type(sampler).__name__}, whose order another worker could not ask for: give "
            "DataOptions(order=...), a function from the seed and the pass to the numbers of the samples"
        )
    size, num_samples, generator = len(sampler.data_source), sampler.num_samples, _generator_of(loader)
    if size != len(loader.dataset):
        raise UserError(
            f"the sampler of the loader draws from {size} samples, but the dataset has {len(loader.dataset)}: make it for the "
            "dataset of the loader"
        )
    if generator is None and num_samples == size and not sampler.replacement:
        return SHUFFLED
    state = None if generator is None else int(sha256(bytes(generator.get_state().tolist())).hexdigest()[:12], 16)
    return DrawnSamples(size, num_samples, sampler.replacement, state)


def _is_random(sampler: Any) -> bool:
    """Whether a sampler is the `RandomSampler` of torch, or that of torchdata, which is a class of its own."""
    kind = type(sampler)
    return isinstance(sampler, RandomSampler) or (kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata."))


def _generator_of(loader: Any) -> Generator | None:
    """The generator that a user has given to the sampler of a loader, or to the loader."""
    generator: Generator | None = loader.sampler.generator
    if generator is None or isinstance(loader.sampler, RandomSampler) or generator is loader.generator:
        return generator
    return generator if generator.initial_seed() < _LARGEST_WRITTEN_SEED else None
