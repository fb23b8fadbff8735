"""Improvement: turn dials of the list scheduler near a good setting."""

import numpy as np

from recycle.planner import kernel
from recycle.planner.schedule import Ints


def neighbours(rng: np.random.Generator, dials: Ints, num_microbatches: int) -> Ints:
    """Return a setting that differs from `dials` in one dial over a run of stages."""
    changed = dials.copy()
    num_stages = len(dials)
    first = int(rng.integers(num_stages))
    last = min(num_stages, first + 1 + int(rng.integers(max(1, num_stages // 2))))
    dial = int(rng.choice([kernel.PUSH, kernel.PUSH, kernel.STASH, kernel.PATIENT_FOR, kernel.PATIENCE_US]))
    step = int(rng.choice([-4, -2, -1, 1, 2, 4]))
    changed[first:last, dial] = np.maximum(0, changed[first:last, dial] + step)
    return changed
