"""From the load split to whole cuts: how many chains are cut where, which ones, and the assignment that follows.

At each boundary the split lies between two layers. So a share of the chains is cut before the layer and the others after it. The
chains of a share are spread evenly over the micro-batches of every pipeline. The first and the last micro-batches of a pipeline
are all cut at the same place: a layer that both stages compute would otherwise be in use from the first F of one stage to the
last W of the other, longer than a period.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from recycle.core.problem import Problem
from recycle.planner.model.assignment import Assignment, Bools, Ints, speeds_of
from recycle.planner.model.cut_balance import balance
from recycle.planner.model.load_split import WorkLine, split_points_us, work_line
from recycle.planner.model.lower_bound import Bounds
from recycle.planner.model.routing import routes_by_speed

_UNLIMITED = 1 << 60

# So many micro-batches at either end of a pipeline's are cut at one place.
_NUM_ENDS = 2
# The idle time that `Bounds` proves for uncut micro-batches is only a guess with cuts: all, half and none of it are tried.
_IDLE_SHARES = (1.0, 0.5, 0.0)


def assign(problem: Problem, lost_us: Sequence[float] | None = None) -> Assignment:
    """Return routes and cuts of a problem that give every live worker as even a share of the work as whole layers allow.

    `lost_us` is the time in an iteration that the workers of each stage are taken to be idle.
    """
    pipeline = routes_by_speed(problem)
    if problem.held_layers is None or problem.shape.num_stages == 1:
        return Assignment.of(problem, pipeline)
    line, is_end = work_line(problem, lost_us), _ends(problem)
    positions = _whole_positions(problem, line, is_end)
    _balance(problem, line, positions, pipeline, is_end)
    return Assignment.of(problem, pipeline, positions - np.array(problem.held_layers.sums.bounds, dtype=np.int64)[:, None])


def assignments(problem: Problem) -> Iterator[Assignment]:
    """Yield different assignments worth trying, the most promising first: cuts by work and idle time, by work alone, and none."""
    if problem.held_layers is None:
        yield assign(problem)
        return
    bounds, cluster = Bounds(problem), problem.cluster
    lost = [bounds.lost_us(stage, cluster.num_live(stage)) for stage in range(problem.shape.num_stages)]
    seen = set()
    for share in _IDLE_SHARES:
        made = assign(problem, [share * each for each in lost])
        if made.offsets.tobytes() not in seen:
            seen.add(made.offsets.tobytes())
            yield made
    uncut = Assignment.of(problem, routes_by_speed(problem))
    if uncut.offsets.tobytes() not in seen:
        yield uncut


def _ends(problem: Problem) -> Bools:
    """The chains at either end of their pipeline's micro-batches; none where that would leave fewer than half to be cut."""
    shape = problem.shape
    num = min(_NUM_ENDS, shape.num_microbatches // 4)
    index = np.arange(shape.num_chains) % shape.num_microbatches
    ends: Bools = (index < num) | (index >= shape.num_microbatches - num)
    return ends


def _whole_positions(problem: Problem, line: WorkLine, is_end: Bools) -> Ints:
    """The layer at which each chain is cut, by boundary: the split, rounded so that its mean over the chains is kept."""
    shape, num_stages = problem.shape, problem.shape.num_stages
    positions = np.zeros((num_stages + 1, shape.num_chains), dtype=np.int64)
    positions[-1] = line.highs[-1]
    for boundary, point in enumerate(split_points_us(line)[1:-1], start=1):
        low, high = line.lows[boundary], line.highs[boundary]
        layer = min(max(low, int(np.searchsorted(line.work_us, point + 0.5, side="right")) - 1), high)
        rest = (point - line.work_us[layer]) / (line.work_us[layer + 1] - line.work_us[layer]) if layer < high else 0.0
        positions[boundary] = layer + _spread(problem, min(max(rest, 0.0), 1.0), is_end)
    held = problem.held_layers
    assert held is not None
    for boundary in range(1, num_stages):  # every stage keeps a layer of every chain
        positions[boundary] = np.maximum(positions[boundary], positions[boundary - 1] + 1)
    for boundary in reversed(range(1, num_stages)):
        positions[boundary] = np.minimum(positions[boundary], positions[boundary + 1] - 1)
    return positions


def _spread(problem: Problem, share: float, is_end: Bools) -> Ints:
    """1 for a share of the chains of every pipeline, spread evenly over its micro-batches, and 0 for the others.

    All boundaries choose in the same order: a chain that is cut late at one boundary is cut late at the next, so that it has as
    many layers between them as the others, or one more. The ends of a pipeline's micro-batches go with the majority.
    """
    shape = problem.shape
    made = np.zeros((shape.num_pipelines, shape.num_microbatches), dtype=np.int64)
    ends = is_end[: shape.num_microbatches]
    inner = np.flatnonzero(~ends)
    for pipeline in range(shape.num_pipelines):
        # Different remainders are rounded up in different pipelines, so that all pipelines together have the share.
        num = int(share * shape.num_microbatches + (pipeline + 0.5) / shape.num_pipelines)
        made[pipeline, ends] = 2 * num > shape.num_microbatches
        num = min(max(num - int(made[pipeline].sum()), 0), len(inner))
        order = np.argsort(_scattered((np.arange(len(inner)) + pipeline) % len(inner)), kind="stable")
        made[pipeline, inner[order[:num]]] = 1
    return made.reshape(-1)


def _balance(problem: Problem, line: WorkLine, positions: Ints, pipeline: Ints, is_end: Bools) -> None:
    shape, held = problem.shape, problem.held_layers
    assert held is not None
    activations = np.arange(held.sums.num_layers + 1, dtype=np.int64)
    if problem.memory.unit == "bytes":
        activations = np.array(held.sums.sums["activation_bytes"], dtype=np.int64)
    capacities = [problem.capacity(stage) for stage in range(shape.num_stages)]
    capacity = np.array([_UNLIMITED if each is None else each for each in capacities], dtype=np.int64)
    # A micro-batch of which one stage could not hold its part is cut at the base boundaries, where it fits.
    is_too_large = (np.diff(activations[positions], axis=0) > capacity[:, None]).any(axis=0)
    positions[:, is_too_large] = np.array(held.sums.bounds, dtype=np.int64)[:, None]
    index = np.arange(shape.num_chains) % shape.num_microbatches
    order = np.lexsort((np.arange(shape.num_chains), _scattered(index)))
    balance(
        order[~is_end[order]],
        positions,
        np.array(line.lows),
        np.array(line.highs),
        np.array(line.work_us, dtype=np.int64) // shape.num_chains,
        activations,
        capacity,
        pipeline,
        np.array(line.lost_us),
        speeds_of(problem),
    )


def _scattered(index: Ints) -> Ints:
    """Numbers whose order visits the indices evenly: the bits of each index in reverse."""
    bits = max(1, int(index.max()).bit_length())
    reverse: Ints = sum(((index >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))  # type: ignore[assignment]
    return reverse
