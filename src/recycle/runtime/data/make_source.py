"""micro_batches_of(): the micro-batches of whatever a user has given as data."""

from typing import Any

from recycle.core.cluster import Shape
from recycle.runtime.compute.microbatches import MicroBatches, MicroBatchSource, SampleOrder
from recycle.runtime.data.data_options import SEQUENTIAL, SHUFFLED, DataOptions
from recycle.runtime.data.joining import make_join
from recycle.runtime.data.sample_orders import SampledOrder, SequentialOrder
from recycle.runtime.data.stream_batches import StreamBatches
from recycle.runtime.data.streams import is_stream


def is_source(dataset: Any) -> bool:
    """Whether the data are micro-batches by pipeline and index, and no dataset."""
    return hasattr(dataset, "get") and not hasattr(dataset, "__getitem__")


def micro_batches_of(dataset: Any, shape: Shape, samples: int, seed: int, options: DataOptions) -> MicroBatchSource:
    """The micro-batches of a dataset by their address, each of so many samples; a source is returned as it is."""
    if is_source(dataset):
        made: MicroBatchSource = dataset
        return made
    if is_stream(dataset):
        return StreamBatches(dataset, shape, samples, seed, options.repeats, make_join(options))
    order = _order(options, len(dataset) if hasattr(dataset, "__len__") else 0, seed)
    return MicroBatches(dataset, shape, samples, seed, order, make_join(options))


def _order(options: DataOptions, num_samples: int, seed: int) -> SampleOrder | None:
    if isinstance(options.order, str):
        assert options.order in (SHUFFLED, SEQUENTIAL)
        return SequentialOrder(num_samples) if options.order == SEQUENTIAL else None
    return SampledOrder(options.order, num_samples, seed)
