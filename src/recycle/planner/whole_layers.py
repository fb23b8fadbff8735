"""Whole layers that move between stages at a recovery: which distributions of them are worth a plan, and what a transfer takes.

A distribution says how many layers are each stage's own. The best one by load has the least work per speed of live workers at the
stage where that is most. Others with a little more are nearer to the present one, so that less is transferred.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from recycle.core.errors import MemoryTooSmall
from recycle.core.layer_sums import LayerSums, with_layer_counts
from recycle.core.layers import StageLayers
from recycle.core.problem import Problem
from recycle.planner.model.assignment import speeds_of
from recycle.planner.model.load_split import work_of_layers
from recycle.planner.model.lower_bound import lower_bound

LayerCounts = tuple[int, ...]
# How much more than the least load a distribution may have that is nearer to the present one.
_SLACKS = (0.0, 0.02, 0.05, 0.1)
# No link is faster for state: it goes through the memory of the host, and both sides compute its SHA-256.
_MOST_BYTES_PER_US = 500.0


@dataclass(frozen=True, slots=True)
class LayerMove:
    """A problem in which the stages have other layers, the time of the transfer, and a lower bound of the period after it."""

    problem: Problem
    transfer_us: int
    bound_us: int

    def iterations_within(self, horizon_us: int, period_us: int) -> float:
        """The iterations that are expected in a time that begins with the transfer."""
        return max(0, horizon_us - self.transfer_us) / period_us


def layer_moves(own: Problem, present: Problem, horizon_us: int) -> list[LayerMove]:
    """The moves that are worth a plan, the most promising within `horizon_us` first.

    `own` is the problem with the job's own distribution, `present` with the present one; both have the same dead workers.
    """
    found = []
    for counts in dict.fromkeys((*near_distributions(present), own.layer_counts)):
        if counts != present.layer_counts and (move := _move_to(own, present, counts)) is not None:
            found.append(move)
    return sorted(found, key=lambda move: (-move.iterations_within(horizon_us, move.bound_us), move.transfer_us))


def _move_to(own: Problem, present: Problem, counts: LayerCounts) -> LayerMove | None:
    try:
        problem = replace(present, profile=with_layer_counts(own.profile, counts))
    except MemoryTooSmall:
        return None
    return LayerMove(problem, layer_transfer_us(present, counts), lower_bound(problem))


def near_distributions(present: Problem) -> Iterator[LayerCounts]:
    """Yield distributions of the layers with the least possible highest load, or little more, each near to the present one."""
    work = work_of_layers(LayerSums(present.profile), present.techniques.decoupled)
    speeds = [float(row.sum()) for row in speeds_of(present)]
    least = max(1, present.shared_layers)
    if sum(present.layer_counts) < least * len(speeds):
        return
    bounds = pairwise((0, *accumulate(present.layer_counts)))
    loads = [(work[stop] - work[start]) / speed for (start, stop), speed in zip(bounds, speeds, strict=True)]
    best = _least_load(work, speeds, least, max(loads))
    for slack in _SLACKS:
        if (counts := _nearest(present, work, [best * (1 + slack) * speed for speed in speeds], least)) is not None:
            yield counts


def _least_load(work: Sequence[int], speeds: Sequence[float], least: int, most: float) -> float:
    """The least highest load of all distributions, work over speed: a dynamic program over the stages. It is at most `most`."""
    num_layers, best = len(work) - 1, {0: 0.0}
    for stage, speed in enumerate(speeds):
        last = num_layers - least * (len(speeds) - stage - 1)
        found: dict[int, float] = {}
        for start, load in best.items():
            for stop in range(start + least, last + 1):
                here = max(load, (work[stop] - work[start]) / speed)
                if here > most:
                    break
                found[stop] = min(found.get(stop, math.inf), here)
        best = found
    return best[num_layers]


def _nearest(present: Problem, work: Sequence[int], rooms: Sequence[float], least: int) -> LayerCounts | None:
    """The distribution within `rooms` for which the fewest bytes are transferred: a dynamic program over the stages."""
    held, sums = present.stage_layers, LayerSums(present.profile)
    assert held is not None
    num_layers, num_stages = held.num_layers, len(rooms)
    # A layer counts one byte at least, so that layers stay where nothing is known of their size.
    sizes = [0, *accumulate(1 + sums.total("static_bytes", range(layer, layer + 1)) for layer in range(num_layers))]
    best: dict[int, tuple[int, LayerCounts]] = {0: (0, ())}
    for stage, room in enumerate(rooms):
        old, num_live = held.held(stage), present.cluster.num_live(stage)
        last = num_layers - least * (num_stages - stage - 1)
        found: dict[int, tuple[int, LayerCounts]] = {}
        for start, (cost, counts) in best.items():
            for stop in range(start + least, last + 1):
                if work[stop] - work[start] > room * (1 + 1e-12):
                    break
                new = range(max(0, start - held.num_shared), min(num_layers, stop + held.num_shared))
                overlap = range(max(new.start, old.start), max(new.start, old.start, min(new.stop, old.stop)))
                missing = sizes[new.stop] - sizes[new.start] - sizes[overlap.stop] + sizes[overlap.start]
                option = cost + num_live * missing, (*counts, stop - start)
                found[stop] = min(found.get(stop, option), option)
        best = found
    return best[num_layers][1] if num_layers in best else None


def layer_transfer_us(present: Problem, counts: LayerCounts) -> int:
    """The time until every live worker has the layers of its stage, if the stages have so many from then on.

    All copy at the same time. A layer comes from the workers that hold it, in turns, so a worker may send more than it receives.
    """
    held, sums = present.stage_layers, LayerSums(present.profile)
    assert held is not None
    wanted, stages = StageLayers(counts, present.shared_layers), range(len(counts))
    live = [present.cluster.num_live(stage) for stage in stages]
    old, new = [set(held.held(stage)) for stage in stages], [set(wanted.held(stage)) for stage in stages]
    received, sent = [0.0] * len(counts), [0.0] * len(counts)
    for layer in range(held.num_layers):
        size_bytes = sums.total("static_bytes", range(layer, layer + 1))
        receivers = [stage for stage in stages if layer in new[stage] - old[stage]]
        holders = [stage for stage in stages if layer in old[stage]]
        num_sent = sum(live[stage] for stage in receivers) / sum(live[stage] for stage in holders)
        for stage in receivers:
            received[stage] += size_bytes
        for stage in holders:
            sent[stage] += size_bytes * num_sent
    is_any = any(new[stage] - old[stage] for stage in stages)
    link = present.profile.peer_link
    link = replace(link, bytes_per_us=min(link.bytes_per_us, _MOST_BYTES_PER_US))
    return link.time_us(round(max(*received, *sent))) if is_any else 0
