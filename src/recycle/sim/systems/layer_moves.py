"""Whole layers that move between stages: the best split over stages of unequal speed, and the copies that it takes.

All transformer layers are equal, so a split is a number of layers for each stage. Embedding and head stay in the first and in the
last stage. A stage without any live worker has no layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

from recycle.core.profile import Profile
from recycle.sim.job import BYTES_PER_PARAMETER, SimulatedJob

Split = tuple[int, ...]
"""The number of transformer layers of each stage."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class StageRoom:
    """The speed of each stage, that is the sum over its live workers, and the most layers that fit in a worker's memory."""

    speeds: tuple[float, ...]
    most_layers: tuple[int, ...]


def stage_room(job: SimulatedJob, speeds: Sequence[float], larger: Sequence[float], num_inflight: Sequence[int]) -> StageRoom:
    """The room of each stage if a worker holds `num_inflight` micro-batches that are so many times `larger` than usual."""
    embedding, layer, *_, head = job.layers
    extra = [0.0] * len(speeds)
    extra[0] += embedding.num_parameters * BYTES_PER_PARAMETER + embedding.activation_bytes * num_inflight[0] * larger[0]
    extra[-1] += head.num_parameters * BYTES_PER_PARAMETER + head.activation_bytes * num_inflight[-1] * larger[-1]
    most = []
    for stage, used in enumerate(extra):
        each = layer.num_parameters * BYTES_PER_PARAMETER + layer.activation_bytes * num_inflight[stage] * larger[stage]
        most.append(max(0, int((job.gpu.memory_bytes - used) // each)))
    return StageRoom(tuple(speeds), tuple(most))


def best_split(job: SimulatedJob, room: StageRoom, base: Split) -> Split | None:
    """The split whose slowest stage is fastest, as close to `base` as that allows; None if no split fits in the memory."""
    embedding, layer, *_, head = (cost.forward_us + cost.backward_us for cost in job.layers)
    live = [stage for stage, speed in enumerate(room.speeds) if speed > 0]
    if not live:
        return None
    extra = dict.fromkeys(live, 0.0)
    extra[live[0]] += embedding
    extra[live[-1]] += head

    def time_us(stage: int, num_layers: int) -> float:
        return (extra[stage] + num_layers * layer) / room.speeds[stage] if num_layers <= room.most_layers[stage] else _NEVER

    slowest = _least_worst(job.model.num_layers, {stage: [time_us(stage, 1), time_us(stage, 2)] for stage in live}, time_us)
    if slowest == _NEVER:
        return None
    allowed = [0] * len(room.speeds)
    for stage in live:
        at_most = int((slowest * room.speeds[stage] * (1 + 1e-12) - extra[stage]) / layer + 1e-9)
        allowed[stage] = max(1, min(at_most, room.most_layers[stage]))
    return _closest(base, allowed, [int(stage in extra) for stage in range(len(allowed))])


def _least_worst(num_layers: int, first_us: dict[int, list[float]], time_us: Callable[[int, int], float]) -> float:
    """The least time of the slowest stage: each further layer goes where the time after it is least, which is optimal."""
    held = dict.fromkeys(first_us, 1)
    worst = max(alone for alone, _ in first_us.values())
    if len(held) > num_layers:
        return _NEVER
    heap = [(with_two, stage) for stage, (_, with_two) in first_us.items()]
    heapify(heap)
    for _ in range(num_layers - len(held)):
        time, stage = heap[0]
        worst = max(worst, time)
        held[stage] += 1
        heapreplace(heap, (time_us(stage, held[stage] + 1), stage))
    return worst


def _closest(base: Split, allowed: Sequence[int], least: Sequence[int]) -> Split:
    """The split within `least` and `allowed` that is made from `base` by passing layers to the nearest stages with room."""
    split = [min(max(num, low), high) for num, low, high in zip(base, least, allowed, strict=True)]
    for stage, over in enumerate([num - now for num, now in zip(base, split, strict=True)]):
        nearest = sorted(range(len(base)), key=lambda other: abs(other - stage))
        for other in nearest:
            limit = allowed[other] if over > 0 else least[other]
            passed = min(over, limit - split[other]) if over > 0 else max(over, limit - split[other])
            split[other] += passed
            over -= passed
    assert sum(split) == sum(base), "the stages have room for all layers"
    return tuple(split)


def moved_layers(before: Split, after: Split) -> int:
    """The most layers that a worker of any stage receives when the split changes: those of its new range that it did not hold."""
    starts = [(0, *accumulate(split)) for split in (before, after)]
    most = 0
    for stage, num in enumerate(after):
        old = range(starts[0][stage], starts[0][stage + 1])
        new = range(starts[1][stage], starts[1][stage] + num)
        most = max(most, sum(layer not in old for layer in new))
    return most


def transfer_us(job: SimulatedJob, profile: Profile, before: Split, after: Split) -> int:
    """The time in which every worker receives parameters and optimizer state of its new layers, all workers at once."""
    num = moved_layers(before, after)
    return profile.peer_link.time_us(num * job.layer_state_bytes) if num else 0
