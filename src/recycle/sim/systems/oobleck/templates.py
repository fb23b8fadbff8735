"""Oobleck's pipeline templates: the numbers of nodes that a pipeline may have, and how its layers are cut over them.

Sizes are consecutive, n0 to nmax. n0 nodes hold six times the parameters in fp32 and the largest activation of a layer. nmax
leaves n0 nodes for each of `faults` other pipelines. Where nmax >= 2*n0 - 1, any number of nodes from (faults + 1) * n0 on is
the sum of at least faults + 1 sizes: p pipelines can have any total from p*n0 to p*nmax, and p*nmax >= (p + 1)*n0 - 1, so that
these ranges leave no gap.

A template gives every node one stage of at least one layer, and minimises Oobleck's own estimate of an iteration,
`planned_time`. Times are whole nanoseconds, so that equal layers are equal and a stage is strictly faster or it is not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from recycle.planner.profiles.estimate import LayerCost

FP32_BYTES = 4
_STATE_COPIES = 6  # of the parameters, by Oobleck's rule: weights, gradients, optimizer state and workspace


@dataclass(frozen=True, slots=True)
class Template:
    """The layers of each node of a pipeline, the time of its slowest stage, and the gradient bytes of its biggest stage.

    `hidden_ns` is the part of 1F1B's fill and drain that another schedule hides.
    """

    num_layers: tuple[int, ...]
    slowest_ns: int
    gradient_bytes: float
    hidden_ns: int = 0

    @property
    def num_nodes(self) -> int:
        return len(self.num_layers)


def fewest_nodes(layers: Sequence[LayerCost], memory_bytes: int) -> int:
    """n0: the fewest nodes of so much memory that hold the model, by Oobleck's rule."""
    state_bytes = _STATE_COPIES * FP32_BYTES * sum(layer.num_parameters for layer in layers)
    return math.ceil((state_bytes + max(layer.activation_bytes for layer in layers)) / memory_bytes)


def tolerated_faults(num_nodes: int, fewest: int, faults: int) -> int:
    """Return `faults`, or fewer if the nodes do not suffice for faults + 1 pipelines, so that the job can run."""
    return max(0, min(faults, num_nodes // fewest - 1))


def template_sizes(num_nodes: int, fewest: int, faults: int, num_layers: int) -> range:
    """The sizes n0 to nmax for a job on `num_nodes`; none if no pipeline fits. A node has at least one layer."""
    most = num_nodes - tolerated_faults(num_nodes, fewest, faults) * fewest
    return range(fewest, min(most, num_layers) + 1)


def templates(layers: Sequence[LayerCost], sizes: range) -> tuple[Template, ...]:
    latencies = tuple(latency_ns(layer) for layer in layers)
    return tuple(_template(layers, latencies, cut_layers(latencies, size)) for size in sizes)


def latency_ns(layer: LayerCost) -> int:
    """Forward and backward of one micro-batch."""
    return max(1, round(1000 * (layer.forward_us + layer.backward_us)))


def planned_time(stages: Sequence[int]) -> int:
    """Oobleck's estimate of an iteration from the stages' latencies, which a template minimises.

    The last slowest stage k counts: all stages once to fill, 2S + k + 1 times the slowest, and from k on back to the end.
    """
    if len(stages) == 1:
        return 4 * stages[0]
    slowest = max(stages)
    last = max(stage for stage, latency in enumerate(stages) if latency == slowest)
    return sum(stages) + (2 * len(stages) + last + 1) * slowest + sum(stages[last:])


@lru_cache(maxsize=4096)
def cut_layers(latencies: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage gets, at least one, so that `planned_time` is least.

    The last slowest stage (its layers, and its number k) determines the estimate. So all choices of it are tried, and the rest
    must only be possible: k stages before it that are no slower, the others behind it that are faster. Layers can be cut into
    exactly n such stages if and only if n is at least the fewest, which greedy filling finds, and at most the number of layers,
    since cutting a stage in two makes none slower. A smaller k is better, so that the smallest possible one is enough.
    """
    assert 1 <= num_stages <= len(latencies), f"{len(latencies)} layers cannot be cut into {num_stages} stages"
    _, most, start, end, before = min(_choices(latencies, num_stages))
    head = _fill(latencies[:start][::-1], before, most)
    tail = _fill(latencies[end:], num_stages - 1 - before, most - 1)
    return (*reversed(head), end - start, *tail)


def _template(layers: Sequence[LayerCost], latencies: Sequence[int], num_layers: tuple[int, ...]) -> Template:
    ends = list(accumulate(num_layers, initial=0))
    stages = [slice(start, end) for start, end in pairwise(ends)]
    slowest = max(sum(latencies[stage]) for stage in stages)
    biggest = max(sum(layer.num_parameters for layer in layers[stage]) for stage in stages)
    return Template(num_layers, slowest, FP32_BYTES * biggest)


def _choices(latencies: tuple[int, ...], num_stages: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield for each possible last slowest stage its part of the estimate, its latency, its layers and its number."""
    started = list(accumulate(latencies, initial=0))
    for start, end, latency, fewest_before, fewest_after in _slowest_stages(latencies):
        number = max(fewest_before, num_stages - 1 - (len(latencies) - end))
        if number <= start and num_stages - 1 - number >= fewest_after:
            yield (2 * num_stages + number + 1) * latency - started[start], latency, start, end, number


@lru_cache(maxsize=16)
def _slowest_stages(latencies: tuple[int, ...]) -> list[tuple[int, int, int, int, int]]:
    """Every run of layers that can be the last slowest stage of some cut.

    Each has its start, its end, its latency, and the fewest stages into which the layers before it and after it can be cut.
    """
    num_layers, stages = len(latencies), []
    backwards = latencies[::-1]
    fewest: dict[int, tuple[list[int], list[int]]] = {}
    for start in range(num_layers):
        for end, latency in enumerate(accumulate(latencies[start:]), start=start + 1):
            if latency not in fewest:
                fewest[latency] = _fewest_stages(latencies, latency), _fewest_stages(backwards, latency - 1)
            before, after = fewest[latency]
            if start < len(before) and num_layers - end < len(after):
                stages.append((start, end, latency, before[start], after[num_layers - end]))
    return stages


def _fewest_stages(latencies: Sequence[int], most: int) -> list[int]:
    """The fewest stages of at most `most` for the first 0, 1, 2... layers; the list ends before a layer that takes more."""
    counts, room = [0], 0
    for latency in latencies:
        if latency > most:
            break
        opens = latency > room
        room = (most if opens else room) - latency
        counts.append(counts[-1] + opens)
    return counts


def _fill(latencies: Sequence[int], num_stages: int, most: int) -> list[int]:
    """Cut all layers into stages of at most `most`, each as full as can be while every later one keeps a layer.

    Filled from the slowest stage outwards, the first and the last stage, which hold the embeddings' parameters, get least.
    """
    counts, start = [], 0
    for num_later in range(num_stages - 1, -1, -1):
        end, room = start, most
        while end < len(latencies) - num_later and latencies[end] <= room:
            room -= latencies[end]
            end += 1
        counts.append(end - start)
        start = end
    assert start == len(latencies), f"{len(latencies) - start} layers are left over"
    return counts
