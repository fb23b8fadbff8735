"""best_static_cut(): the best place to cut a model into stages once and for all, by trying every place.

By the schedules of torch.distributed.pipelining a stage computes the same layers of every micro-batch. The slowest worker decides
how long an iteration takes. So the best cut is the one whose slowest worker has the least work.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from recycle.core.layer_sums import LayerSums
from recycle.core.op import Kind
from recycle.core.profile import Profile


def layer_work_us(profile: Profile) -> list[int]:
    """The work of one micro-batch on each layer: its forward pass and its whole backward pass."""
    sums = LayerSums(profile)
    return [
        sums.duration_us(Kind.F, range(layer, layer + 1)) + sums.duration_us(Kind.B, range(layer, layer + 1))
        for layer in range(sums.num_layers)
    ]


def best_static_cut(work_us: Sequence[float], num_stages: int, is_v: bool = False) -> tuple[int, ...]:
    """Return the numbers of layers of the stages, such that the slowest worker has the least work.

    Of equally good cuts it is one whose loads are most even. In a V, a worker has the stages s and `num_stages` - 1 - s.
    """
    sums = [0.0, *accumulate(work_us)]

    def loads(numbers: Sequence[int]) -> list[float]:
        own = [sums[stop] - sums[start] for start, stop in pairwise([0, *accumulate(numbers)])]
        return [one + other for one, other in zip(own, reversed(own), strict=True)][: num_stages // 2] if is_v else own

    def unevenness(numbers: Sequence[int]) -> tuple[float, float]:
        found = loads(numbers)
        return max(found), sum(load * load for load in found)

    return min(static_cuts(len(work_us), num_stages), key=unevenness)


def static_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to give so many layers to so many stages in order, at least one to each."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, num_layers)))
