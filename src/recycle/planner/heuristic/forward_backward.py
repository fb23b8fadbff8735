"""Swinging: a good schedule is scheduled anew backwards in time, and the result forwards again.

A list scheduler is good at what it does first. Forwards that is the warm-up: gradients come back just in time. Backwards it is
the end: the last gradients climb the stages without a stop, and each stage keeps as many W's as it has time for after its own.
Each pass takes the order of the pass before it for its keys, so that it keeps what was good and mends what it comes to first.
(In project scheduling this is known as forward-backward improvement.)
"""

from dataclasses import dataclass, replace

import numpy as np

from recycle.planner.heuristic import list_scheduling_kernel as kernel
from recycle.planner.heuristic.priority_kernel import keyed_schedule
from recycle.planner.heuristic.search import Found, Search
from recycle.planner.model.schedule import Ints

# How far, in longest ops, keys are shifted at most.
_FARTHEST_SHIFT = 5


@dataclass(frozen=True, slots=True)
class Swing:
    """A schedule, how good it is, and how long each stage waits for a pressing op: backwards, then forwards."""

    starts: Ints
    score: tuple[int, int]
    patience: Ints

    @staticmethod
    def of(search: Search, found: Found) -> "Swing":
        patience = np.full((2, len(found.starts[0])), _longest_us(search) // 2, np.int64)
        return Swing(found.starts, found.score, patience)


def can_swing(search: Search) -> bool:
    """Say whether every backward pass of the problem is split in two."""
    return bool((search.costs[:, kernel.WEIGHT_US] > 0).all())


def swung(search: Search, swing: Swing, rng: np.random.Generator | None = None) -> Swing:
    """The schedule after a swing back and forth, with one thing changed at random if there is a generator; or as it was."""
    patience, shift_at = swing.patience, -1
    if rng is not None and rng.random() < 0.4:
        patience = _other_patience(rng, patience, _longest_us(search))
    elif rng is not None:
        shift_at = int(rng.integers(2))
    keys = _shifted(rng, search, swing.starts) if rng is not None and shift_at == 0 else swing.starts
    back = _backwards(search, keys, swing.starts[kernel.F].min(axis=1), patience[0])
    if back is None:
        return swing
    keys = _shifted(rng, search, back) if rng is not None and shift_at == 1 else back
    return replace(_forwards(search, keys, patience[1]), patience=patience)


def _backwards(search: Search, starts: Ints, first: Ints, patience: Ints) -> Ints | None:
    """The starts after scheduling from the end, what ended last first; none if memory got blocked."""
    lengths = search.costs[:, : kernel.WEIGHT_US + 1].T[:, :, None]
    ends = starts + lengths
    # Staggered, the windows of the stages are as long as each other; else they end together. Reductions come after.
    closes = (first if search.problem.techniques.staggered else 0) - search.finish_us
    out, order = np.empty(starts.size, np.int64), np.empty(starts.size, np.int64)
    placed = keyed_schedule(
        search.pipeline,
        search.costs,
        (ends.max() - ends).reshape(-1),
        closes.max() - closes,
        patience,
        search.problem.shape.num_pipelines,
        True,
        out,
        order,
    )
    back: Ints = -(out.reshape(starts.shape) + lengths)
    return back if placed == starts.size else None


def _forwards(search: Search, keys: Ints, patience: Ints) -> Swing:
    """The schedule in which the least key goes first, tightened."""
    starts, order = np.empty(keys.shape, np.int64), np.empty(keys.size, np.int64)
    opens = np.zeros(len(patience), np.int64)
    num_pipelines = search.problem.shape.num_pipelines
    flat_keys = (keys - keys.min()).reshape(-1)
    keyed_schedule(search.pipeline, search.costs, flat_keys, opens, patience, num_pipelines, False, starts.reshape(-1), order)
    kernel.tighten(search.pipeline, search.costs, search.is_fused, num_pipelines, order, starts)
    return Swing(starts, search.score(starts), patience)


def _other_patience(rng: np.random.Generator, patience: Ints, longest_us: int) -> Ints:
    """Patience that differs over a run of stages, in one direction."""
    changed = patience.copy()
    row = changed[int(rng.integers(2)), _some_stages(rng, patience.shape[1])]
    step = max(1, longest_us // 4)
    row[:] = rng.integers(longest_us + 1) if rng.random() < 0.3 else row + rng.integers(-step, step + 1)
    return np.clip(changed, 0, longest_us)


def _shifted(rng: np.random.Generator, search: Search, keys: Ints) -> Ints:
    """Keys of which one kind, over a run of stages and from or until some time, is earlier or later than it was."""
    changed = keys.copy()
    part = changed[int(rng.integers(3)), _some_stages(rng, keys.shape[1])]
    least, most = int(keys.min()), int(keys.max())
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
    return int(search.costs[:, : kernel.WEIGHT_US + 1].max())
