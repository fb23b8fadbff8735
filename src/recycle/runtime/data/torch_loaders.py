"""unwrapped(): the dataset, the number of samples and the options that a loader of torch or torchdata stands for.

A loader gives batches in order to one process. Here any worker asks for any micro-batch, so the parts of a loader are used, and
not the loader itself: its dataset, the size of its batches, its order, its collate function and its number of processes.
"""

from dataclasses import replace
from typing import Any

from torch.utils.data import RandomSampler, SequentialSampler, default_collate

from recycle.core.errors import UserError
from recycle.runtime.data.data_options import SEQUENTIAL, SHUFFLED, DataOptions
from recycle.runtime.data.streams import is_stream

_PARTS = ("dataset", "batch_size", "sampler", "collate_fn", "num_workers")


def is_loader(dataset: Any) -> bool:
    """Whether the data are a loader, such as torch's `DataLoader` or torchdata's `StatefulDataLoader`."""
    return all(hasattr(dataset, name) for name in _PARTS)


def unwrapped(loader: Any, samples: int, options: DataOptions) -> tuple[Any, int, DataOptions]:
    """The dataset of a loader, its number of samples in a micro-batch, and the options with what the loader says.

    Raises:
        UserError: The loader makes batches in a way of its own, or the job says something else.
    """
    if loader.batch_size is None:
        raise UserError("the loader has no batch_size, so that nothing says what a micro-batch is: give its dataset, and samples")
    if samples not in (1, loader.batch_size):
        raise UserError(
            f"the job has {samples} samples in a micro-batch, but its loader a batch_size of {loader.batch_size}: leave one out"
        )
    if getattr(loader, "worker_init_fn", None) is not None:
        raise UserError("the loader has a worker_init_fn, which is not called here: do that in the dataset, where it is used")
    changes: dict[str, Any] = {}
    if options.collate is None and not _is_usual(loader.collate_fn):
        changes["collate"] = loader.collate_fn
    if not options.loader_processes:
        changes["loader_processes"] = loader.num_workers
    if not is_stream(loader.dataset) and options.order == SHUFFLED:
        changes["order"] = _order(loader.sampler)
    return loader.dataset, loader.batch_size, replace(options, **changes)


def _is_usual(collate: Any) -> bool:
    """Whether a collate function is the one that loaders have by themselves."""
    return collate is default_collate or getattr(collate, "__name__", "") == "default_collate"


def _order(sampler: Any) -> str:
    match sampler:
        case RandomSampler(replacement=False):
            return SHUFFLED
        case SequentialSampler():
            return SEQUENTIAL
    raise UserError(
        f"the loader has a {type(sampler).__name__}, whose order another worker could not ask for: give "
        "DataOptions(order=...), a function from the seed and the pass to the numbers of the samples"
    )
