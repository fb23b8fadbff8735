"""Forward-backward improvement: schedule a good schedule again backward in time, and the result forward.

Each pass takes its priorities from the order of the pass before, so that it keeps most of that schedule and improves the part
that it schedules first. docs/planner.md tells why that helps.
"""

from dataclasses import dataclass, replace

import numpy as np

from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.priority_kernel import priority_schedule
from recycle.planner.heuristic.search import ListSchedule, Search
from recycle.planner.model.assignment import Ints

# The largest shift of priorities, in lengths of the longest op.
_FARTHEST_SHIFT = 5


@dataclass(frozen=True, slots=True)
class ForwardBackwardSchedule:
    """A schedule, its score, and how long each stage waits for an urgent op: [0] in backward passes, [1] in forward ones."""

    starts: Ints
    score: tuple[int, int]
    patience: Ints

    @staticmethod
    def of(search: Search, found: ListSchedule) -> "ForwardBackwardSchedule":
        patience = np.full((2, len(found.starts[0])), _longest_us(search) // 2, np.int64)
        return ForwardBackwardSchedule(found.starts, found.score, patience)


def splits_all_backwards(search: Search) -> bool:
    return bool((search.work[kernel.WEIGHT_US] > 0).all())


def forward_backward(
    search: Search, schedule: ForwardBackwardSchedule, rng: np.random.Generator | None = None
) -> ForwardBackwardSchedule:
    """Return the schedule after a backward and a forward pass, or as it was if the backward pass fails.

    With a generator, one thing is changed at random: the patience, or the priorities of one pass.
    """
    patience, shift_at = schedule.patience, -1
    if rng is not None and rng.random() < 0.4:
        patience = _other_patience(rng, patience, _longest_us(search))
    elif rng is not None:
        shift_at = int(rng.integers(2))
    starts = schedule.starts
    priorities = _shifted(rng, search, starts) if rng is not None and shift_at == 0 else starts
    back = _backward_pass(search, priorities, starts[kernel.F].min(axis=1), patience[0])
    if back is None:
        return schedule
    priorities = _shifted(rng, search, back) if rng is not None and shift_at == 1 else back
    return replace(_forward_pass(search, priorities, patience[1]), patience=patience)


def _backward_pass(search: Search, starts: Ints, first: Ints, patience: Ints) -> Ints | None:
    """The starts after scheduling from the end, the op that ended last first; None if memory was blocked."""
    lengths = search.work[: kernel.WEIGHT_US + 1]
    ends = starts + lengths
    # Staggered, the windows of all stages have the same length; else they end together. Reductions come after.
    closes = (first if search.problem.techniques.staggered else 0) - search.finish_us
    priority, release_us = (ends.max() - ends).reshape(-1), closes.max() - closes
    num_pipelines = search.problem.shape.num_pipelines
    out, order = priority_schedule(
        search.pipeline, search.work, search.costs, priority, release_us, patience, num_pipelines, True
    )
    back: Ints = -(out.reshape(starts.shape) + lengths)
    return back if order.size == starts.size else None


def _forward_pass(search: Search, priorities: Ints, patience: Ints) -> ForwardBackwardSchedule:
    """The justified schedule in which the lowest priority value goes first."""
    priority, release_us = (priorities - priorities.min()).reshape(-1), np.zeros(len(patience), np.int64)
    num_pipelines = search.problem.shape.num_pipelines
    out, order = priority_schedule(
        search.pipeline, search.work, search.costs, priority, release_us, patience, num_pipelines, False
    )
    starts = out.reshape(priorities.shape)
    kernel.justify(search.pipeline, search.work, search.costs, search.is_fused, num_pipelines, order, starts)
    return ForwardBackwardSchedule(starts, search.score(starts), patience)


def _other_patience(rng: np.random.Generator, patience: Ints, longest_us: int) -> Ints:
    """Patience that differs over a run of stages, in one of the two passes."""
    changed = patience.copy()
    row = changed[int(rng.integers(2)), _some_stages(rng, patience.shape[1])]
    step = max(1, longest_us // 4)
    row[:] = rng.integers(longest_us + 1) if rng.random() < 0.3 else row + rng.integers(-step, step + 1)
    return np.clip(changed, 0, longest_us)


def _shifted(rng: np.random.Generator, search: Search, priorities: Ints) -> Ints:
    """Priorities of which one kind, over a run of stages and from or until some time, is earlier or later than it was."""
    changed = priorities.copy()
    part = changed[int(rng.integers(3)), _some_stages(rng, priorities.shape[1])]
    least, most = int(priorities.min()), int(priorities.max())
    side = rng.random()
    when = int(rng.integers(least, most + 1))
    where = part >= least if side < 0.4 else part >= when if side < 0.8 else part < when
    far = max(1, int(_FARTHEST_SHIFT * _longest_us(search) * rng.random() ** 2))
    part[where] += far if rng.random() < 0.5 else -far
    return changed


def _some_stages(rng: np.random.Generator, num_stages: int) -> slice:
    first = int(rng.integers(num_stages))
    return slice(first, first + 1 + int(rng.integers(num_stages)))


def _longest_us(search: Search) -> int:
    return search.longest_us
