"""Buckets: parts of a stage's gradient. Peers sum one while the last backward pass of an iteration still adds to the next.

A backward pass comes to the last parameters first. So buckets are cut from the end of `Sums.flat`, and summed in that order by
all peers, whatever rows they play. The last bucket also has the marks, which are complete when the pass has ended.
"""

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch import Tensor

from recycle.runtime.compute.gradients import Sums
from recycle.runtime.compute.split_backward import Tape

# Small sums cost their latency, large ones begin late. torch's DistributedDataParallel has buckets of 25 MiB, too.
BUCKET_BYTES = 25 * 2**20

OnComplete = Callable[[Tensor], None]
"""Called with a bucket of the gradient to which nothing will be added."""


class Bucket(NamedTuple):
    """A part of `Sums.flat`, and the parameters whose gradients it has, by their ids."""

    part: Tensor
    parameters: frozenset[int]


def make_buckets(sums: Sums, bucket_bytes: int = BUCKET_BYTES, apart: AbstractSet[int] = frozenset()) -> list[Bucket]:
    """Cut the sums into buckets of whole parameters, each of at least so many bytes but the last.

    Parameters `apart`, by their ids, are in no bucket, except for their marks; before each of them a bucket may be smaller.
    """
    buckets: list[Bucket] = []
    begin = end = sums.flat.numel()
    own = set[int]()
    for start, parameter in reversed(list(zip(sums.starts, sums.parameters, strict=True))):
        is_apart = id(parameter) in apart
        if not is_apart:
            own.add(id(parameter))
            begin = start
        if own and (is_apart or (end - start) * sums.flat.itemsize >= bucket_bytes):
            buckets.append(Bucket(sums.flat[begin:end], frozenset(own)))
            own = set()
        if not own:
            end = start
    return [*buckets, Bucket(sums.flat[:end], frozenset(own))]


def play_last(tape: Tape, sums: Sums, buckets: Sequence[Bucket], on_complete: OnComplete) -> None:
    """Play the last tape of an iteration; `on_complete` gets each bucket but the last, in order, as soon as it is complete."""
    waiting = deque(zip(complete_after(buckets, tape.parameters()), buckets[:-1], strict=True))

    def pass_on(num_played: int) -> None:
        while waiting and waiting[0][0] <= num_played:
            on_complete(waiting.popleft()[1].part)

    pass_on(0)
    for num_played, _ in enumerate(tape.play_by_product(sums), 1):
        pass_on(num_played)


def complete_after(buckets: Sequence[Bucket], products: Sequence[frozenset[int]]) -> list[int]:
    """After how many products each bucket but the last is complete; a product is given by the parameters that it adds to."""
    return [
        max((number for number, used in enumerate(products, 1) if used & bucket.parameters), default=0) for bucket in buckets[:-1]
    ]
