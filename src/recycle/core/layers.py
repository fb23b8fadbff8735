"""split_layers(), balanced_counts(): cut a model into stages; held_ranges(), StageLayers: which layers stages hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf


def split_layers(num_layers: int, layer_cost: float, extra_costs: Sequence[float]) -> tuple[int, ...]:
    """Return how many equal layers each stage gets, at least one, so that the slowest stage is as fast as possible.

    Each further layer goes where the load after it is least: with equal layers that is optimal, since moving a layer
    from the slowest stage to any other would make that one at least as slow. Of equal loads the latest stage takes it,
    because early stages hold more micro-batches.
    """
    assert num_layers >= len(extra_costs) > 0
    layers = [1] * len(extra_costs)
    loads = [(extra + 2 * layer_cost, -stage) for stage, extra in enumerate(extra_costs)]
    heapify(loads)
    for _ in range(num_layers - len(layers)):
        _, negative = loads[0]
        stage = -negative
        layers[stage] += 1
        heapreplace(loads, (extra_costs[stage] + (layers[stage] + 1) * layer_cost, negative))
    return tuple(layers)


def balanced_counts(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage gets, at least one, so that the most expensive stage is as cheap as possible.

    Of all such splits it is one whose stages are most alike: the sum of squares of their costs is the least.

    Example:
        >>> balanced_counts([1, 1, 1, 3], 2)
        (3, 1)
    """
    assert len(costs) >= num_stages > 0
    until = list(accumulate(costs, initial=0.0))
    num = len(costs)

    def best(cost_of: Callable[[float, float], float]) -> list[list[tuple[float, int]]]:
        """For each number of stages and of layers: the cost of the best split, and where its last stage begins."""
        table = [[(0.0 if layers == 0 else inf, 0) for layers in range(num + 1)]]
        for stage in range(1, num_stages + 1):
            row = [(inf, 0)] * (num + 1)
            for end in range(stage, num + 1):
                row[end] = min((cost_of(table[-1][start][0], until[end] - until[start]), start) for start in range(end))
            table.append(row)
        return table

    most = best(max)[-1][num][0] * (1 + 1e-9)
    table = best(lambda before, own: before + own * own if own <= most else inf)
    counts, end = [], num
    for stage in range(num_stages, 0, -1):
        start = table[stage][end][1]
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))


def held_ranges(bounds: Sequence[int], num_shared: int) -> list[range]:
    """Return the layers that each stage holds: its own, which begin at `bounds`, and so many on either side of them."""
    return [range(max(0, start - num_shared), min(bounds[-1], stop + num_shared)) for start, stop in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Which layers each stage holds: `counts` of its own, stage by stage, and `num_shared` on either side of them.

    Example:
        >>> StageLayers((2, 3), num_shared=1).held(0)
        range(0, 3)
    """

    counts: tuple[int, ...]
    num_shared: int = 0

    @property
    def num_layers(self) -> int:
        return sum(self.counts)

    def held(self, stage: int) -> range:
        return held_ranges((0, *accumulate(self.counts)), self.num_shared)[stage]
